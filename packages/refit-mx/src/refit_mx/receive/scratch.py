"""`ScratchPool`: registered buffers for received versions, reused from refit to refit.

Invariant: while an abandoned read may still write into a buffer, the buffer is quarantined. Nothing
else uses it, and its memory is not freed, until the transport is sure that no byte can arrive.
"""

from __future__ import annotations

import threading

from refit_mx.deadline import Deadline
from refit_mx.errors import RefitConfigError, ScratchExhaustedError
from refit_mx.memory.arena import Arena
from refit_mx.memory.cuda import synchronize
from refit_mx.transports.base import Transport

POLL_S = 0.05
"""Polling interval for a quarantined buffer that a receive waits for."""

# Buffers with abandoned reads when their pool was closed. If one were freed, late bytes could
# corrupt the memory's next use, so they exist as long as the process.
_NEVER_FREED: list[Arena] = []


class ScratchPool:
    """Scratch buffers of one transport: one thread at a time may take them, any may release."""

    def __init__(self, transport: Transport, *, max_bytes: int, device: str = "cpu") -> None:
        self._transport = transport
        self._max_bytes = max_bytes
        self._device = device
        self._lock = threading.Condition()
        self._idle: set[Arena] = set()
        self._in_use: set[Arena] = set()
        self._quarantined: set[Arena] = set()
        self._closed = False

    def take(self, nbytes: int, deadline: Deadline) -> Arena:
        """Return a buffer of at least ``nbytes`` that nothing writes into.

        If necessary, wait for other buffers to be released or leave quarantine.

        Raises:
            ScratchExhaustedError: no buffer is free by the deadline, or the limit is too small.
        """
        if nbytes > self._max_bytes:
            raise ScratchExhaustedError(
                f"scratch of {nbytes} bytes; the pool's limit is {self._max_bytes}: "
                "raise scratch_copies"
            )
        with self._lock:
            while True:
                if self._closed:
                    raise RefitConfigError("the scratch pool was closed")
                self._end_quarantines()
                arena = self._take_fitting(nbytes)
                if arena is not None:
                    self._in_use.add(arena)
                    return arena
                left = deadline.left_s
                if not left:
                    raise ScratchExhaustedError(
                        f"scratch of {nbytes} bytes: too few of the pool's {self._max_bytes} "
                        "are free; "
                        f"{_total(self._in_use)} are in use and {_total(self._quarantined)} "
                        f"in quarantine ({len(self._quarantined)} buffers)"
                    )
                self._lock.wait(min(POLL_S, left) if self._quarantined else left)

    def release(self, arena: Arena) -> None:
        """Release a buffer; quarantine it if a read may still write into it.

        Do nothing if it was released before.
        """
        with self._lock:
            if arena not in self._in_use:
                return
            self._in_use.remove(arena)
            if self._closed:
                self._dispose(arena)
            elif self._transport.busy(arena.memory):
                self._quarantined.add(arena)
            else:
                self._idle.add(arena)
            self._lock.notify_all()

    def discard(self, arena: Arena) -> None:
        """Remove a buffer whose tensors may still be in use: it is never taken again.

        Do nothing if it was released before.
        """
        with self._lock:
            if arena in self._in_use:
                self._in_use.remove(arena)
                self._dispose(arena)
                self._lock.notify_all()

    @property
    def has_quarantined(self) -> bool:
        """True while an abandoned read may still write into a released buffer."""
        with self._lock:
            self._end_quarantines()
            return bool(self._quarantined)

    def close(self) -> None:
        """Unregister and free the buffers; call this before the transport's `close`.

        Buffers in quarantine stay allocated for the life of the process, unless the transport is
        done with them. Buffers in use are freed when they are released. May be called again.
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
        ended = {a for a in self._quarantined if not self._transport.busy(a.memory)}
        self._quarantined -= ended
        self._idle |= ended

    def _take_fitting(self, nbytes: int) -> Arena | None:
        fitting = [arena for arena in self._idle if arena.nbytes >= nbytes]
        if fitting:
            smallest = min(fitting, key=lambda arena: arena.nbytes)
            self._idle.remove(smallest)
            return smallest
        while self._idle and self._free_bytes() < nbytes:
            smallest = min(self._idle, key=lambda arena: arena.nbytes)
            self._idle.remove(smallest)
            self._transport.unregister(smallest.memory)
            del smallest  # its memory is freed before the larger buffer is allocated
        if self._free_bytes() < nbytes:
            return None
        arena = Arena(nbytes, device=self._device)
        # Kernels of the memory's previous use may still be queued.
        synchronize([arena.memory.device])
        self._transport.register(arena.memory)
        return arena

    def _free_bytes(self) -> int:
        return (
            self._max_bytes - _total(self._idle) - _total(self._in_use) - _total(self._quarantined)
        )

    def _dispose(self, arena: Arena) -> None:
        if self._transport.busy(arena.memory):
            _NEVER_FREED.append(arena)
        else:
            self._transport.unregister(arena.memory)


def _total(arenas: set[Arena]) -> int:
    return sum(arena.nbytes for arena in arenas)
