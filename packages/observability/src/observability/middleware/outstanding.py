"""Bytes that were put and not cleared, per (sample, field), without references to the values.

Samples of a put with equal byte counts share one `Cells`, so a put costs one dict lookup per
sample, whatever the number of fields.

Nothing here locks; the client that owns the account holds its lock around every call.

Samples that are cleared through another client would stay in the account forever, so it keeps only
the last `MAX_KEYS`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

MAX_KEYS = 1 << 18
"""Maximum number of samples; the partition whose last put is oldest loses samples first."""


class PendingPut:
    """A put that has not returned from the store yet."""

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
        """Return those of ``sample_ids`` that were cleared during the put."""
        if self._partition_cleared:
            return list(sample_ids)
        return [i for i in sample_ids if i in self._cleared] if self._cleared else []


class Cells:
    """The bytes of a sample by field, and their sum.

    Immutable, because samples share instances. Two instances are never equal.
    """

    __slots__ = ("by_field", "total")

    def __init__(self, by_field: Mapping[str, int]) -> None:
        self.by_field = by_field
        self.total = sum(by_field.values())

    def with_put(self, put: Cells) -> Cells:
        """Return a sample's cells after ``put``, if these were its cells before."""
        return Cells({**self.by_field, **put.by_field})


class Outstanding:
    """The account: a cell (sample, field) counts once, with the bytes of its last put.

    Attributes:
        n_bytes: bytes held now.
        peak_n_bytes: maximum of ``n_bytes`` so far.
        max_bytes_per_key: maximum number of bytes that one sample held so far.
        by_partition: bytes held now, per partition with samples.
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
        """The number of samples held now, including those without tensors."""
        return sum(len(rows) for rows in self._cells.values())

    def begin_put(self, pending: PendingPut) -> None:
        """Announce a put, so that a clear that returns before it is not lost.

        Another thread may claim, read and clear the samples before their put returns.
        """
        self._pending.add(pending)

    def end_put(self, pending: PendingPut) -> None:
        """Forget an announced put, whether or not it succeeded."""
        self._pending.discard(pending)

    def add(
        self, pending: PendingPut, sample_ids: Sequence[str], bytes_by_field: Mapping[str, int]
    ) -> None:
        """Account for a successful put; ``bytes_by_field`` is spread over ``sample_ids``."""
        # Partitions stay in the order of their last puts.
        rows = self._cells[pending.partition_id] = self._cells.pop(pending.partition_id, {})
        before = self.n_bytes
        start = 0
        for share, count in spread(bytes_by_field, len(sample_ids)):
            ids = sample_ids[start : start + count]
            start += count
            # No Python loop per sample: those with the same cells are merged together.
            held = list(map(rows.get, ids))
            merged: dict[Cells | None, Cells] = {}
            for cells, samples in Counter(held).items():
                after = merged[cells] = share if cells is None else cells.with_put(share)
                self.n_bytes += samples * (after.total - (cells.total if cells else 0))
                self.max_bytes_per_key = max(self.max_bytes_per_key, after.total)
            rows.update(zip(ids, map(merged.__getitem__, held), strict=True))
        self.peak_n_bytes = max(self.peak_n_bytes, self.n_bytes)
        of_partition = self.by_partition.get(pending.partition_id, 0)
        self.by_partition[pending.partition_id] = of_partition + self.n_bytes - before
        self._drop(pending.cleared_of(sample_ids), pending.partition_id)
        while (surplus := self.n_keys - MAX_KEYS) > 0:
            oldest = next(iter(self._cells))
            self._drop(list(itertools.islice(self._cells[oldest], surplus)), oldest)

    def clear(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Remove ``sample_ids`` from the account; None removes all samples of the partition."""
        for pending in self._pending:
            if pending.partition_id == partition_id:
                pending.note_clear(sample_ids)
        if sample_ids is None:
            sample_ids = list(self._cells.get(partition_id, ()))
        self._drop(sample_ids, partition_id)

    def _drop(self, sample_ids: Sequence[str], partition_id: str) -> None:
        rows = self._cells.get(partition_id, {})
        dropped = (rows.pop(sample_id, None) for sample_id in sample_ids)
        dropped_bytes = sum(cells.total for cells in dropped if cells is not None)
        self.n_bytes -= dropped_bytes
        if rows:
            self.by_partition[partition_id] -= dropped_bytes
        else:
            self._cells.pop(partition_id, None)
            self.by_partition.pop(partition_id, None)


def spread(bytes_by_field: Mapping[str, int], count: int) -> list[tuple[Cells, int]]:
    """Divide each field's bytes over ``count`` samples; return runs of equal cells and their sizes.

    The remainder of a field is dealt out one byte per sample, starting where that of the previous
    field stopped. So the totals per sample equal the bytes of the batch divided evenly, with the
    remainder on the first samples.
    """
    if not count:
        return []
    # Three samples, 7 bytes of a and 5 of b; the remainder of b starts where that of a stopped:
    #
    #     sample     0    1    2
    #     a        2+1    2    2      ranges: a [0, 1), b [1, 3)
    #     b          1  1+1  1+1      shares: sample 0, and samples 1 and 2 together
    #     sum        4    4    4
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
