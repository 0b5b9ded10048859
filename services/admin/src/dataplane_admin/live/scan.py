"""Matrix of samples by field and task: read in pages, stored per revision, shown in windows.

The cost of a scan grows with the number of samples. So scans may use only a share of the time;
unused time is saved up between polls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dataplane_admin.models import Window
from dataplane_core import DataPlaneInspector, PartitionNotFoundError, PartitionSummary, StatePage

Bytes: TypeAlias = npt.NDArray[np.uint8]

PAGE = 10_000
MAX_ROWS = 1_000_000
"""Maximum number of scanned samples of a partition."""
SHARE = 0.05
"""Share of the time that scans may use."""
_STATES = 4
# Initial and maximum savings, in seconds of scanning.
_FIRST_S, _MAX_S = 0.25, 1.0


@dataclass(frozen=True, eq=False)
class Scan:
    """States of all samples of a partition at about one moment.

    Attributes:
        revision: revision of the partition when the scan began.
        at_ns: end of the scan, in nanoseconds since 1970.
        total: samples in the partition.
        fields: names of the columns of ``written``.
        tasks: names of the columns of ``states``.
        written: (rows, fields), 0 or 1.
        states: (rows, tasks), 0 unclaimed, 1 assigned, 2 leased, 3 acknowledged.
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
        """Number of scanned samples."""
        return len(self.written)

    def windows(self, maximum: int) -> list[Window]:
        """Return the samples in at most ``maximum`` windows; all but the last have equal size."""
        if not self.rows:
            return []
        size = -(-self.rows // maximum)
        starts = np.arange(0, self.rows, size)
        counts = np.diff(np.append(starts, self.rows))
        # Sums of zeros and ones over a million rows fit into uint32.
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
            Window(start=int(start), count=int(count), written=of_fields, tasks=of_tasks)
            for start, count, of_fields, of_tasks in zip(
                starts, counts, written_shares, state_shares, strict=True
            )
        ]

    def unclaimed(self, task: str) -> npt.NDArray[np.bool_]:
        """Return a mask, (rows,), of samples that the task has not claimed, assigned ones included.

        All False for an unknown task.
        """
        return np.asarray(self._states_of(task) < 2)

    def leased(self, task: str) -> npt.NDArray[np.bool_]:
        """Return a mask, (rows,), of samples that the task has leased."""
        return np.asarray(self._states_of(task) == 2)

    def lacking(self, name: str) -> npt.NDArray[np.bool_]:
        """Return a mask, (rows,), of samples that lack the field; all True if none has it."""
        if name not in self.fields:
            return np.ones(self.rows, dtype=np.bool_)
        return np.asarray(self.written[:, self.fields.index(name)] == 0)

    def ready(self, task: str, needs: Iterable[str]) -> int:
        """Return how many samples the task could claim now, with every field of ``needs``."""
        rows = np.asarray(self._states_of(task) == 0)
        for name in needs:
            rows = rows & ~self.lacking(name)
        return int(rows.sum())

    def _states_of(self, task: str) -> Bytes:
        """Return the task's states, (rows,); for an unknown task `_STATES`, which is no state."""
        if task not in self.tasks:
            return np.full(self.rows, _STATES, dtype=np.uint8)
        return np.asarray(self.states[:, self.tasks.index(task)])


class Scanner:
    """Scanner of changed partitions within a time budget. Not thread-safe."""

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
        """Return the scans of the present partitions, some of them renewed.

        Args:
            wanted: partitions that a page shows, which are scanned first.
        """
        present = {summary.partition_id: summary for summary in partitions}
        scans = {name: scan for name, scan in self._scans.items() if name in present}
        now = self._clock()
        self._saved_s = min(_MAX_S, self._saved_s + SHARE * (now - self._since))
        self._since = now
        first = set(wanted)
        stale = sorted(
            (
                summary
                for summary in present.values()
                if _changed(summary, scans.get(summary.partition_id))
            ),
            key=lambda summary: (
                summary.partition_id not in first,
                scans[summary.partition_id].at_ns if summary.partition_id in scans else 0,
            ),
        )
        for summary in stale:
            if self._saved_s <= 0 or stop():
                break
            began = self._clock()
            scan = scan_partition(inspector, summary, stop)
            self._saved_s -= self._clock() - began
            if scan is not None:
                scans[summary.partition_id] = scan
        self._scans = scans
        return dict(scans)


def _changed(summary: PartitionSummary, scan: Scan | None) -> bool:
    # A store without revisions reports 0.
    return scan is None or not summary.revision or scan.revision != summary.revision


def scan_partition(
    inspector: DataPlaneInspector, summary: PartitionSummary, stop: Callable[[], bool]
) -> Scan | None:
    """Read all pages of states; None if the partition is gone or ``stop`` returns True."""
    pages: list[StatePage] = []
    start = 0
    while start < MAX_ROWS:
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
    # Later pages may have new fields: a field may be written for the first time during the scan.
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
    """Return ``held``, (rows, names) row-major, as (rows, wanted) with missing columns 0."""
    given = np.frombuffer(held, dtype=np.uint8).reshape(rows, len(names))
    if tuple(names) == tuple(wanted):
        return given
    columns = np.zeros((rows, len(wanted)), dtype=np.uint8)
    for place, name in enumerate(names):
        columns[:, wanted.index(name)] = given[:, place]
    return columns
