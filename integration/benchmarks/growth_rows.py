"""Duration of small operations, and the directory's memory, as a partition grows.

All partitions are in one store at once. A round takes them in shuffled order, and does the same
with each: put 32 rows, claim 32 under a lease, acknowledge them, clear them. So a partition's size
does not change, and noise of the machine hits all sizes alike. The smallest partition is measured
before as well, alone in the store: that shows costs that grow with the rows of all partitions.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from integration.benchmarks import cluster
from integration.benchmarks.garbage import freeze_garbage
from integration.benchmarks.growth_sample import PER_TOKEN, ROWS, TASK, TOKENS
from integration.benchmarks.growth_store import GrowingStore, growing_store, small_columns
from integration.benchmarks.results_file import Entry
from integration.benchmarks.summary import Summary

SEED = 20_262
ROWS_HEADINGS = [
    "rows in partition",
    "operation on 32 rows",
    "p50 ms",
    "IQR",
    "p99 ms",
    "x smallest",
    "times",
]
MEMORY_HEADINGS = [
    "rows in partition",
    "first claim ms",
    "directory, bytes a row",
    "directory, RSS MB",
]

_FILL = 512
"""Rows of a put while a partition is filled: the samples of one step."""
_UNIT_BYTES = 2 << 30
_MIN_ROWS_OF_MEMORY = 50_000
"""Minimum rows of a partition for which memory per row is reported."""


@dataclass(frozen=True)
class Partition:
    """A partition of one size.

    Attributes:
        label: part of the names of results.
        rows: number of rows.
        alone: whether it is measured while the store has no other partition.
    """

    label: str
    rows: int
    alone: bool = False

    @property
    def title(self) -> str:
        """Title in tables."""
        return f"{self.rows:,}{' (nothing else)' if self.alone else ''}"


_ALONE = Partition("1k_alone", 1_024, alone=True)
_QUICK = (Partition("1k", 1_024), Partition("10k", 10_240))
_FULL = (*_QUICK, Partition("100k", 102_400), Partition("1m", 1_000_448))
_QUICK_ROUNDS, _FULL_ROUNDS = 60, 400


@dataclass
class RowsResult:
    """Costs by the number of rows.

    Attributes:
        seconds: partition to its operations, each with its durations; the n-th of each are of the
            n-th round.
        first_claim_s: partition to the duration of a task's first claim, which sees all rows.
        added_bytes: partition to the directory's additional memory after it was filled.
        resident_bytes: partition to the directory's memory then.
    """

    seconds: dict[Partition, dict[str, list[float]]] = field(default_factory=dict)
    first_claim_s: dict[Partition, float] = field(default_factory=dict)
    added_bytes: dict[Partition, int] = field(default_factory=dict)
    resident_bytes: dict[Partition, int] = field(default_factory=dict)

    @property
    def _smallest(self) -> Partition:
        return next(each for each in self.seconds if not each.alone)

    def ratio(self, partition: Partition, operation: str) -> Summary:
        """Return an operation's duration, divided by that in the smallest partition.

        The value is the ratio of the medians; the spread is that of the ratios of single rounds.
        """
        above = self.seconds[partition][operation]
        below = self.seconds[self._smallest][operation]
        return Summary.of_ratio(above, below)

    def bytes_per_row(self, partition: Partition) -> float | None:
        """Return the directory's memory per row; None if the partition is too small."""
        if partition.rows < _MIN_ROWS_OF_MEMORY:
            return None
        return self.added_bytes[partition] / partition.rows

    def rows(self) -> list[list[str]]:
        """Return rows for a table with `ROWS_HEADINGS`."""
        rows = []
        for partition, operations in self.seconds.items():
            for operation, seconds in operations.items():
                summary, ratio = Summary.of(seconds), self.ratio(partition, operation)
                rows.append(
                    [
                        partition.title,
                        operation,
                        f"{summary.value * 1e3:.3g}",
                        f"{summary.spread * 1e3:.2g}",
                        f"{summary.p99 * 1e3:.3g}",
                        f"{ratio.value:.2f} ({ratio.spread:.2f})",
                        str(summary.count),
                    ]
                )
        return rows

    def memory_rows(self) -> list[list[str]]:
        """Return rows for a table with `MEMORY_HEADINGS`."""
        rows = []
        for partition, seconds in self.first_claim_s.items():
            per_row = self.bytes_per_row(partition)
            rows.append(
                [
                    partition.title,
                    f"{seconds * 1e3:.3g}",
                    "" if per_row is None else f"{per_row:,.0f}",
                    f"{self.resident_bytes[partition] / 1e6:,.0f}",
                ]
            )
        return rows

    def entries(self) -> list[Entry]:
        """Return entries for the file of results."""
        entries = []
        for partition, operations in self.seconds.items():
            for operation, seconds in operations.items():
                name = f"growth.{operation}32_{partition.label}"
                summary, ratio = Summary.of(seconds), self.ratio(partition, operation)
                entries += [
                    Entry.ms(f"{name}.p50_ms", summary),
                    Entry.p99_ms(f"{name}.p99_ms", summary),
                    Entry.of(f"{name}.ratio_vs_1k", ratio, "x", baseline="1k"),
                ]
        for partition, first_s in self.first_claim_s.items():
            name = f"growth.first_claim_{partition.label}.ms"
            entries.append(Entry(name, first_s * 1e3, "ms", None, 0.0, 1))
            per_row = self.bytes_per_row(partition)
            if per_row is not None:
                name = f"growth.directory_{partition.label}.bytes_per_row"
                entries.append(Entry(name, per_row, "B", None, 0.0, 1))
        return entries


