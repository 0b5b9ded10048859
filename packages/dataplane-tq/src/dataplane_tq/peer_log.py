"""One short log line per peer and minute, however much a peer does wrong.

A line names the peer and the kind of fault, never what the peer sent: ids and values are the
user's. A traceback takes milliseconds to render, in which a server of one thread serves nobody.
"""

from __future__ import annotations

import resource
import threading
import time
from pathlib import PurePath
from typing import Any  # Any: structlog's loggers have no static type

_EVERY_S = 60.0
_MAX_PEERS = 1024
_MAX_CONNECTIONS = 4096
_SPARE_DESCRIPTORS = 128
"""For a process's own files, and for what Ray opens in it."""


class PeerLog:
    """Warnings about peers, limited to one per peer and minute. Threads may share it.

    Args:
        logger: of structlog.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._peers: dict[str, tuple[float, int]] = {}
        """Moment of the last line, and how many were left out since."""

    def warn(self, event: str, peer: str, **facts: str) -> None:
        """Log ``event``, unless a line about ``peer`` was logged in the last minute."""
        now = time.monotonic()
        with self._lock:
            logged, suppressed = self._peers.pop(peer, (-_EVERY_S, 0))
            due = now - logged >= _EVERY_S
            if not due:
                self._peers[peer] = logged, suppressed + 1
                return
            if len(self._peers) >= _MAX_PEERS:
                del self._peers[next(iter(self._peers))]
            self._peers[peer] = now, 0
        self._logger.warning(event, peer=peer, suppressed=suppressed, **facts)


def fault(error: BaseException) -> str:
    """The class of an error and the line that raised it, without its text."""
    trace = error.__traceback__
    if trace is None:
        return type(error).__name__
    while trace.tb_next is not None:
        trace = trace.tb_next
    path = PurePath(trace.tb_frame.f_code.co_filename)
    return f"{type(error).__name__} at {path.parent.name}/{path.name}:{trace.tb_lineno}"


def max_connections() -> int:
    """How many connections a server of this process holds at most, within its descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        _MAX_CONNECTIONS if soft < 0 else max(16, min(_MAX_CONNECTIONS, soft - _SPARE_DESCRIPTORS))
    )
