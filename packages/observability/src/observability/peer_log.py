"""Warnings about peers of a listener that a peer cannot turn into a flood."""

from __future__ import annotations

import threading
import time

import structlog

_PAUSE_S = 60.0
_MAX_LINES = 60
_MAX_PEERS = 1024


class PeerLog:
    """Log at most one line for each peer and event a minute, and 60 lines a minute in all.

    Safe to use from several threads.

    Args:
        logger: a structlog logger.
    """

    def __init__(self, logger: structlog.typing.FilteringBoundLogger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        # When the next line may be written, and how many were left out since the last one.
        self._lines: dict[tuple[str, str], tuple[float, int]] = {}
        self._window_end = 0.0
        self._in_window = 0

    def warn(self, event: str, peer: str, **about: str) -> None:
        """Log what a peer did.

        Args:
            event: its name.
            peer: its address, without a port.
            about: further fields, the same for every line of this event; nothing that the peer
                has sent.
        """
        now = time.monotonic()
        with self._lock:
            next_line, left_out = self._lines.pop((event, peer), (0.0, 0))
            if now >= self._window_end:
                self._window_end, self._in_window = now + _PAUSE_S, 0
            quiet = now < next_line or self._in_window >= _MAX_LINES
            self._lines[event, peer] = (next_line, left_out + 1) if quiet else (now + _PAUSE_S, 0)
            if len(self._lines) > _MAX_PEERS:
                del self._lines[next(iter(self._lines))]
            if quiet:
                return
            self._in_window += 1
        if left_out:
            about["left_out"] = f"{left_out} since the last line"
        self._logger.warning(event, peer=peer, **about)
