"""Bytes that were put and not cleared, per (sample, field), without references to the values.

Samples of a put that have equal sizes share one `SampleBytes`. So a put costs one dict lookup per
sample, whatever the number of fields.

Nothing here is thread-safe: the caller holds a lock around every call.

The clears of other clients are unknown here. Samples that they clear would be counted forever, so
at most `MAX_KEYS` samples are counted.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

MAX_KEYS = 1 << 18
"""Maximum number of counted samples. The surplus is dropped, first from the partition whose last
put is oldest."""


class PendingPut:
    """A put that has not returned from the store yet."""

    def __init__(self, partition_id: str) -> None:
        self.partition_id = partition_id
        self._cleared: set[str] = set()
        self._partition_cleared = False

    def note_clear(self, sample_ids: Iterable[str] | None) -> None:
        """Note that samples were cleared during the put; None is all samples of the partition."""
        if sample_ids is None:
            self._partition_cleared = True
        else:
            self._cleared.update(sample_ids)

    def cleared_among(self, sample_ids: Sequence[str]) -> list[str]:
        """Return those of ``sample_ids`` that were cleared during the put."""
        if self._partition_cleared:
            return list(sample_ids)
        return [i for i in sample_ids if i in self._cleared] if self._cleared else []


class SampleBytes:
    """The bytes of a sample by field, and their sum.

    Instances are immutable, because samples share them, and are compared by identity.
    """

    __slots__ = ("by_field", "total")

    def __init__(self, by_field: Mapping[str, int]) -> None:
        self.by_field = by_field
        self.total = sum(by_field.values())

    def with_put(self, put: SampleBytes) -> SampleBytes:
        """Return these bytes, with the fields of ``put`` added or replaced."""
        return SampleBytes({**self.by_field, **put.by_field})


class Outstanding:
    """The bytes put and not cleared; a field of a sample counts once, with its last put.

    Attributes:
        n_bytes: current number of bytes.
        peak_n_bytes: maximum of ``n_bytes`` so far.
        max_bytes_per_key: maximum of the bytes of one sample so far.
        by_partition: current number of bytes of each partition that has samples.
    """

    def __init__(self) -> None:
        self.n_bytes = 0
        self.peak_n_bytes = 0
        self.max_bytes_per_key = 0
        self.by_partition: dict[str, int] = {}
        # By partition, then by sample id.
        self._rows: dict[str, dict[str, SampleBytes]] = {}
        self._pending: set[PendingPut] = set()

    @property
    def n_keys(self) -> int:
        """The current number of samples, including those without tensors."""
        return sum(len(rows) for rows in self._rows.values())

    def begin_put(self, pending: PendingPut) -> None:
        """Register a put that begins, so that clears during the put are noted.

        Another thread may claim, read and clear the samples before their put returns.
        """
        self._pending.add(pending)

    def end_put(self, pending: PendingPut) -> None:
        """Remove a put that returned or failed."""
        self._pending.discard(pending)

    def add(
        self, pending: PendingPut, sample_ids: Sequence[str], bytes_by_field: Mapping[str, int]
    ) -> None:
        """Count a successful put; ``bytes_by_field`` is divided among ``sample_ids``."""
        # Moved to the end, so that partitions are in the order of their last puts.
        rows = self._rows[pending.partition_id] = self._rows.pop(pending.partition_id, {})
        n_bytes_before = self.n_bytes
        start = 0
        for put, count in divide(bytes_by_field, len(sample_ids)):
            ids = sample_ids[start : start + count]
            start += count
            # Samples with equal previous bytes share one new `SampleBytes`. One per sample is slow.
            previous = list(map(rows.get, ids))
            new_by_previous: dict[SampleBytes | None, SampleBytes] = {}
            for old, samples in Counter(previous).items():
                new = new_by_previous[old] = put if old is None else old.with_put(put)
                self.n_bytes += samples * (new.total - (old.total if old else 0))
                self.max_bytes_per_key = max(self.max_bytes_per_key, new.total)
            rows.update(zip(ids, map(new_by_previous.__getitem__, previous), strict=True))
        self.peak_n_bytes = max(self.peak_n_bytes, self.n_bytes)
        partition_bytes = self.by_partition.get(pending.partition_id, 0)
        self.by_partition[pending.partition_id] = partition_bytes + self.n_bytes - n_bytes_before
        self._drop(pending.cleared_among(sample_ids), pending.partition_id)
        while (surplus := self.n_keys - MAX_KEYS) > 0:
            oldest = next(iter(self._rows))
            self._drop(list(itertools.islice(self._rows[oldest], surplus)), oldest)

    def clear(self, sample_ids: Sequence[str] | None, partition_id: str) -> None:
        """Stop counting ``sample_ids``; None is all samples of the partition."""
        for pending in self._pending:
            if pending.partition_id == partition_id:
                pending.note_clear(sample_ids)
        if sample_ids is None:
            sample_ids = list(self._rows.get(partition_id, ()))
        self._drop(sample_ids, partition_id)

    def _drop(self, sample_ids: Sequence[str], partition_id: str) -> None:
        rows = self._rows.get(partition_id, {})
        dropped = (rows.pop(sample_id, None) for sample_id in sample_ids)
        dropped_bytes = sum(sample.total for sample in dropped if sample is not None)
        self.n_bytes -= dropped_bytes
        if rows:
            self.by_partition[partition_id] -= dropped_bytes
        else:
            self._rows.pop(partition_id, None)
            self.by_partition.pop(partition_id, None)


def divide(bytes_by_field: Mapping[str, int], count: int) -> list[tuple[SampleBytes, int]]:
    """Divide the bytes of each field among ``count`` samples, as equally as possible.

    The remainder of each division is distributed byte by byte, in turn over all samples. The next
    field continues after the last sample that got a byte. So totals differ by at most one byte.

    Returns:
        Runs of samples with equal bytes, in order: the bytes of each, and the number of samples.
    """
    if not count:
        return []
    # Three samples, 7 bytes of field a and 5 of field b. "+1" is a remaining byte:
    #
    #     sample     0    1    2
    #     a        2+1    2    2      ranges of remaining bytes: a [0, 1), b [1, 3)
    #     b          1  1+1  1+1      runs: sample 0; samples 1 and 2
    #     sum        4    4    4
    base = {name: total // count for name, total in bytes_by_field.items()}
    ranges: list[tuple[str, int, int]] = []
    start = 0
    for name, total in bytes_by_field.items():
        stop = start + total % count
        ranges.append((name, start, min(stop, count)))
        if stop > count:  # the range wraps around
            ranges.append((name, 0, stop - count))
        start = stop % count
    edges = sorted({0, count, *(edge for _, first, last in ranges for edge in (first, last))})
    runs: list[tuple[SampleBytes, int]] = []
    for first, last in itertools.pairwise(edges):
        with_extra_byte = {name for name, begin, end in ranges if begin <= first < end}
        by_field = {name: size + (name in with_extra_byte) for name, size in base.items()}
        runs.append((SampleBytes(by_field), last - first))
    return runs
