"""`DoubleArena`: the memory of a source, two arenas, each of one version at a time.

The one thing that must hold: the bytes of a version that was published are never overwritten before
the version is released. So an arena is only handed out for filling while it holds no version.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType

import numpy as np
import torch

from refit_mx.deadline import Deadline
from refit_mx.errors import RefitConfigError, RefitTimeoutError
from refit_mx.large_pages import collapse_shared, private_memory
from refit_mx.manifest import SharedMemory
from refit_mx.shared_memory import create

PAGE_BYTES = 4096


class Arena:
    """One contiguous piece of memory; its size never changes.

    Args:
        nbytes: at least 0; rounded up to whole pages, at least one.
        device: ``cpu`` or a CUDA device.
        shared: whether other processes of this machine may map it; only on ``cpu``.

    Attributes:
        memory: uint8, (bytes,), beginning at a page.
        shared: how others map it; None if they may not.

    Raises:
        ValueError: a negative size.
    """

    def __init__(self, nbytes: int, *, device: str = "cpu", shared: bool = False) -> None:
        if nbytes < 0:
            raise ValueError(f"Arena: {nbytes} bytes; expected 0 or more")
        size = max(1, -(-nbytes // PAGE_BYTES)) * PAGE_BYTES
        self.shared: SharedMemory | None = None
        on_cpu = torch.device(device).type == "cpu"
        if on_cpu and shared:
            fd, memory, self.shared = create(size)
            # Not at exit: a receiver that finds the process would not find its memory.
            weakref.finalize(self, os.close, fd).atexit = False
            collapse_shared(memory, size)
            self.memory = _seen(memory, size)
        elif on_cpu and (private := private_memory(size)) is not None:
            self.memory = _seen(private, size)
        else:
            self.memory = _plain(size, device)

    @property
    def nbytes(self) -> int:
        """Bytes that it has room for."""
        return self.memory.numel()

    @property
    def address(self) -> int:
        """Of its first byte."""
        return self.memory.data_ptr()


def _plain(nbytes: int, device: str) -> torch.Tensor:
    raw = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % PAGE_BYTES
    return raw[skip : skip + nbytes]


def _seen(memory: mmap.mmap, nbytes: int) -> torch.Tensor:
    """Unmapped with the last tensor that looks into it."""
    return torch.from_numpy(np.frombuffer(memory, np.uint8, nbytes))


class ArenaLease:
    """An arena to be filled with a version. End it with `hold` or `abandon`.

    As a context manager it abandons what was not held, so that a publish that fails leaves the
    arena free.

    Attributes:
        arena: to be filled; nobody reads it yet.
    """

    def __init__(self, arena: Arena, owner: DoubleArena, slot: int) -> None:
        self.arena = arena
        self._owner = owner
        self._slot = slot
        self._open = True

    @property
    def memory(self) -> torch.Tensor:
        """uint8, (bytes,): at least as many as were asked for."""
        return self.arena.memory

    def hold(self, version_id: str) -> None:
        """The arena holds this version now, until `DoubleArena.release`.

        Raises:
            RefitConfigError: the lease has ended, or the other arena holds this version.
        """
        if not self._open:
            raise RefitConfigError(f"version {version_id!r}: the lease on its arena has ended")
        self._owner._hold(self._slot, version_id)
        self._open = False

    def abandon(self) -> None:
        """The arena is free again. Nothing happens if the lease has ended."""
        if self._open:
            self._open = False
            self._owner._free(self._slot)

    def __enter__(self) -> ArenaLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()


class DoubleArena:
    """Two arenas, made when they are first needed and replaced by larger ones when they have to be.

    Safe to use from several threads.

    Args:
        device: of the memory.
        shared: whether other processes of this machine may map it; only on ``cpu``.
        on_new: told of an arena before it is first handed out, to register it for transfers.
        on_old: told of an arena that is given up for a larger one or by `close`, to undo that.
    """

    def __init__(
        self,
        *,
        device: str = "cpu",
        shared: bool = False,
        on_new: Callable[[Arena], None] | None = None,
        on_old: Callable[[Arena], None] | None = None,
    ) -> None:
        self._device = device
        self._shared = shared
        self._on_new = on_new
        self._on_old = on_old
        self._changed = threading.Condition()
        self._arenas: list[Arena | None] = [None, None]
        self._versions: list[str | None] = [None, None]
        self._filling = [False, False]
        self._closed = False

    @property
    def versions(self) -> tuple[str, ...]:
        """The versions that are held."""
        with self._changed:
            return tuple(version for version in self._versions if version is not None)

    def take(self, nbytes: int, *, deadline: Deadline) -> ArenaLease:
        """An arena that holds no version.

        Args:
            nbytes: that it needs at least.
            deadline: for waiting until a version is released, if both arenas hold one.

        Raises:
            RefitTimeoutError: the deadline passed; names the versions that hold the arenas.
            RefitConfigError: it was closed.
        """
        with self._changed:
            while True:
                if self._closed:
                    raise RefitConfigError("the arenas were closed")
                slot = self._free_slot(nbytes)
                if slot is not None:
                    break
                if not self._changed.wait(deadline.left_s) and not deadline.left_s:
                    raise RefitTimeoutError(
                        f"{deadline.error()}: no arena is free; they hold {self._held_text()}"
                    )
            self._filling[slot] = True
        try:
            arena = self._fitting(slot, nbytes)
        except BaseException:
            self._free(slot)
            raise
        return ArenaLease(arena, self, slot)

    def arena_of(self, version_id: str) -> Arena:
        """The arena that holds a version.

        Raises:
            KeyError: none does.
        """
        with self._changed:
            if version_id in self._versions:
                arena = self._arenas[self._versions.index(version_id)]
                assert arena is not None
                return arena
        raise KeyError(version_id)

    def release(self, version_id: str) -> bool:
        """Nobody reads this version any more: its arena may be filled again.

        Returns:
            Whether it was held.
        """
        with self._changed:
            if version_id not in self._versions:
                return False
            self._versions[self._versions.index(version_id)] = None
            self._changed.notify_all()
            return True

    def close(self) -> None:
        """Give up both arenas, whatever they hold. May be called again."""
        with self._changed:
            self._closed = True
            old = [arena for arena in self._arenas if arena is not None]
            self._arenas = [None, None]
            self._versions = [None, None]
            self._changed.notify_all()
        for arena in old:
            if self._on_old is not None:
                self._on_old(arena)

    def _free_slot(self, nbytes: int) -> int | None:
        free = [slot for slot in (0, 1) if self._versions[slot] is None and not self._filling[slot]]

        def waste(slot: int) -> tuple[bool, int]:
            arena = self._arenas[slot]
            size = 0 if arena is None else arena.nbytes
            return (size < nbytes, size)

        return min(free, key=waste) if free else None

    def _fitting(self, slot: int, nbytes: int) -> Arena:
        arena = self._arenas[slot]
        if arena is not None and arena.nbytes >= nbytes:
            return arena
        self._arenas[slot] = None
        if arena is not None and self._on_old is not None:
            self._on_old(arena)
        # Freed before the larger one is made, so that both never have to fit. Receivers that map it
        # keep it for a while.
        del arena
        larger = Arena(nbytes, device=self._device, shared=self._shared)
        if self._on_new is not None:
            self._on_new(larger)
        with self._changed:
            closed = self._closed
            if not closed:
                self._arenas[slot] = larger
        if closed:
            if self._on_old is not None:
                self._on_old(larger)
            raise RefitConfigError("the arenas were closed")
        return larger

    def _hold(self, slot: int, version_id: str) -> None:
        with self._changed:
            if self._closed:
                raise RefitConfigError("the arenas were closed")
            if version_id in self._versions:
                raise RefitConfigError(f"version {version_id!r} is held by the other arena")
            self._versions[slot] = version_id
            self._filling[slot] = False

    def _free(self, slot: int) -> None:
        with self._changed:
            self._filling[slot] = False
            self._changed.notify_all()

    def _held_text(self) -> str:
        return " and ".join(
            "one that is being filled" if filling else f"version {version!r}"
            for version, filling in zip(self._versions, self._filling, strict=True)
        )
