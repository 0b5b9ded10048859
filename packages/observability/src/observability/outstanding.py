"""How many bytes were put and not cleared, per (sample, field), without keeping what was put.

Samples of a put that hold the same share one `Cells`, so a put costs a look in a dict per sample,
however many fields it has.

Nothing here locks; the client that owns the account holds its lock around every call.

Samples that are put here and cleared through another client would stay in the account for ever, so
only the last `MOST_KEYS` are kept.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

MOST_KEYS = 1 << 18
"""Samples in an account; the partition that was put into longest ago loses its oldest first."""


class PendingPut:
    """A put that has been handed to the store and has not returned."""

    def __init__(self, partition_id: str) -> None:
        self.partition_id = partition_id
        self._cleared: set[str] = set()
        self._partition_cleared = False

    def note_clear(self, sample_ids: Iterable[str] | None) -> None:
        if sample_ids is None:
            self._partition_cleared = True
        else:
            self._cleared.update(sample_ids)

    def cleared_of(self, sample_ids: Sequence[str]) -> list[str]:
        """Which of ``sample_ids`` were cleared while the put was under way."""
        if self._partition_cleared:
            return list(sample_ids)
        return [i for i in sample_ids if i in self._cleared] if self._cleared else []


class Cells:
    """Bytes by field, and their sum. Never changed, as samples share it; compared by identity."""

    __slots__ = ("by_field", "total")

    def __init__(self, by_field: Mapping[str, int]) -> None:
        self.by_field = by_field
        self.total = sum(by_field.values())

    def with_put(self, put: Cells) -> Cells:
        """What a sample holds that held this before ``put``."""
        return Cells({**self.by_field, **put.by_field})


class Outstanding:
    """The account: a cell (sample, field) counts once, with what was put into it last.

    Attributes:
        n_bytes: bytes held now.
        peak_n_bytes: the most bytes ever held.
        max_bytes_per_key: the most bytes that one sample ever held.
        by_partition: bytes held now by each partition that holds samples.
    """

    def __init__(self) -> None:
        self.n_bytes = 0
        self.peak_n_bytes = 0
        self.max_bytes_per_key = 0
        self.by_partition: dict[str, int] = {}
        self._cells: dict[str, dict[str, Cells]] = {}
        self._pending: set[PendingPut] = set()

    @property
    def n_keys(self) -> int:
        """Samples held now, those without any tensor included."""
        return sum(len(rows) for rows in self._cells.values())

    def begin_put(self, pending: PendingPut) -> None:
        """Announce a put, so that a clear that returns before it does is not lost.

        Samples can be claimed, read and cleared by another thread before the put that made them
        has returned to its caller.
        """
        self._pending.add(pending)

    def end_put(self, pending: PendingPut) -> None:
        """Forget an announced put, whether or not it succeeded."""
        self._pending.discard(pending)

    def add(
        self, pending: PendingPut, sample_ids: Sequence[str], bytes_by_field: Mapping[str, int]
    ) -> None:
        """Enter a put that succeeded; ``bytes_by_field`` is spread over ``sample_ids``."""
        # The partitions stand in the order of their last puts.
        rows = self._cells[pending.partition_id] = self._cells.pop(pending.partition_id, {})
        before = self.n_bytes
        start = 0
        for share, count in spread(bytes_by_field, len(sample_ids)):
            some = sample_ids[start : start + count]
            start += count
            # No Python code runs per sample: samples that hold the same cells are merged at once.
            held = list(map(rows.get, some))
            merged: dict[Cells | None, Cells] = {}
            for cells, samples in Counter(held).items():
                after = merged[cells] = share if cells is None else cells.with_put(share)
                self.n_bytes += samples * (after.total - (cells.total if cells else 0))
                self.max_bytes_per_key = max(self.max_bytes_per_key, after.total)
            rows.update(zip(some, map(merged.__getitem__, held), strict=True))
        self.peak_n_bytes = max(self.peak_n_bytes, self.n_bytes)
        of_partition = self.by_partition.get(pending.partition_id, 0)
        self.by_partition[pending.partition_id] = of_partition + self.n_bytes - before
        self._drop(pending.cleared_of(sample_ids), pending.partition_id)
        while (surplus := self.n_keys - MOST_KEYS) > 0:
            oldest = next(iter(self._cells))
            self._drop(list(itertools.islice(self._cells[oldest], surplus)), oldest)

    def clear(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Take off what ``sample_ids`` hold, or with None what the partition holds."""
        for pending in self._pending:
            if pending.partition_id == partition_id:
                pending.note_clear(sample_ids)
        if sample_ids is None:
            sample_ids = list(self._cells.get(partition_id, ()))
        self._drop(sample_ids, partition_id)

    def _drop(self, sample_ids: Sequence[str], partition_id: str) -> None:
        rows = self._cells.get(partition_id, {})
        dropped = (rows.pop(sample_id, None) for sample_id in sample_ids)
        gone = sum(cells.total for cells in dropped if cells is not None)
        self.n_bytes -= gone
        if rows:
            self.by_partition[partition_id] -= gone
        else:
            self._cells.pop(partition_id, None)
            self.by_partition.pop(partition_id, None)


def spread(bytes_by_field: Mapping[str, int], count: int) -> list[tuple[Cells, int]]:
    """Divide each field's bytes over ``count`` samples; what neighbours get, and how many they are.

    What does not divide evenly goes round the samples in turn, one byte each, and the next field
    goes on where the last one stopped. So the sums per sample are those of the whole batch divided
    evenly, with the remainder on the first samples.
    """
    if not count:
        return []
    base = {name: total // count for name, total in bytes_by_field.items()}
    ranges: list[tuple[str, int, int]] = []
    start = 0
    for name, total in bytes_by_field.items():
        extra = total % count
        stop = start + extra
        ranges.append((name, start, min(stop, count)))
        if stop > count:
            ranges.append((name, 0, stop - count))
        start = stop % count
    edges = sorted({0, count, *(edge for _, first, last in ranges for edge in (first, last))})
    shares: list[tuple[Cells, int]] = []
    for first, last in itertools.pairwise(edges):
        longer = {name for name, begin, end in ranges if begin <= first < end}
        cells = Cells({name: size + (name in longer) for name, size in base.items()})
        shares.append((cells, last - first))
    return shares
