"""`DoubleArena`: the memory of a source, two arenas with one version each.

Invariant: the bytes of a published version are not overwritten before the version is released. So
an arena may be filled only while it holds no version.

    arena 0   | shard 0 ..|pad| shard 1 |pad| shard 2 .......|pad|        version 7, published
              0           ^256 i        ^256 j                   ^size, full pages
    arena 1   being filled with version 8, or free

Shards start at multiples of `refit_mx.source.staging.ALIGNMENT`, 256 bytes; receivers address them
by offset from the first byte.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable

import numpy as np
import torch

from refit_mx.manifest.format import SharedMemory
from refit_mx.memory.mapping import collapse_shared, create, private_memory

PAGE_BYTES = 4096


class Arena:
    """A contiguous range of memory of fixed size.

    Args:
        nbytes: size, rounded up to full pages, at least one.
        device: ``cpu`` or a CUDA device.
        shared: whether other processes on this machine may map it; only on ``cpu``.

    Attributes:
        memory: uint8 (bytes,), starting at a page boundary.
        shared: description with which other processes map it; None if they may not.
    """

    def __init__(self, nbytes: int, *, device: str = "cpu", shared: bool = False) -> None:
        size = max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES
        self.shared: SharedMemory | None = None
        on_cpu = torch.device(device).type == "cpu"
        if on_cpu and shared:
            fd, memory, self.shared = create(size)
            # Do not close it at exit: a receiver that still sees the process must find its memory.
            weakref.finalize(self, os.close, fd).atexit = False
            collapse_shared(memory, size)
            self.memory = _as_tensor(memory, size)
        elif on_cpu and (private := private_memory(size)) is not None:
            self.memory = _as_tensor(private, size)
        else:
            self.memory = _page_aligned(size, device)

    @property
    def nbytes(self) -> int:
        """Capacity in bytes."""
        return self.memory.numel()

    @property
    def address(self) -> int:
        """Address of its first byte."""
        return self.memory.data_ptr()


def _page_aligned(nbytes: int, device: str) -> torch.Tensor:
    raw = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % PAGE_BYTES
    return raw[skip : skip + nbytes]


def _as_tensor(memory: mmap.mmap, nbytes: int) -> torch.Tensor:
    """Return a tensor over a mapping; the mapping ends when its last tensor is freed."""
    return torch.from_numpy(np.frombuffer(memory, np.uint8, nbytes))


class DoubleArena:
    """Two arenas, allocated on first use and replaced by larger ones if needed.

    Only one thread at a time may use it.

    ``on_new`` gets each new arena, to register it for transfers. ``on_old`` gets each arena that is
    replaced or closed.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        shared: bool = False,
        on_new: Callable[[Arena], None] = lambda _: None,
        on_old: Callable[[Arena], None] = lambda _: None,
    ) -> None:
        self._device = device
        self._shared = shared
        self._on_new = on_new
        self._on_old = on_old
        self._arenas: list[Arena | None] = [None, None]
        self._versions: list[str | None] = [None, None]

    def take(self, nbytes: int) -> Arena:
        """Return an arena of at least ``nbytes`` that holds no version, to be filled.

        At least one arena must be free. The returned one counts as free until `hold`, so a failed
        publish needs no cleanup.
        """
        free = [slot for slot, version in enumerate(self._versions) if version is None]

        def waste(slot: int) -> tuple[bool, int]:
            arena = self._arenas[slot]
            size = 0 if arena is None else arena.nbytes
            return (size < nbytes, size)

        slot = min(free, key=waste)
        arena = self._arenas[slot]
        if arena is not None and arena.nbytes >= nbytes:
            return arena
        self._arenas[slot] = None
        if arena is not None:
            self._on_old(arena)
        # Freed before the larger one is allocated, so that both need not fit at once. Receivers may
        # keep it mapped for a while.
        del arena
        larger = Arena(nbytes, device=self._device, shared=self._shared)
        self._on_new(larger)
        self._arenas[slot] = larger
        return larger

    def hold(self, arena: Arena, version_id: str) -> None:
        """Mark an arena as holding a version until `release`."""
        self._versions[self._arenas.index(arena)] = version_id

    def release(self, version_id: str) -> None:
        """Free the arena of a version that has no readers; do nothing if none holds it."""
        if version_id in self._versions:
            self._versions[self._versions.index(version_id)] = None

    def close(self) -> None:
        """Drop both arenas, whatever they hold. May be called again."""
        arenas = [arena for arena in self._arenas if arena is not None]
        self._arenas = [None, None]
        self._versions = [None, None]
        for arena in arenas:
            self._on_old(arena)
