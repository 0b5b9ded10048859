"""Running the application until a signal, and stopping within a bound."""

from __future__ import annotations

import resource
import signal
import socket
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI

_OPEN_FILES = 65_536


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
    server = _Server(
        app,
        uvicorn.Config(
            app,
            access_log=False,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=shutdown_timeout_s,
            ws="none",
        ),
    )
    _allow_many_connections()
    server.run(sockets=[listener])


class _Server(uvicorn.Server):
    """Ends live updates before it waits for requests to end: they would not end by themselves."""

    def __init__(self, app: FastAPI, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.state.updates.end()
        await super().shutdown(sockets)


def _allow_many_connections() -> None:
    """Raise this process's bound of open files to what it may have, so that many can be refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _exit_in_peace(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)
