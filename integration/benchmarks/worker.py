"""`Worker`: the producer or the consumer, a Ray actor that hosts every system and times operations.

The clock starts and stops here, so the Ray call of an operation and its answer are not timed.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: a system's put passes any handle to its get

import numpy as np
import ray
from integration.benchmarks.cases import (
    CLAIM_FIELDS,
    FIELDS,
    SMALL_FIELD,
    WRITTEN_BACK,
    Batch,
    Case,
    check_answer,
)
from integration.benchmarks.garbage import freeze_garbage
from integration.benchmarks.systems import TASKS, Operation, System, data_plane, usual  # noqa: F401

_SLICES = 8


@dataclass(frozen=True)
class Timed:
    """Cost of one operation.

    Attributes:
        seconds: wall time.
        faults: pages that any thread of its process touched for the first time.
        handle: handle of a put, for the system's get.
    """

    seconds: float
    faults: int
    handle: Any


class Worker:
    """Process of the benchmark; it imports all systems' modules when it starts."""

    def __init__(self) -> None:
        self._systems: dict[str, Any] = {}
        self._batch: Batch | None = None

    def connect(self, systems: Mapping[str, Callable[[], System]]) -> dict[str, Any]:
        """Build systems in this process; return the operations of each."""
        self._systems = {name: build() for name, build in systems.items()}
        return {name: system.operations for name, system in self._systems.items()}

    def prepare(self, case: Case) -> None:
        """Build the batch of a case in the form of every system, before anything is timed."""
        self._batch = Batch(case)
        _ = self._batch.jagged, self._batch.jagged_written_back, self._batch.flat

    def begin(self, system: str, partition: str, rows: int) -> None:
        """Call `System.begin`."""
        self._systems[system].begin(partition, rows)

    def end(self, system: str, partition: str) -> None:
        """Call `System.end`."""
        self._systems[system].end(partition)

    def fill(
        self, system: str, partition: str, rows: int, field: str, tasks: Sequence[str]
    ) -> None:
        """Call `System.fill`."""
        self._systems[system].fill(partition, rows, field, tasks)

    def run(self, system: str, operation: Operation, partition: str, handle: Any) -> Timed:
        """Run one operation on the batch, and time only that."""
        target, batch = self._systems[system], self.batch
        faults = _page_faults()
        started = time.perf_counter()
        match operation:
            case Operation.PUT:
                handle = target.put(batch, partition)
            case Operation.GET:
                # Assigned, so that the answer is not freed while the clock runs.
                _answer = target.get(batch, partition, FIELDS, slice(None), handle)
            case Operation.SLICES8:
                size = len(batch.ids) // _SLICES
                for start in range(0, len(batch.ids), size):
                    target.get(batch, partition, FIELDS, slice(start, start + size), handle)
            case Operation.ONE_FIELD:
                target.get(batch, partition, [SMALL_FIELD], slice(None), handle)
            case Operation.WRITE_BACK:
                target.write_back(batch, partition)
            case Operation.CLAIM_32:
                target.claim(partition, TASKS[0], CLAIM_FIELDS, 32)
            case Operation.CLAIM_ALL:
                target.claim(partition, TASKS[1], CLAIM_FIELDS, len(batch.ids))
            case Operation.CLEAR:
                target.clear(batch, partition)
            case _:
                raise ValueError(f"{operation!r} is derived and cannot be run")
        seconds = time.perf_counter() - started
        return Timed(seconds, _page_faults() - faults, handle)

    def check(self, system: str, partition: str, handle: Any) -> None:
        """Read everything that was put; raise `WrongAnswer` if it differs."""
        target, batch = self._systems[system], self.batch
        names = list(FIELDS)
        if Operation.WRITE_BACK in target.operations:
            names.append(WRITTEN_BACK)
        answer = target.get(batch, partition, names, slice(None), handle)
        check_answer(batch, names, answer, system=system)

    def claims(
        self, partitions: Mapping[str, str], task: str, field: str, plan: Sequence[int]
    ) -> dict[str, tuple[list[float], int]]:
        """Claim each size of ``plan`` with every system, one claim at a time.

        Args:
            partitions: system name to its partition.
            task: task that claims.
            field: required field.
            plan: sizes of the claims, in order.

        Returns:
            System name to the seconds of each claim, and the total of claimed samples.
        """
        seconds: dict[str, list[float]] = {system: [] for system in partitions}
        claimed = dict.fromkeys(partitions, 0)
        for count in plan:
            for system, partition in partitions.items():
                target = self._systems[system]
                started = time.perf_counter()
                size = target.claim(partition, task, [field], count)
                seconds[system].append(time.perf_counter() - started)
                claimed[system] += size
        return {system: (seconds[system], claimed[system]) for system in partitions}

    def inspect(
        self, system: str, partition: str, field: str, times: int, until: int
    ) -> dict[str, list[float]]:
        """Inspect a partition, at least ``times`` and until it has ``until`` rows.

        Returns:
            Name of each operation to its seconds.
        """
        target = self._systems[system]
        seconds: dict[str, list[float]] = {}
        rows = 0
        while rows < until or len(seconds.get("count", ())) < times:
            started = time.perf_counter()
            rows = target.summarize(partition)
            summarized = time.perf_counter()
            target.page(partition, rows // 2, 100)
            paged = time.perf_counter()
            target.count(partition, TASKS[0], field)
            counted = time.perf_counter()
            seconds.setdefault("summaries", []).append(summarized - started)
            seconds.setdefault("page", []).append(paged - summarized)
            seconds.setdefault("count", []).append(counted - paged)
        return seconds

    def put_small(
        self, system: str, partition: str, field: str, prefix: str, times: int
    ) -> list[float]:
        """Put 32 new rows with a small field ``times`` times; return the seconds of each."""
        target = self._systems[system]
        seconds = []
        for number in range(times):
            ids = [f"{prefix}-{number}-{row}" for row in range(32)]
            started = time.perf_counter()
            target.put_small(partition, ids, field)
            seconds.append(time.perf_counter() - started)
        return seconds

    def fill_object_store(self, objects: int, size: int) -> list[Any]:
        """Write objects, to touch the memory of Ray's object store in this process."""
        return [ray.put(np.zeros(size, dtype=np.uint8)) for _ in range(objects)]

    def read_object_store(self, references: list[Any]) -> None:
        """Touch the same memory in this process."""
        for reference in references:
            ray.get(reference).max()

    def freeze_garbage(self) -> None:
        """Freeze garbage collection: see `freeze_garbage`."""
        freeze_garbage()

    def close(self) -> None:
        """Disconnect every system."""
        for system in self._systems.values():
            system.close()
        self._systems = {}

    @property
    def batch(self) -> Batch:
        """Batch of `prepare`."""
        if self._batch is None:
            raise RuntimeError("Worker.prepare was not called; it builds the batch")
        return self._batch


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
