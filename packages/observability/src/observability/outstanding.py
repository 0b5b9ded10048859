"""How many bytes were put and not cleared, per (sample, field), without keeping what was put.

Samples of a put that hold the same share one `Cells`, so a put costs a look per sample, however
many fields it has.

Nothing here locks; the client that owns the account holds its lock around every call.

Samples that are put here and cleared through another client would stay in the account for ever, so
only the last `MOST_KEYS` are kept.
"""

from __future__ import annotations

import itertools
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
        return [i for i in sample_ids if self._partition_cleared or i in self._cleared]


class Cells:
    """Bytes by field, and their sum. Never changed, since samples share it."""

    __slots__ = ("by_field", "total")

    def __init__(self, by_field: Mapping[str, int]) -> None:
        self.by_field = by_field
        self.total = sum(by_field.values())


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

    def begin_put(self, partition_id: str) -> PendingPut:
        """Announce a put, so that a clear that returns before it does is not lost.

        Samples can be claimed, read and cleared by another thread before the put that made them
        has returned to its caller.
        """
        pending = PendingPut(partition_id)
        self._pending.add(pending)
        return pending

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
        growth, largest = 0, self.max_bytes_per_key
        # By identity; what is merged is kept alive, so that no identity comes twice.
        merged: dict[tuple[int, int], tuple[Cells, Cells, Cells]] = {}
        for sample_id, share in zip(
            sample_ids, spread(bytes_by_field, len(sample_ids)), strict=True
        ):
            held, after = rows.get(sample_id), share
            if held is not None:
                growth -= held.total
                known = merged.get((id(held), id(share)))
                if known is None:
                    both = Cells({**held.by_field, **share.by_field})
                    known = merged[id(held), id(share)] = held, share, both
                after = known[2]
            rows[sample_id] = after
            growth += after.total
            if after.total > largest:
                largest = after.total
        self.n_bytes += growth
        self.max_bytes_per_key = largest
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


def spread(bytes_by_field: Mapping[str, int], count: int) -> list[Cells]:
    """Divide each field's bytes over ``count`` samples.

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
    shares: list[Cells] = []
    for first, last in itertools.pairwise(edges):
        longer = {name for name, begin, end in ranges if begin <= first < end}
        cells = Cells({name: size + (name in longer) for name, size in base.items()})
        shares += [cells] * (last - first)
    return shares
