"""Cost of inspection for the job whose TransferQueue is inspected.

``python -m integration.benchmarks.inspecting_any_queue`` starts TransferQueue with
``transfer_queue.init`` and fills a partition. Then a job puts a field of 32 samples and claims 32
samples, over and over. In every other round a `QueueInspector` reads the queue as often as the
admin service does, while its partition changes with each operation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import ray
import torch
import transfer_queue as tq
from integration.benchmarks.summary import Summary
from omegaconf import OmegaConf
from tensordict import TensorDict

from dataplane_tq import QueueInspector, start_local_ray

SIZES, FIELDS, ROWS, ROUNDS, WARM_UPS = (1_000, 100_000), 8, 32, 20, 2
ROUND_S = 3.0
POLL_S = 1.0
"""The admin service's default of ``--poll-s``."""
TIMEOUT_S = 60.0
_CONFIG = {
    "controller": {"polling_mode": True},
    "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": 1}},
}


@contextmanager
def inspected(inspector: QueueInspector) -> Iterator[None]:
    """Read the queue in another thread, as the admin service does."""
    ended = threading.Event()

    def read() -> None:
        while not ended.wait(POLL_S):
            for partition in inspector.list_partitions():
                inspector.scan_states(partition.partition_id)
            inspector.list_storage()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def put(partition: str, first: int, count: int, *fields: str) -> None:
    """Put ``fields`` of samples."""
    columns = {name: torch.zeros(count) for name in fields}
    keys = [str(key) for key in range(first, first + count)]
    batch = TensorDict(columns, batch_size=[count])
    tq.kv_batch_put(keys=keys, partition_id=partition, fields=batch)


class Job:
    """The job: each operation takes the next samples of a partition."""

    def __init__(self, samples: int) -> None:
        self._partition = f"of {samples}"
        self._samples = samples
        self._next = 0
        for first in range(0, samples, 10_000):
            count = min(10_000, samples - first)
            put(self._partition, first, count, *(f"f{n}" for n in range(FIELDS - 1)))

    def run(self) -> dict[str, list[float]]:
        """Repeat both operations for a round; return their seconds."""
        seconds: dict[str, list[float]] = {"put": [], "claim": []}
        until = time.perf_counter() + ROUND_S
        while (start := time.perf_counter()) < until:
            put(self._partition, self._next, ROWS, "last")
            middle = time.perf_counter()
            tq.get_client().get_meta(["f0"], ROWS, self._partition, task_name="train")
            seconds["put"].append(middle - start)
            seconds["claim"].append(time.perf_counter() - middle)
            self._next += ROWS
            if self._next + ROWS > self._samples:
                self._next = 0
                tq.get_client().reset_consumption("train", self._partition)
        return seconds


def compare(job: Job, inspector: QueueInspector, samples: int) -> None:
    """Alternate rounds with and without inspection, and print ratios of their latencies."""
    ratios: dict[tuple[str, float], list[float]] = {}
    without: dict[tuple[str, float], list[float]] = {}
    for number in range(WARM_UPS + ROUNDS):
        rounds = {}
        for watched in (number % 2 == 0, number % 2 == 1):
            with inspected(inspector) if watched else nullcontext():
                rounds[watched] = job.run()
        for operation in ("put", "claim") if number >= WARM_UPS else ():
            for share in (0.5, 0.99):
                with_s, without_s = (
                    float(np.quantile(rounds[watched][operation], share))
                    for watched in (True, False)
                )
                ratios.setdefault((operation, share), []).append(with_s / without_s)
                without.setdefault((operation, share), []).append(without_s)
    for (operation, share), values in ratios.items():
        ratio = Summary.of(values)
        print(
            f"{samples} samples, {operation} of {ROWS}, p{share * 100:.0f}: "
            f"{Summary.of(without[operation, share]).value * 1000:.2f} ms without inspection; "
            f"with it {ratio.value:.2f} times that (IQR {ratio.spread:.2f}, {ROUNDS} rounds)",
            flush=True,
        )


def main() -> None:
    start_local_ray(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    tq.init(OmegaConf.create(_CONFIG))
    inspector = QueueInspector(ray.get_runtime_context().gcs_address, timeout_s=TIMEOUT_S)
    for samples in SIZES:
        compare(Job(samples), inspector, samples)
    inspector.close()
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
