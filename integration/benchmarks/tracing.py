"""What tracing costs: the same GRPO step with tracing off, on and verbose, in shuffled rounds.

Every step is the same one: the same prompts, the same random numbers, and a learning rate of 0, so
that the weights stay. And every step runs in the same processes, since two sets of processes differ
by more than what is measured: before a step they are switched between observed clients and an SDK,
and bare clients and OpenTelemetry's API alone. One more untraced step of each round says how far
two equal ones differ.

What is told goes to a receiver in a process of its own with the lowest priority, since a collector
usually runs elsewhere.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import ray
import torch
from integration.benchmarks.harness import Summary
from integration.benchmarks.results_file import Entry
from integration.benchmarks.worker import freeze_garbage
from opentelemetry._logs import NoOpLogger
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.trace import NoOpTracer
from tensordict import TensorDict

from dataplane_core import DataPlaneClient, InMemoryDataPlaneClient, telemetry
from grpo_trainer.config import TrainerConfig, load_config
from grpo_trainer.inputs import RunInputs, read_inputs
from grpo_trainer.policy import Policy
from grpo_trainer.prompts import PromptStream
from grpo_trainer.reporting import Reporting
from grpo_trainer.run_actors import GENERATION, RunActors
from grpo_trainer.step import GRPOStep, StepReport
from grpo_trainer.training import initial_model
from grpo_trainer.weight_sync import RayObjectWeightSync
from observability import InstrumentedDataPlaneClient, ObservedClient, emit, lifecycle, meters
from observability.receiver import Receiver

Mode = Literal["off", "off_again", "on", "verbose"]

QUICK_ROUNDS, FULL_ROUNDS = 10, 40
_QUICK_MODES: tuple[Mode, ...] = ("off", "on")
_FULL_MODES: tuple[Mode, ...] = ("off", "off_again", "on", "verbose")
_WARM_UPS = 2
_SEED = 20_261
_IDS = 512
_REPETITIONS = 2_000


TRACING_HEADINGS = [
    "tracing",
    "step, p50 ms",
    "IQR",
    "longer, % (IQR)",
    "CPU, p50 ms",
    "more CPU, % (IQR)",
    "spans",
    "events",
    "steps",
]


@dataclass(frozen=True)
class TracingCost:
    """What was measured.

    Attributes:
        seconds: by mode, of each round's step.
        cpu_seconds: by mode, of all processes of each round's step, the driver's included.
        spans: by mode, of one step.
        events: by mode, of one step.
        micros: microseconds of a span, an event of 512 samples, and what a put and a get of an
            instrumented client take longer.
    """

    seconds: dict[Mode, list[float]]
    cpu_seconds: dict[Mode, list[float]]
    spans: dict[Mode, int]
    events: dict[Mode, int]
    micros: dict[str, Summary]

    def overhead(self, mode: Mode) -> Summary:
        """Percent by which a step takes longer than the untraced one of its round."""
        return _percent(self.seconds[mode], self.seconds["off"])

    def cpu_overhead(self, mode: Mode) -> Summary:
        """Percent by which a step needs more CPU time, in all processes together."""
        return _percent(self.cpu_seconds[mode], self.cpu_seconds["off"])

    def rows(self) -> list[list[str]]:
        """For a table with `TRACING_HEADINGS`."""
        found = []
        for mode, seconds in self.seconds.items():
            step, cpu = Summary.of(seconds), Summary.of(self.cpu_seconds[mode])
            longer, more = self.overhead(mode), self.cpu_overhead(mode)
            found.append(
                [
                    mode.replace("_", " "),
                    f"{step.value * 1e3:.0f}",
                    f"{step.spread * 1e3:.0f}",
                    "" if mode == "off" else f"{longer.value:+.2f} ({longer.spread:.2f})",
                    f"{cpu.value * 1e3:.0f}",
                    "" if mode == "off" else f"{more.value:+.2f} ({more.spread:.2f})",
                    str(self.spans.get(mode, "")),
                    str(self.events.get(mode, "")),
                    str(step.count),
                ]
            )
        return found

    def entries(self) -> list[Entry]:
        """For the file of results."""
        names = {"on": "step", "verbose": "step_verbose", "off_again": "step_noise"}
        found = []
        for mode, name in names.items():
            if mode in self.seconds:
                for what, summary in (("", self.overhead(mode)), ("_cpu", self.cpu_overhead(mode))):
                    found.append(_entry(f"trace.{name}{what}_overhead_pct", summary, "%"))
        for mode in self.spans:
            suffix = "" if mode == "on" else f"_{mode}"
            for name, counted in (("spans", self.spans), ("events", self.events)):
                found.append(
                    Entry(f"trace.{name}_per_step{suffix}", counted[mode], "1", None, 0.0, 1)
                )
        step = Summary.of(self.seconds["off"])
        found.append(
            Entry("trace.step_off_ms", step.value * 1e3, "ms", None, step.spread * 1e3, step.count)
        )
        for name, summary in self.micros.items():
            found.append(
                Entry(
                    f"trace.{name}_us",
                    summary.value * 1e6,
                    "us",
                    None,
                    summary.spread * 1e6,
                    summary.count,
                )
            )
        return found


def measure_tracing(*, full: bool) -> TracingCost:
    """Run the rounds; starts and stops a Ray and a data plane of its own."""
    modes = _FULL_MODES if full else _QUICK_MODES
    with tempfile.TemporaryDirectory(prefix="bench-trace-") as folder, _collector() as collector:
        config = _config(Path(folder), collector.endpoint)
        inputs = read_inputs(config)
        model = str(initial_model(config, Path(folder)))
        reporting = Reporting("bench", collector.endpoint)
        with contextlib.ExitStack() as stack:
            stack.callback(reporting.start("grpo.driver").shutdown)
            actors = RunActors(config, model=model, tokenizer=inputs.tokenizer, reporting=reporting)
            stack.callback(actors.close)
            steps = Steps(config, inputs, actors)
            order = random.Random(_SEED)
            seconds: dict[Mode, list[float]] = defaultdict(list)
            cpu_seconds: dict[Mode, list[float]] = defaultdict(list)
            rounds = FULL_ROUNDS if full else QUICK_ROUNDS
            for number in range(_WARM_UPS + rounds):
                if number == _WARM_UPS:
                    steps.settle()
                for mode in order.sample(modes, len(modes)):
                    took, used = steps.run(mode, number)
                    if number >= _WARM_UPS:
                        seconds[mode].append(took)
                        cpu_seconds[mode].append(used)
            micros = _micros()
        told = collector.count()
    last = _WARM_UPS + rounds - 1
    reported: list[Mode] = [mode for mode in ("on", "verbose") if mode in modes]
    return TracingCost(
        dict(seconds),
        dict(cpu_seconds),
        {mode: told["spans"][steps.number(mode, last)] for mode in reported},
        {mode: told["events"][steps.number(mode, last)] for mode in reported},
        micros,
    )


def _config(folder: Path, endpoint: str) -> TrainerConfig:
    return load_config(
        overrides=[
            f"run.output={folder}",
            "policy.optimizer.learning_rate=0.0",
            "grpo.dynamic_sampling.enabled=false",
            "validation.every_steps=0",
            "tracing.enabled=true",
            f"tracing.endpoint={endpoint}",
        ]
    )


class Steps:
    """Runs the one step, traced or not."""

    def __init__(self, config: TrainerConfig, inputs: RunInputs, actors: RunActors) -> None:
        verbose = config.tracing.model_copy(update={"verbose": True})
        self._configs: dict[Mode, TrainerConfig] = defaultdict(lambda: config)
        self._configs["verbose"] = config.model_copy(update={"tracing": verbose})
        self._inputs = inputs
        self._actors = actors
        self._processes = [psutil.Process(), *psutil.Process().children(recursive=True)]

    @staticmethod
    def number(mode: Mode, round_number: int) -> int:
        """The step's number, by which it is known in what it tells."""
        return 2 * round_number + (mode == "verbose")

    def settle(self) -> None:
        """Freeze garbage collection everywhere, as `worker.freeze_garbage` says why."""
        freeze_garbage()
        self._everywhere(freeze_garbage)

    def run(self, mode: Mode, round_number: int) -> tuple[float, float]:
        """Seconds of one step by the clock, and of CPU in all processes."""
        actors, config = self._actors, self._configs[mode]
        traced = not mode.startswith("off")
        self._everywhere(partial(_switch, traced=traced))
        _switch(self, traced=traced)
        stepper = SameStep(
            config,
            calls=actors.calls,
            data_plane=actors.data_plane if traced else _bare(actors.data_plane),
            policy=Policy(actors.calls, actors.policy_workers, config.policy),
            weight_sync=RayObjectWeightSync(
                actors.calls, source=actors.policy_workers[0], targets=[GENERATION]
            ),
            prompts=PromptStream(self._inputs.training, seed=1, shuffle=True),
            run_id="bench",
        )
        before = self._cpu_seconds()
        started = time.perf_counter()
        stepper.run(self.number(mode, round_number), StepReport())
        took = time.perf_counter() - started
        return took, self._cpu_seconds() - before

    def _everywhere(self, function: Callable[[Any], None]) -> None:
        handles = self._actors.calls.handles
        ray.get([handle.__ray_call__.remote(function) for handle in handles])

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes if process.is_running()]
        return sum(found.user + found.system for found in times)


