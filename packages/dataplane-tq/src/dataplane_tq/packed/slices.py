"""`Slices`: scattered byte ranges of a buffer, which are written contiguously."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dataplane_core import pages
from dataplane_core.pages import copy_slices


@dataclass(frozen=True, slots=True)
class Slices:
    """Scattered byte ranges of a buffer, in the order in which they are concatenated.

    Attributes:
        flat: the buffer.
        starts: start of each slice in the buffer.
        sizes: size of each slice, in bytes.
    """

    flat: NDArray[np.uint8]
    starts: Sequence[int]
    sizes: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Total size of the slices."""
        return sum(self.sizes)

    def copy_into(self, into: NDArray[np.uint8]) -> None:
        """Concatenate the slices into ``into``, which has `nbytes`."""
        if len(self.sizes) == 1:
            # For large copies numpy releases the GIL.
            [start], [size] = self.starts, self.sizes
            into[:] = self.flat[start : start + size]
            return
        ends = list(itertools.accumulate(self.sizes, initial=0))
        copy_slices(into, ends[:-1], self.flat, self.starts, self.sizes)

    def views(self) -> list[memoryview]:
        """Return a view of each slice."""
        data = self.flat.data
        return [
            data[start : start + size] for start, size in zip(self.starts, self.sizes, strict=True)
        ]

    def joined(self) -> NDArray[np.uint8]:
        """Return the concatenated slices; a view if there is only one."""
        if len(self.sizes) == 1:
            [start], [size] = self.starts, self.sizes
            return self.flat[start : start + size]
        into = pages.empty(self.nbytes)
        self.copy_into(into)
        return into
