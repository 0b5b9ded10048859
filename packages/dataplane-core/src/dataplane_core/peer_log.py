"""Rate-limited warnings about the peers of a server, so that no peer can flood the log.

A line names the peer and the kind of fault, never what the peer sent: ids and values belong to the
user. It has no traceback: rendering one would block a single-threaded server for milliseconds.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import PurePath
from traceback import walk_tb

import structlog

_PAUSE_S = 60.0
_MAX_LINES = 60
_MAX_PEERS = 1024
_MAX_FRAMES = 4


class PeerLog:
    """Logger of at most one line per peer and minute, and 60 lines per minute in total.

    Thread-safe.

    Args:
        logger: a structlog logger.
    """

    def __init__(self, logger: structlog.typing.FilteringBoundLogger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        # Peer to the time from which it may log again, and the number of lines left out until now.
        self._peers: dict[str, tuple[float, int]] = {}
        self._window_end = 0.0
        self._in_window = 0

    def warn(self, event: str, peer: str, **facts: str) -> None:
        """Log an event of a peer, unless a limit is reached.

        Args:
            event: name of the event.
            peer: the peer's address, without a port.
            facts: further fields; nothing that the peer sent.
        """
        now = time.monotonic()
        with self._lock:
            next_line, left_out = self._peers.pop(peer, (0.0, 0))
            if now >= self._window_end:
                self._window_end, self._in_window = now + _PAUSE_S, 0
            quiet = now < next_line or self._in_window >= _MAX_LINES
            self._peers[peer] = (next_line, left_out + 1) if quiet else (now + _PAUSE_S, 0)
            if len(self._peers) > _MAX_PEERS:
                del self._peers[next(iter(self._peers))]
            if quiet:
                return
            self._in_window += 1
        if left_out:
            facts["left_out"] = f"{left_out} since the last line"
        self._logger.warning(event, peer=peer, **facts)


def fault(error: BaseException) -> str:
    """Return the class of an error and its innermost frames, without its message.

    The frame that raised it comes first: ``KeyError at store/rows.py:12 < app.py:30``.
    """
    frames = deque(walk_tb(error.__traceback__), maxlen=_MAX_FRAMES)
    paths = [(PurePath(frame.f_code.co_filename), line) for frame, line in reversed(frames)]
    places = " < ".join(f"{path.parent.name}/{path.name}:{line}" for path, line in paths)
    return f"{type(error).__name__} at {places}" if places else type(error).__name__
