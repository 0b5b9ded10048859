"""Cost of the TransferQueue instrumentor for a job's puts, claims and gets.

``python -m integration.benchmarks.instrumented_queue`` starts TransferQueue with
``transfer_queue.init``. Then a job puts, claims, gets and clears 32 tagged samples, over and over.
In every other round the instrumentor is on. The telemetry goes to a receiver in a separate process
with the lowest priority; the SDK's threads run in all rounds.
"""

from __future__ import annotations

import itertools
import time
from typing import Any  # Any: TransferQueue's client has no types

import ray
import torch
import transfer_queue as tq
from integration.benchmarks.summary import Summary
from integration.benchmarks.tracing_collector import collector
from omegaconf import OmegaConf
from tensordict import TensorDict

from dataplane_tq import start_local_ray
from observability import setup
from observability.adapters.transfer_queue import TransferQueueInstrumentor

ROWS, TOKENS, ROUNDS, WARM_UPS = 32, 512, 20, 2
ROUND_S = 3.0
OPERATIONS = ("put", "claim", "get")
_PARTITION = "train"
_CONFIG = {
    "controller": {"polling_mode": True},
    "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 1}},
}


class Job:
    """The job: each cycle puts, claims, gets and clears its samples."""

    def __init__(self) -> None:
        self._client: Any = tq.get_client()
        self._fields = TensorDict({"ids": torch.zeros(ROWS, TOKENS)}, batch_size=[ROWS])
        self._numbers = itertools.count()

    def run(self) -> dict[str, list[float]]:
        """Repeat the cycle for a round; return the seconds of each operation."""
        seconds: dict[str, list[float]] = {name: [] for name in OPERATIONS}
        until = time.perf_counter() + ROUND_S
        while time.perf_counter() < until:
            keys = [f"sample-{next(self._numbers):08d}" for _ in range(ROWS)]
            tags = [{"uid": key} for key in keys]
            times = [time.perf_counter()]
            tq.kv_batch_put(keys=keys, partition_id=_PARTITION, fields=self._fields, tags=tags)
            times.append(time.perf_counter())
            # The synchronous methods are bound once, so they would not follow the instrumentor.
            meta = self._client._run_coroutine(
                self._client.async_get_meta(["ids"], ROWS, _PARTITION, task_name="train")
            )
            times.append(time.perf_counter())
            self._client._run_coroutine(self._client.async_get_data(meta))
            times.append(time.perf_counter())
            tq.kv_clear(keys=keys, partition_id=_PARTITION)
            for name, (began, ended) in zip(OPERATIONS, itertools.pairwise(times), strict=True):
                seconds[name].append(ended - began)
        return seconds


def compare(job: Job, instrumentor: TransferQueueInstrumentor) -> None:
    """Alternate rounds with and without the instrumentor, and print ratios of their medians."""
    ratios: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    without: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    for number in range(WARM_UPS + ROUNDS):
        rounds = {}
        for traced in (number % 2 == 0, number % 2 == 1):
            if traced:
                instrumentor.instrument()
            rounds[traced] = job.run()
            if traced:
                instrumentor.uninstrument()
        for name in OPERATIONS if number >= WARM_UPS else ():
            with_s, without_s = (Summary.of(rounds[traced][name]).value for traced in (True, False))
            ratios[name].append(with_s / without_s)
            without[name].append(without_s)
    for name, values in ratios.items():
        ratio = Summary.of(values)
        print(
            f"{name} of {ROWS}: {Summary.of(without[name]).value * 1000:.2f} ms without the "
            f"instrumentor; with it {ratio.value:.2f} times that (IQR {ratio.spread:.2f}, "
            f"{ROUNDS} rounds)",
            flush=True,
        )


def main() -> None:
    start_local_ray(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    tq.init(OmegaConf.create(_CONFIG))
    with collector() as receiver:
        telemetry = setup("bench", endpoint=receiver.endpoint)
        compare(Job(), TransferQueueInstrumentor())
        telemetry.shutdown()
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
