"""What bounds every listener: connections, time for a first request, and lines of the log.

A peer that connects and stays silent, or sends half a request, costs its place and nothing else:
silent peers are dropped after a time-out, and before that in favour of newer ones where there are
too many. What a peer sends is never written into a log.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_LINE_PAUSE_S = 60.0
_MAX_LINES = 60
"""Of one listener in `_LINE_PAUSE_S`, where peers are many."""
_MAX_PEERS = 1024
_EXPIRE_S = 0.5
_MIN_CONNECTIONS = 8

_logger = logging.getLogger("refit_mx")


def bounded_connections(wanted: int, share: float) -> int:
    """Return how many connections a listener may hold.

    Args:
        wanted: the most that it may hold.
        share: of the file descriptors that this process may open, so that others are left for what
            the process does besides.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(_MIN_CONNECTIONS, int(soft * share)))


class PeerLog:
    """Warnings about peers: at most one line a peer and minute, and 60 lines a minute in all.

    Args:
        listener: its name, for the line.
    """

    def __init__(self, listener: str) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        # By host, when the next line may be written, and how many were left out since the last.
        self._peers: dict[str, tuple[float, int]] = {}
        self._lines_from = 0.0
        self._lines = 0

    def warn(self, peer: str, event: str) -> None:
        """Log what a peer did.

        Args:
            peer: its host, without a port.
            event: what it did; nothing that the peer has sent.
        """
        now = time.monotonic()
        with self._lock:
            until, left_out = self._peers.pop(peer, (0.0, 0))
            if now - self._lines_from >= _LINE_PAUSE_S:
                self._lines_from, self._lines = now, 0
            quiet = now < until or self._lines >= _MAX_LINES
            self._peers[peer] = (until, left_out + 1) if quiet else (now + _LINE_PAUSE_S, 0)
            if len(self._peers) > _MAX_PEERS:
                del self._peers[next(iter(self._peers))]
            if quiet:
                return
            self._lines += 1
        more = f" ({left_out} more like this since the last line)" if left_out else ""
        _logger.warning("%s: peer %s %s%s", self._listener, peer, event, more)


class PendingPeers(Generic[_Key]):
    """Peers that owe their first request, the oldest first. Safe to use from several threads.

    Args:
        max_pending: of them; for a further one the oldest is dropped.
        timeout_s: after which one is dropped.
        log: that is told of those that were dropped.
    """

    def __init__(self, max_pending: int, timeout_s: float, log: PeerLog) -> None:
        self._max = max_pending
        self._timeout_s = timeout_s
        self._log = log
        self._lock = threading.Lock()
        self._pending: dict[_Key, tuple[float, str, Callable[[], object]]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._expire, name="refit-pending", daemon=True)
        self._thread.start()

    def add(self, key: _Key, peer: str, drop: Callable[[], object]) -> None:
        """A peer owes its request.

        Args:
            key: of the connection or call.
            peer: its host.
            drop: ends it; called once at most, in any thread, and must not block.
        """
        with self._lock:
            self._pending[key] = (time.monotonic(), peer, drop)
            full = len(self._pending) > self._max
        if full:
            self.drop_oldest()

    def remove(self, key: _Key) -> bool:
        """It has sent its request, or has ended. Returns whether it was pending."""
        with self._lock:
            return self._pending.pop(key, None) is not None

    @contextlib.contextmanager
    def owing(self, key: _Key, peer: str, drop: Callable[[], object]) -> Iterator[None]:
        """`add`, and at the end `remove`."""
        self.add(key, peer, drop)
        try:
            yield
        finally:
            self.remove(key)

    def drop_oldest(self) -> _Key | None:
        """Drop the peer that has been silent for longest. Returns its key, None if none is."""
        with self._lock:
            key = next(iter(self._pending), None)
            if key is None:
                return None
            _, peer, drop = self._pending.pop(key)
        self._drop(peer, drop, "was silent, and its place was needed")
        return key

    def close(self) -> None:
        """Stop counting time. May be called again."""
        self._closed.set()

    def _expire(self) -> None:
        while not self._closed.wait(min(_EXPIRE_S, self._timeout_s)):
            before = time.monotonic() - self._timeout_s
            with self._lock:
                expired = [key for key, (since, _, _) in self._pending.items() if since < before]
                dropped = [self._pending.pop(key) for key in expired]
            for _, peer, drop in dropped:
                self._drop(peer, drop, f"sent no request within {self._timeout_s:g} s")

    def _drop(self, peer: str, drop: Callable[[], object], event: str) -> None:
        with contextlib.suppress(OSError):  # it has ended
            drop()
        self._log.warn(peer, event)
