"""Many small memcpys from one buffer into another.

Assigning slices of memoryviews is the fastest way that Python has: about twice as fast as slices
of numpy arrays, and ten times as fast as index arithmetic, masks or torch's jagged operators.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


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
