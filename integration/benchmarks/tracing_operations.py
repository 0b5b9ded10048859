"""Durations of single traced operations: a span, an event, and the instrumented client."""

from __future__ import annotations

import time
from typing import Any

import torch
from integration.benchmarks.summary import Summary
from integration.benchmarks.tracing_switch import switch
from tensordict import TensorDict

from dataplane_core import InMemoryDataPlaneClient, telemetry
from observability import InstrumentedDataPlaneClient, emit

_IDS = 512
_REPETITIONS = 1_000


def time_operations() -> dict[str, Summary]:
    """Time single operations in this process, whose SDK is set up."""
    ids = [f"sample-{number:08d}" for number in range(_IDS)]
    batch = TensorDict({"x": torch.zeros(_IDS)}, batch_size=[_IDS])

    def span() -> None:
        with telemetry.span("bench", "overhead"):
            pass

    switch(object(), traced=True)
    step = telemetry.step_context("bench", 0, 0)
    with step, telemetry.span("bench"), InMemoryDataPlaneClient() as inner:
        summaries = {
            "span": _timed(span, _REPETITIONS),
            "event_512": _timed(lambda: emit("put", "bench", ids, bytes=1), _REPETITIONS // 10),
        }
        outer = InstrumentedDataPlaneClient(inner)
        inner.register_partition("bench", ["x"], _IDS, [])
        for name, call in (
            ("put_512", lambda client: client.put_samples(ids, "bench", batch)),
            ("get_512", lambda client: client.get_samples(ids, "bench", ["x"])),
        ):
            pairs = [
                (
                    _once(lambda call=call: call(outer)),
                    _once(lambda call=call: call(inner)),
                )
                for _ in range(_REPETITIONS // 10)
            ]
            summaries[f"{name}_longer"] = Summary.of([traced - plain for traced, plain in pairs])
    return summaries


def _timed(action: Any, repetitions: int) -> Summary:
    return Summary.of([_once(action) for _ in range(repetitions)])


def _once(action: Any) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started
