"""The sample x field x task matrix: read in pages, kept per revision, shown in windows.

Scanning is the one look that costs by the number of samples, so it has a budget: a share of the
time, saved up between polls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dataplane_core import DataPlaneInspector, PartitionNotFoundError, PartitionSummary, StatePage

Bytes: TypeAlias = npt.NDArray[np.uint8]

PAGE = 10_000
MOST_ROWS = 1_000_000
"""Samples of a partition that are scanned."""
SHARE = 0.05
"""Of the time, what scanning may take."""
_STATES = 4
# What can be saved up, in seconds of scanning.
_FIRST_S, _MOST_S = 0.25, 1.0


@dataclass(frozen=True)
class Shares:
    """A window: ``count`` samples from ``start``, and shares as `models.Window` has them."""

    start: int
    count: int
    written: list[float]
    tasks: list[list[float]]


@dataclass(frozen=True, eq=False)
class Scan:
    """Every sample of a partition at about one moment.

    Attributes:
        partition_id: which.
        revision: of the partition when the scan began.
        at_ns: when it ended, in nanoseconds since 1970.
        total: samples there were.
        fields: names of the columns of ``written``.
        tasks: names of the columns of ``states``.
        written: (rows, fields), 0 or 1.
        states: (rows, tasks), 0 unclaimed, 1 assigned, 2 leased, 3 settled.
    """

    partition_id: str
    revision: int
    at_ns: int
    total: int
    fields: tuple[str, ...]
    tasks: tuple[str, ...]
    written: Bytes
    states: Bytes

    @property
    def rows(self) -> int:
        """Samples that were scanned."""
        return len(self.written)

    def windows(self, most: int) -> list[Shares]:
        """The samples in at most ``most`` windows of equal size, but for the last."""
        if not self.rows:
            return []
        size = -(-self.rows // most)
        starts = np.arange(0, self.rows, size)
        counts = np.diff(np.append(starts, self.rows))
        # Sums of zeroes and ones of a million rows fit easily.
        written = np.add.reduceat(self.written, starts, axis=0, dtype=np.uint32)
        states = np.stack(
            [
                np.add.reduceat(self.states == state, starts, axis=0, dtype=np.uint32)
                for state in range(_STATES)
            ],
            axis=-1,
        )
        written_shares = (written / counts[:, None]).round(4).tolist()
        state_shares = (states / counts[:, None, None]).round(4).tolist()
        return [
            Shares(int(start), int(count), of_fields, of_tasks)
            for start, count, of_fields, of_tasks in zip(
                starts, counts, written_shares, state_shares, strict=True
            )
        ]

    def unclaimed(self, task: str) -> npt.NDArray[np.bool_]:
        """Which samples the task has not claimed, (rows,), also those drawn for a rank that has
        not asked; none for an unknown task."""
        if task not in self.tasks:
            return np.zeros(self.rows, dtype=np.bool_)
        return np.asarray(self.states[:, self.tasks.index(task)] < 2)

    def leased(self, task: str) -> npt.NDArray[np.bool_]:
        """Which samples the task holds under a lease, (rows,)."""
        if task not in self.tasks:
            return np.zeros(self.rows, dtype=np.bool_)
        return np.asarray(self.states[:, self.tasks.index(task)] == 2)

    def lacking(self, name: str) -> npt.NDArray[np.bool_]:
        """Which samples lack the field, (rows,); all of them if none has it."""
        if name not in self.fields:
            return np.ones(self.rows, dtype=np.bool_)
        return np.asarray(self.written[:, self.fields.index(name)] == 0)

    def ready(self, task: str, needs: Iterable[str]) -> int:
        """Samples that the task could claim now, having every field of ``needs``."""
        if task not in self.tasks:
            return 0
        found = np.asarray(self.states[:, self.tasks.index(task)] == 0)
        for name in needs:
            found = found & ~self.lacking(name)
        return int(found.sum())


class Scanner:
    """Scans the partitions that changed, as far as the budget reaches. Not thread-safe.

    Args:
        clock: seconds, never set back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._saved_s = _FIRST_S
        self._since = clock()
        self._scans: dict[str, Scan] = {}

    def scan(
        self,
        inspector: DataPlaneInspector,
        partitions: Iterable[PartitionSummary],
        wanted: Sequence[str],
        stop: Callable[[], bool],
    ) -> Mapping[str, Scan]:
        """The scans of the partitions that are there, some of them renewed.

        Args:
            inspector: what to ask.
            partitions: what is there.
            wanted: partitions that somebody looks at, which come first.
            stop: whether to give up.
        """
        there = {one.partition_id: one for one in partitions}
        kept = {name: scan for name, scan in self._scans.items() if name in there}
        now = self._clock()
        self._saved_s = min(_MOST_S, self._saved_s + SHARE * (now - self._since))
        self._since = now
        first = set(wanted)
        stale = sorted(
            (one for one in there.values() if _changed(one, kept.get(one.partition_id))),
            key=lambda one: (
                one.partition_id not in first,
                kept[one.partition_id].at_ns if one.partition_id in kept else 0,
            ),
        )
        for summary in stale:
            if self._saved_s <= 0 or stop():
                break
            began = self._clock()
            scan = scan_partition(inspector, summary, stop)
            self._saved_s -= self._clock() - began
            if scan is not None:
                kept[summary.partition_id] = scan
        self._scans = kept
        return dict(kept)


def _changed(summary: PartitionSummary, scan: Scan | None) -> bool:
    # A store that counts no revisions tells 0.
    return scan is None or not summary.revision or scan.revision != summary.revision


def scan_partition(
    inspector: DataPlaneInspector, summary: PartitionSummary, stop: Callable[[], bool]
) -> Scan | None:
    """Read every page of states; None if the partition is gone, or ``stop`` says so."""
    pages: list[StatePage] = []
    start = 0
    while start < MOST_ROWS:
        if stop():
            return None
        try:
            page = inspector.scan_states(summary.partition_id, start=start, limit=PAGE)
        except PartitionNotFoundError:
            return None
        pages.append(page)
        rows = _rows(page)
        start += rows
        if rows == 0 or start >= page.total:
            break
    # A field may be written for the first time while pages are read.
    fields = tuple(dict.fromkeys(name for page in pages for name in page.fields))
    tasks = tuple(dict.fromkeys(name for page in pages for name in page.tasks))
    return Scan(
        partition_id=summary.partition_id,
        revision=summary.revision,
        at_ns=time.time_ns(),
        total=max(pages[-1].total, start),
        fields=fields,
        tasks=tasks,
        written=np.concatenate([_columns(p.written, p.fields, fields, _rows(p)) for p in pages]),
        states=np.concatenate([_columns(p.states, p.tasks, tasks, _rows(p)) for p in pages]),
    )


def _rows(page: StatePage) -> int:
    if page.fields:
        return len(page.written) // len(page.fields)
    if page.tasks:
        return len(page.states) // len(page.tasks)
    return max(0, min(PAGE, page.total - page.start))


def _columns(held: bytes, names: Sequence[str], wanted: Sequence[str], rows: int) -> Bytes:
    """``held``, (rows, names) row-major, as (rows, wanted); columns that it lacks are 0."""
    given = np.frombuffer(held, dtype=np.uint8).reshape(rows, len(names))
    if tuple(names) == tuple(wanted):
        return given
    found = np.zeros((rows, len(wanted)), dtype=np.uint8)
    for place, name in enumerate(names):
        found[:, wanted.index(name)] = given[:, place]
    return found
