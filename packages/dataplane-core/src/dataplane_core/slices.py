"""Many small memcpys from one buffer into another.

Assigning slices of memoryviews is the fastest way that Python has: about twice as fast as slices
of numpy arrays, and ten times as fast as index arithmetic, masks or torch's jagged operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataplane_core import pages


def copy_slices(
    into: NDArray[np.uint8],
    begins: Iterable[int],
    flat: NDArray[np.uint8],
    starts: Iterable[int],
    sizes: Iterable[int],
) -> None:
    """Copy each of ``sizes`` bytes from its start in ``flat`` to its begin in ``into``."""
    target, source = into.data, flat.data
    for begin, start, size in zip(begins, starts, sizes, strict=True):
        target[begin : begin + size] = source[start : start + size]


@dataclass(frozen=True, slots=True)
class Slices:
    """Bytes that lie scattered in a buffer and belong one after the other.

    Attributes:
        flat: the buffer.
        starts: where each slice starts in it.
        sizes: the size of each, in bytes.
    """

    flat: NDArray[np.uint8]
    starts: Sequence[int]
    sizes: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Size of all slices together."""
        return sum(self.sizes)

    def copy_into(self, into: NDArray[np.uint8]) -> None:
        """Write the slices one after the other into ``into``, which has `nbytes`."""
        if len(self.sizes) == 1:
            # For large copies numpy lets other threads run.
            [start], [size] = self.starts, self.sizes
            into[:] = self.flat[start : start + size]
            return
        ends = list(itertools.accumulate(self.sizes, initial=0))
        copy_slices(into, ends[:-1], self.flat, self.starts, self.sizes)

    def views(self) -> list[memoryview]:
        """The slices one by one, where they lie."""
        data = self.flat.data
        return [
            data[start : start + size] for start, size in zip(self.starts, self.sizes, strict=True)
        ]

    def joined(self) -> NDArray[np.uint8]:
        """The slices one after the other in one buffer, which a single slice shares."""
        if len(self.sizes) == 1:
            [start], [size] = self.starts, self.sizes
            return self.flat[start : start + size]
        into = pages.empty(self.nbytes)
        self.copy_into(into)
        return into