_CLIENTS = ("_client", "_dp_client")
_OBSERVED: dict[str, Any] = {}


def _switch(actor: object, *, traced: bool) -> None:
    """Give this process what a traced one has, or an untraced one.

    Only the SDK's sleeping threads stay. The observed client is kept aside meanwhile.
    """
    if not _OBSERVED:
        _OBSERVED["tracer"] = telemetry.tracer
        _OBSERVED["logger"] = lifecycle.get_logger
        _OBSERVED["meters"] = meters.get_meter_provider
        _OBSERVED.update((name, getattr(actor, name)) for name in _CLIENTS if hasattr(actor, name))
    telemetry.tracer = _OBSERVED["tracer"] if traced else NoOpTracer  # type: ignore[assignment]
    lifecycle.get_logger = _OBSERVED["logger"] if traced else NoOpLogger
    meters.get_meter_provider = _OBSERVED["meters"] if traced else NoOpMeterProvider
    for name in _CLIENTS:
        if name in _OBSERVED:
            setattr(actor, name, _OBSERVED[name] if traced else _bare(_OBSERVED[name]))


def _bare(client: DataPlaneClient) -> DataPlaneClient:
    while isinstance(client, ObservedClient):
        client = client.inner
    return client


class SameStep(GRPOStep):
    """Draws the same random numbers, whatever the number of the step."""

    def _stream(self, step: int) -> str:
        return "bench"


