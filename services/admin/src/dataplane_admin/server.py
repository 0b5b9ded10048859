"""Running the application until a signal, and stopping within a bound."""

from __future__ import annotations

import signal
import socket
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI


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
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            access_log=False,
            log_level="warning",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=shutdown_timeout_s,
            ws="none",
        )
    )
    server.run(sockets=[listener])


def _exit_in_peace(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)
