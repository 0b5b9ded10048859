"""`ScratchPool`: registered buffers that versions are received into, reused from refit to refit.

The one thing that must hold: a buffer that an abandoned read may still write into is handed to
nobody, and its memory is never given back, before the transport knows that no byte can come.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType

import torch

from refit_mx.arena import Arena
from refit_mx.cuda_order import wait_for
from refit_mx.deadline import Deadline
from refit_mx.errors import RefitConfigError, ScratchExhaustedError
from refit_mx.transports.base import Transport

POLL_S = 0.05
"""How often a quarantined buffer is asked about by one who waits for it."""

# Buffers that were still being written into when their pool was closed. Freeing one would let late
# bytes into whatever the memory is used for next, so they live as long as the process.
_NEVER_FREED: list[Arena] = []


@dataclass(frozen=True)
class ScratchCounts:
    """For metrics: bytes of buffers, by what they are doing.

    Attributes:
        in_use: taken and not given back.
        idle: to be handed out.
        quarantined: an abandoned read may still write into them.
        quarantines: how often a buffer went there so far.
    """

    in_use: int
    idle: int
    quarantined: int
    quarantines: int


class Scratch:
    """A buffer that was taken. As a context manager it gives itself back.

    Attributes:
        memory: uint8, (bytes,): the whole registered buffer, at least as large as asked for.
    """

    def __init__(self, arena: Arena, pool: ScratchPool) -> None:
        self.memory: torch.Tensor = arena.memory
        self._arena = arena
        self._pool = pool

    def __enter__(self) -> Scratch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.give_back(self)


class ScratchPool:
    """Buffers of one transport.

    As a transport, it is for one thread at a time, except that `counts` may be read from others.

    Args:
        transport: that reads into the buffers.
        most_bytes: of all buffers together, those in quarantine included.
        device: of the memory.
    """

    def __init__(self, transport: Transport, *, most_bytes: int, device: str = "cpu") -> None:
        if most_bytes < 1:
            raise RefitConfigError(f"ScratchPool: most_bytes {most_bytes}; expected at least 1")
        self._transport = transport
        self._most = most_bytes
        self._device = device
        self._lock = threading.Condition()
        self._idle: list[Arena] = []
        self._in_use: list[Arena] = []
        self._quarantined: list[Arena] = []
        self._quarantines = 0
        self._closed = False

    def take(self, nbytes: int, deadline: Deadline) -> Scratch:
        """A buffer of at least ``nbytes`` that nothing writes into.

        Args:
            nbytes: that are needed.
            deadline: for waiting until others give theirs back or leave quarantine.

        Raises:
            ScratchExhaustedError: no buffer by the deadline, or none could ever be large enough.
        """
        if nbytes > self._most:
            raise ScratchExhaustedError(
                f"scratch of {nbytes} bytes; the pool may have {self._most}: raise its most_bytes"
            )
        with self._lock:
            while True:
                if self._closed:
                    raise RefitConfigError("the scratch pool was closed")
                self._end_quarantines()
                arena = self._found(nbytes)
                if arena is not None:
                    self._in_use.append(arena)
                    return Scratch(arena, self)
                left = deadline.left_s
                if not left:
                    raise ScratchExhaustedError(
                        f"scratch of {nbytes} bytes: none free of the pool's {self._most}; "
                        f"{_total(self._in_use)} are in use and {_total(self._quarantined)} "
                        f"in quarantine ({len(self._quarantined)} buffers)"
                    )
                self._lock.wait(min(POLL_S, left) if self._quarantined else left)

    def give_back(self, scratch: Scratch) -> None:
        """Nobody uses the buffer any more; it goes to quarantine if a read may still write into it.

        Nothing happens if it was given back before.
        """
        with self._lock:
            arena = scratch._arena
            if not _removed(self._in_use, arena):
                return
            if self._closed:
                self._dispose(arena)
            elif self._transport.busy(arena.memory):
                self._quarantines += 1
                self._quarantined.append(arena)
            else:
                self._idle.append(arena)
            self._lock.notify_all()

    def quarantine(self, scratch: Scratch) -> None:
        """Give back a buffer whose fetch failed: it waits until the transport is done with it."""
        self.give_back(scratch)

    def discard(self, scratch: Scratch) -> None:
        """Give up a buffer that somebody may still look into: it is handed to nobody any more.

        Nothing happens if it was given back before.
        """
        with self._lock:
            if _removed(self._in_use, scratch._arena):
                self._dispose(scratch._arena)
                self._lock.notify_all()

    def counts(self) -> ScratchCounts:
        """What the buffers are doing."""
        with self._lock:
            return ScratchCounts(
                in_use=_total(self._in_use),
                idle=_total(self._idle),
                quarantined=_total(self._quarantined),
                quarantines=self._quarantines,
            )

    def close(self) -> None:
        """Unregister and free the buffers; call it before the transport's own `close`.

        Those in quarantine stay allocated as long as the process lives, unless the transport is
        done with them. Those in use are freed when they are given back. May be called again.
        """
        with self._lock:
            self._closed = True
            self._end_quarantines()
            for arena in (*self._idle, *self._quarantined):
                self._dispose(arena)
            self._idle.clear()
            self._quarantined.clear()
            self._lock.notify_all()

    def _end_quarantines(self) -> None:
        for arena in [a for a in self._quarantined if not self._transport.busy(a.memory)]:
            _removed(self._quarantined, arena)
            self._idle.append(arena)

    def _found(self, nbytes: int) -> Arena | None:
        fitting = [arena for arena in self._idle if arena.nbytes >= nbytes]
        if fitting:
            smallest = min(fitting, key=lambda arena: arena.nbytes)
            _removed(self._idle, smallest)
            return smallest
        for arena in sorted(self._idle, key=lambda arena: arena.nbytes):
            if self._room() >= nbytes:
                break
            _removed(self._idle, arena)
            self._transport.unregister(arena.memory)
        if self._room() < nbytes:
            return None
        made = Arena(nbytes, device=self._device)
        # Kernels that use what it was before may be queued.
        wait_for([made.memory.device])
        self._transport.register(made.memory)
        return made

    def _room(self) -> int:
        return self._most - _total(self._idle) - _total(self._in_use) - _total(self._quarantined)

    def _dispose(self, arena: Arena) -> None:
        if self._transport.busy(arena.memory):
            _NEVER_FREED.append(arena)
        else:
            self._transport.unregister(arena.memory)


def _total(arenas: list[Arena]) -> int:
    return sum(arena.nbytes for arena in arenas)


def _removed(arenas: list[Arena], arena: Arena) -> bool:
    if arena not in arenas:
        return False
    arenas.remove(arena)
    return True
