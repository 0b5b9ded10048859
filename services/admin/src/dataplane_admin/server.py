"""Running the application until a signal, and stopping within a bound."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any  # Any: what asyncio tells its handler of exceptions

import structlog
import uvicorn
from fastapi import FastAPI

from dataplane_admin.connections import Config, Connection, Connections
from dataplane_admin.listen import BACKLOG
from observability.peer_log import PeerLog

logger = structlog.get_logger("dataplane_admin")

_OPEN_FILES = 65_536
# For the store, the data plane and what else the process opens.
_OTHER_FILES = 256
_MIN_CONNECTIONS = 32
_MAX_CONNECTIONS = 16_384
_ACCEPTED_AT_ONCE = 64
_FRAMES = 4
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_exhausted = PeerLog(logger)


def end_in_peace_on_signals() -> None:
    """Let SIGTERM and SIGINT end the process with status 0; to be called before it listens.

    uvicorn takes the signals over while it serves, and raises them again once it has stopped.
    """
    for asked_to_stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(asked_to_stop, _exit_in_peace)


def run(app: FastAPI, listener: socket.socket, *, shutdown_timeout_s: int) -> None:
    """Serve ``app`` on ``listener`` until SIGTERM or SIGINT.

    Requests under way may finish for ``shutdown_timeout_s`` seconds, then they are cancelled.
    """
    config = Config(
        app,
        access_log=False,
        # So many connections are accepted before those that are there are served again.
        backlog=_ACCEPTED_AT_ONCE,
        http=Connection,
        log_level="warning",
        loop="asyncio",
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=shutdown_timeout_s,
        ws="none",
    )
    config.connections = Connections(_max_connections())
    logging.getLogger("uvicorn.error").addFilter(_Quiet())
    _Server(app, config).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends live updates before it waits for requests to end: they would not end by themselves."""

    def __init__(self, app: FastAPI, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._app = app

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(_on_loop_error)
        await super().startup(sockets)
        for listener in sockets or []:
            listener.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.updates.end()
        await super().shutdown(sockets)


class _Quiet(logging.Filter):
    """Keeps a peer from filling the log through uvicorn, and what it sent out of the log."""

    def __init__(self) -> None:
        super().__init__()
        self._log = PeerLog(logger)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether uvicorn is to write a record: its warnings are about what peers send."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            # Without the error's text, which may quote the request.
            where = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
            frames = [f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in where]
            self._log.warn("request_failed", "any", error=type(error).__name__, where=str(frames))
            return False
        return record.levelno > logging.WARNING


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Handle what goes wrong in the event loop: asyncio writes a traceback for each attempt."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _EXHAUSTED:
        _exhausted.warn("connection_not_accepted", "any", reason=error.strerror or "")
    else:
        loop.default_exception_handler(context)


def _max_connections() -> int:
    """Raise this process's bound of open files to what it may have; how many may be connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(_MIN_CONNECTIONS, min(_MAX_CONNECTIONS, soft - _OTHER_FILES))


def _exit_in_peace(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)
