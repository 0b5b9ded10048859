"""`EmbeddedControlServer`: the control plane inside this process, for trainers and tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc

from refit_mx.closing import Closeable
from refit_mx.control.auth import TokenInterceptor
from refit_mx.control.limits import Limits
from refit_mx.control.plane import ControlPlane
from refit_mx.control.servicer import CallObserver, add_servicers, ignore_call
from refit_mx.control.store import Store
from refit_mx.errors import RefitConfigError
from refit_mx.listening.grpc_server import RequestGuard, server_options
from refit_mx.listening.hosts import host_and_port, resolve_advertised_host

MAX_REQUEST_BYTES = 32 << 20
"""Size limit of a request, enough for the tensor lists of ``PublishMetadata``."""
THREADS = 16
_CONNECTIONS_SHARE = 0.25
"""Fraction of this process's file descriptors that connections may use."""
_STOP_S = 2.0


class EmbeddedControlServer(Closeable):
    """Server of ``RefitService`` and ``P2pService`` in threads of this process.

    Args:
        host: address to listen on. This server has no TLS: on any address but loopback, use the
            service refit-server instead.
        advertised_host: host that clients connect to; None for ``host``.
        port: port to listen on; 0 picks a free one.
        store: storage of the state; None keeps it in memory only. Closed with the server,
            and also if the server cannot start.
        limits: bounds on what is retained, and for how long.
        token: token that calls must send as ``authorization: Bearer``; None requires none.
        restart_grace_s: see `ControlPlane`.
        observe: callback for each call.

    Raises:
        RefitConfigError: the server cannot listen on the address, or clients cannot connect to the
            advertised host.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        advertised_host: str | None = None,
        port: int = 0,
        store: Store | None = None,
        limits: Limits | None = None,
        token: str | None = None,
        restart_grace_s: float = 30.0,
        observe: CallObserver = ignore_call,
    ) -> None:
        self._closed = False
        with ExitStack() as opened:  # closed again if the server cannot start
            if store is not None:
                opened.callback(store.close)
            advertised = resolve_advertised_host(host, advertised_host)
            self._guard = RequestGuard("control plane", THREADS)
            opened.callback(self._guard.close)
            self._server = grpc.server(
                ThreadPoolExecutor(THREADS, thread_name_prefix="refit-control"),
                options=(
                    *server_options(_CONNECTIONS_SHARE),
                    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
                ),
                interceptors=[
                    self._guard,
                    *([TokenInterceptor(token, self._guard.log)] if token is not None else []),
                ],
            )
            bind_address = host_and_port(host, port)
            try:
                bound = self._server.add_insecure_port(bind_address)
            except RuntimeError as error:
                raise RefitConfigError(f"cannot listen on {bind_address}: {error}") from None
            self.address = host_and_port(advertised, bound)
            """HOST:PORT that clients connect to."""
            self.plane = ControlPlane(store, limits=limits, restart_grace_s=restart_grace_s)
            opened.callback(self.plane.close)
            add_servicers(self._server, self.plane, observe)
            self._server.start()
            opened.pop_all()

    def close(self) -> None:
        """Stop the server: calls in progress have two seconds, then the store is closed.

        May be called again.
        """
        if not self._closed:
            self._closed = True
            self._server.stop(_STOP_S).wait(2 * _STOP_S)
            self._guard.close()
            self.plane.close()
