"""Limits of every listener: connections, time for a first request, and log lines.

A peer that connects and stays silent, or sends half a request, occupies only its own connection.
Silent peers are dropped after a timeout, or earlier if there are too many, to admit newer peers.
What a peer sends is never logged.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_LINE_PAUSE_S = 60.0
_MAX_LINES = 60
"""Lines that one listener may log in `_LINE_PAUSE_S`, for all its peers."""
_MAX_PEERS = 1024
_EXPIRE_S = 0.5
_MIN_CONNECTIONS = 8

_logger = logging.getLogger("refit_mx")


def bounded_connections(wanted: int, share: float) -> int:
    """Return how many connections a listener may hold, at most ``wanted``.

    ``share`` is the fraction of the file descriptors that this process may open; the others remain
    for its other work.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(_MIN_CONNECTIONS, int(soft * share)))


class PeerLog:
    """Warnings about peers: up to one line per peer and minute, and 60 lines per minute in all."""

    def __init__(self, listener: str) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        # By host: when the next line may be written, and how many were suppressed since the last.
        self._peers: dict[str, tuple[float, int]] = {}
        self._lines_from = 0.0
        self._lines = 0

    def warn(self, peer: str, event: str) -> None:
        """Log an event of a peer, by its host; ``event`` must have nothing that the peer sent."""
        now = time.monotonic()
        with self._lock:
            until, suppressed = self._peers.pop(peer, (0.0, 0))
            if now - self._lines_from >= _LINE_PAUSE_S:
                self._lines_from, self._lines = now, 0
            quiet = now < until or self._lines >= _MAX_LINES
            self._peers[peer] = (until, suppressed + 1) if quiet else (now + _LINE_PAUSE_S, 0)
            if len(self._peers) > _MAX_PEERS:
                del self._peers[next(iter(self._peers))]
            if quiet:
                return
            self._lines += 1
        more = f" ({suppressed} more like this since the last line)" if suppressed else ""
        _logger.warning("%s: peer %s %s%s", self._listener, peer, event, more)


class PendingPeers(Generic[_Key]):
    """Peers whose first request has not arrived, oldest first. Safe to use from many threads.

    A peer is dropped after ``timeout_s``. Beyond ``max_pending`` the oldest is dropped.
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
        """Add a peer whose request has not arrived, under the identity of its connection or call.

        The function ``drop`` ends it; it is called at most once, in any thread, and must not block.
        """
        with self._lock:
            self._pending[key] = (time.monotonic(), peer, drop)
            full = len(self._pending) > self._max
        if full:
            self.drop_oldest()

    def remove(self, key: _Key) -> None:
        """Remove a peer that sent its request or disconnected, if it is pending."""
        with self._lock:
            self._pending.pop(key, None)

    def drop_oldest(self) -> _Key | None:
        """Drop the peer that was silent for longest; return its key, or None if none is pending."""
        with self._lock:
            key = next(iter(self._pending), None)
            if key is None:
                return None
            _, peer, drop = self._pending.pop(key)
        self._drop(peer, drop, "was silent and was dropped for a newer peer")
        return key

    def close(self) -> None:
        """Stop the timer. May be called again."""
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
        with contextlib.suppress(OSError):  # it has disconnected
            drop()
        self._log.warn(peer, event)
