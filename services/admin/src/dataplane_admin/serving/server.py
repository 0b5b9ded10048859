"""Server that runs the application until a signal and stops within a time limit."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import resource
import socket
import sys
from collections.abc import Callable
from typing import Any  # Any: the context of asyncio's exception handler

import structlog
import uvicorn
from fastapi import FastAPI

from dataplane_admin.serving.connections import Config, Connection, Connections
from dataplane_admin.serving.listen import BACKLOG, listen, resolve
from dataplane_admin.serving.process import exit_cleanly_on_signals, make_collections_rare
from dataplane_core.peer_log import PeerLog, fault

logger = structlog.get_logger("dataplane_admin")

_OPEN_FILES = 65_536
# Reserved for the store, the data plane and other files of the process.
_OTHER_FILES = 256
_MIN_CONNECTIONS = 32
_MAX_CONNECTIONS = 16_384
_ACCEPTED_AT_ONCE = 64
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_exhausted = PeerLog(logger)


def _announce(url: str) -> None:
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()


def serve(
    app: FastAPI,
    *,
    host: str = "127.0.0.1",
    port: int = 8080,
    shutdown_timeout_s: int = 10,
    announce: Callable[[str], object] = _announce,
) -> None:
    """Serve an application of `create_app` until SIGTERM or SIGINT, as the command does.

    Call it from the main thread. Unlike the command, it accepts an address that other machines can
    reach even if the application has no token.

    Args:
        app: the application; its lifespan begins and ends here.
        host: host to listen on.
        port: port to listen on; 0 picks a free one.
        shutdown_timeout_s: seconds for running requests to finish, before they are cancelled.
        announce: called with the URL when connections are accepted; prints it by default.

    Raises:
        OSError: the host is unknown, or listening on the address failed.
    """
    exit_cleanly_on_signals()
    listener, bound = listen(resolve(host, port))
    announce(f"http://{bound}{app.state.settings.root_path}")
    serve_on(app, listener, shutdown_timeout_s=shutdown_timeout_s)


def serve_on(app: FastAPI, listener: socket.socket, *, shutdown_timeout_s: int) -> None:
    """Serve ``app`` on ``listener`` until SIGTERM or SIGINT.

    Running requests may finish for ``shutdown_timeout_s`` seconds, then they are cancelled.
    """
    config = Config(
        app,
        access_log=False,
        # Number of connections to accept before serving the existing ones again.
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
    make_collections_rare()
    gc.freeze()  # no collection visits what was imported
    _Server(app, config).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Server that ends live updates at shutdown, instead of waiting for them until the timeout."""

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
    """Log filter that limits uvicorn's messages about peers, and omits what they sent."""

    def __init__(self) -> None:
        super().__init__()
        self._log = PeerLog(logger)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record of uvicorn; its warnings are about peers' data."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            # Without the error's text, which may quote the request.
            self._log.warn("request_failed", "any", error=fault(error))
            return False
        return record.levelno > logging.WARNING


def _on_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log a failed accept on one line: asyncio would log a traceback for each attempt."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in _EXHAUSTED:
        _exhausted.warn("connection_not_accepted", "any", reason=error.strerror or "")
    else:
        loop.default_exception_handler(context)


def _max_connections() -> int:
    """Raise the process's limit of open files, and return how many may be connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return max(_MIN_CONNECTIONS, min(_MAX_CONNECTIONS, soft - _OTHER_FILES))
