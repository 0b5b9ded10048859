"""Memory for large results whose pages are there already.

Filling fresh pages costs several times as much as the memcpy itself, and the C library returns
large buffers to the kernel as soon as they are freed. Here they are kept, up to `MOST_IDLE` bytes a
process, and given out again once nothing refers to them any more.
"""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

MOST_IDLE = 256 << 20
"""Bytes that a process keeps at most without using them."""

_SMALLEST = 1 << 20  # smaller buffers the C library keeps itself
_HUGE_PAGE = 2 << 20

# By size. Only calls that are atomic touch it, and there is no lock: a buffer may die in any
# thread, also in the midst of a call of `empty`.
_idle: dict[int, list[NDArray[np.uint8]]] = {}


class _Lease:
    """Owner of a buffer while arrays or tensors view it; numpy takes it for an array."""

    __slots__ = ("__array_interface__", "_slab")

    def __init__(self, slab: NDArray[np.uint8], nbytes: int) -> None:
        self._slab = slab
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (nbytes,),
            "data": (slab.ctypes.data, False),
        }

    def __del__(self) -> None:
        if idle_bytes() + self._slab.size > MOST_IDLE:
            # Sizes that nobody asks for any more would otherwise stay for ever.
            _idle.clear()
        if self._slab.size <= MOST_IDLE:
            _idle.setdefault(self._slab.size, []).append(self._slab)


def idle_bytes() -> int:
    """Bytes that are kept now without being used."""
    return sum(size * len(slabs) for size, slabs in tuple(_idle.items()))


def empty(nbytes: int) -> NDArray[np.uint8]:
    """An array of ``nbytes`` arbitrary bytes that nothing else refers to."""
    if nbytes < _SMALLEST:
        return np.empty(nbytes, np.uint8)
    # In steps of an eighth at most, so that answers of about one size have the same buffers.
    step = max(_HUGE_PAGE, 1 << max(0, nbytes.bit_length() - 4))
    size = -(-nbytes // step) * step
    try:
        slab = _idle[size].pop()
    except (KeyError, IndexError):
        slab = _fresh(size)
    return np.asarray(_Lease(slab, nbytes))


def _fresh(size: int) -> NDArray[np.uint8]:
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapping = mmap.mmap(-1, size + _HUGE_PAGE, flags=private)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    return whole[start : start + size]