def _micros() -> dict[str, Summary]:
    """In this process, whose SDK is set up."""
    ids = [f"sample-{number:08d}" for number in range(_IDS)]
    batch = TensorDict({"x": torch.zeros(_IDS)}, batch_size=[_IDS])

    def span() -> None:
        with telemetry.span("bench", "overhead"):
            pass

    _switch(object(), traced=True)
    found = {
        "span": _timed(span, _REPETITIONS),
        "event_512": _timed(lambda: emit("put", "bench", ids, bytes=1), _REPETITIONS // 10),
    }
    with telemetry.step_context("bench", 0, 0), InMemoryDataPlaneClient() as inner:
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
            found[f"{name}_longer"] = Summary.of([traced - plain for traced, plain in pairs])
    return found


def _timed(action: Any, repetitions: int) -> Summary:
    return Summary.of([_once(action) for _ in range(repetitions)])


def _once(action: Any) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _percent(traced: Sequence[float], plain: Sequence[float]) -> Summary:
    return Summary.of((100 * (np.array(traced) / np.array(plain) - 1)).tolist())


def _entry(name: str, summary: Summary, unit: str) -> Entry:
    return Entry(name, summary.value, unit, "off", summary.spread, summary.count)


class Collector:
    """The handle of `_collector`'s process."""

    def __init__(self, endpoint: str, pipe: Connection) -> None:
        self.endpoint = endpoint
        self._pipe = pipe

    def count(self) -> dict[str, dict[int, int]]:
        """Spans and events by step; everything must have been sent."""
        self._pipe.send("count")
        counted: dict[str, dict[int, int]] = self._pipe.recv()
        return counted


@contextlib.contextmanager
def _collector() -> Iterator[Collector]:
    context = multiprocessing.get_context("spawn")
    pipe, other = context.Pipe()
    process = context.Process(target=_collect, args=(other,), daemon=True)
    process.start()
    try:
        yield Collector(pipe.recv(), pipe)
    finally:
        process.terminate()
        process.join()


def _collect(pipe: Connection) -> None:
    os.nice(19)
    with Receiver() as receiver:
        pipe.send(receiver.endpoint)
        pipe.recv()
        records = receiver.snapshot()
        counted: dict[str, dict[int, int]] = {"spans": {}, "events": {}}
        for name, found in (("spans", records.spans), ("events", records.events)):
            for record in found:
                step = record.attributes.get("rl.step")
                counted[name][step] = counted[name].get(step, 0) + 1
        pipe.send(counted)
        with contextlib.suppress(EOFError):
            pipe.recv()
