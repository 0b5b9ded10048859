"""`SequenceSet`: a set of sample sequences, from which the smallest can be taken."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

CHUNK_BITS = 7
"""A chunk has 2**7 = 128 sequences, so that work on a chunk takes well below a millisecond."""
_BITS = tuple(1 << bit for bit in range(1 << CHUNK_BITS))


class SequenceSet:
    """A set of sequences, stored as one bit each.

    A sequence is a chunk number and a bit in the chunk's mask. Only chunks with a set bit exist::

        sequence 259 = 2 * 128 + 3        chunks  [0, 2]
                                          masks   {0: 0b1, 2: 0b1000}   for {0, 259}
    """

    __slots__ = ("_chunks", "_length", "_masks")

    def __init__(self) -> None:
        self._chunks: list[int] = []
        self._masks: dict[int, int] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, sequences: Iterable[int]) -> None:
        """Add sequences; those already in the set stay."""
        for chunk, mask in _masks(sequences).items():
            before = self._masks.get(chunk, 0)
            if not before:
                insort(self._chunks, chunk)
            self._masks[chunk] = before | mask
            self._length += (mask & ~before).bit_count()

    def discard(self, sequences: Iterable[int]) -> None:
        """Remove sequences; those not in the set are ignored."""
        for chunk, mask in _masks(sequences).items() if self._length else ():
            before = self._masks.get(chunk, 0)
            self._length -= (mask & before).bit_count()
            if before & ~mask:
                self._masks[chunk] = before & ~mask
            elif before:
                del self._masks[chunk]
                del self._chunks[bisect_left(self._chunks, chunk)]

    def take(self, count: int) -> list[int]:
        """Remove and return the ``count`` smallest sequences, ascending."""
        taken: list[int] = []
        emptied = 0
        for chunk in self._chunks:
            mask = self._masks[chunk]
            while mask and len(taken) < count:
                bit = mask & -mask
                taken.append((chunk << CHUNK_BITS) + bit.bit_length() - 1)
                mask ^= bit
            if mask:
                self._masks[chunk] = mask
                break
            del self._masks[chunk]
            emptied += 1
        del self._chunks[:emptied]
        self._length -= len(taken)
        return taken

    def free_entries(self, count: int) -> bool:
        """Free an unused set at once, because it is small; return True."""
        self._chunks, self._masks, self._length = [], {}, 0
        return True


def _masks(sequences: Iterable[int]) -> dict[int, int]:
    """Return the mask of the given sequences in each chunk, by chunk number."""
    masks: dict[int, int] = {}
    for sequence in sequences:
        chunk = sequence >> CHUNK_BITS
        masks[chunk] = masks.get(chunk, 0) | _BITS[sequence % len(_BITS)]
    return masks