def measure_rows(announce: Callable[[str], None], *, full: bool) -> RowsResult:
    """Fill the partitions and time operations on them.

    Args:
        announce: called with the title of each part.
        full: whether to measure all sizes.
    """
    partitions = _FULL if full else _QUICK
    rounds = _FULL_ROUNDS if full else _QUICK_ROUNDS
    capacity = 2 * sum(each.rows for each in partitions)
    result = RowsResult()
    with growing_store(units=1, unit_bytes=_UNIT_BYTES, capacity=capacity) as store:
        announce("growth: the smallest partition alone")
        _fill(store, _ALONE, RowsResult())
        cluster.freeze_stores()
        _measure(store, (_ALONE,), rounds, result)
        for partition in partitions:
            announce(f"growth: filling {partition.title} rows")
            _fill(store, partition, result)
        announce("growth: operations on 32 rows")
        cluster.freeze_stores()
        _measure(store, partitions, rounds, result)
    return result


def _fill(store: GrowingStore, partition: Partition, result: RowsResult) -> None:
    before = store.directory.memory_info().rss
    store.client.register_partition(partition.label, [], 0, [TASK])
    for start in range(0, partition.rows, _FILL):
        _put(store, partition, f"step{start // _FILL:05d}", min(_FILL, partition.rows - start))
    result.resident_bytes[partition] = store.directory.memory_info().rss
    result.added_bytes[partition] = result.resident_bytes[partition] - before
    began = time.perf_counter()
    claimed = store.client.claim_meta(partition.label, TASK, ["input_ids"], ROWS)
    result.first_claim_s[partition] = time.perf_counter() - began
    store.client.release(claimed)


def _put(store: GrowingStore, partition: Partition, prefix: str, count: int) -> None:
    """Put eight fields and two tags of new samples."""
    store.client.put_columns(
        [f"{prefix}_p{row // 8:02d}_g{row % 8}" for row in range(count)],
        partition.label,
        small_columns(count),
        [{"weight_version": 1, "input_lengths": TOKENS} for _ in range(count)],
        lengths=[TOKENS] * count,
        ragged=list(PER_TOKEN),
    )


def _measure(
    store: GrowingStore, partitions: tuple[Partition, ...], rounds: int, result: RowsResult
) -> None:
    order, client = random.Random(SEED), store.client
    warm_ups = rounds // 10
    freeze_garbage()
    for partition in partitions:
        result.seconds[partition] = defaultdict(list)
    for number in range(warm_ups + rounds):
        for partition in order.sample(partitions, len(partitions)):
            marks = [time.perf_counter()]
            _put(store, partition, f"round{number:05d}", ROWS)
            marks.append(time.perf_counter())
            claimed = client.claim_meta(partition.label, TASK, ["input_ids"], ROWS)
            marks.append(time.perf_counter())
            client.acknowledge(claimed)
            marks.append(time.perf_counter())
            client.clear_samples(claimed.sample_ids, partition.label)
            marks.append(time.perf_counter())
            assert claimed.size == ROWS
            if number >= warm_ups:
                names = ("put", "claim", "acknowledge", "clear")
                for name, first, last in zip(names, marks, marks[1:], strict=False):
                    result.seconds[partition][name].append(last - first)
