"""`EmbeddedControlServer`: the control plane in this process, for the trainer and for tests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType

import grpc

from refit_mx.control.auth import TokenInterceptor
from refit_mx.control.limits import Limits
from refit_mx.control.plane import ControlPlane
from refit_mx.control.servicer import CallObserver, add_servicers
from refit_mx.control.store import Store
from refit_mx.errors import RefitConfigError
from refit_mx.grpc_listening import RequestGuard, server_options
from refit_mx.hosts import host_and_port, told_host

MAX_REQUEST_BYTES = 32 << 20
"""For tensor lists of ``PublishMetadata``."""
THREADS = 16
_SHARE = 0.25
"""Of this process's file descriptors that connections may take."""
_STOP_S = 2.0


class EmbeddedControlServer:
    """Serves ``RefitService`` and ``P2pService`` from threads of this process.

    Args:
        host: to listen on. Anything but loopback is open to everybody who can reach it: there is
            no TLS here, so use the service refit-server for that.
        advertised_host: that others are told; None for ``host``.
        port: to listen on; 0 takes a free one.
        store: where the state is kept; None keeps it in memory alone. Closed with the server.
        retention: READY versions that each model keeps; replaces that of ``limits``.
        limits: what else is kept, and for how long.
        token: that calls must bring as ``authorization: Bearer``; None asks for none.
        restart_grace_s: see `ControlPlane`.
        observe: is told of each call.

    Raises:
        RefitConfigError: the address cannot be listened on, or nobody could connect to what is
            told.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        advertised_host: str | None = None,
        port: int = 0,
        store: Store | None = None,
        retention: int = 2,
        limits: Limits | None = None,
        token: str | None = None,
        restart_grace_s: float = 30.0,
        observe: CallObserver | None = None,
    ) -> None:
        told = told_host(host, advertised_host)
        self._guard = RequestGuard("control plane", THREADS)
        self._server = grpc.server(
            ThreadPoolExecutor(THREADS, thread_name_prefix="refit-control"),
            options=(
                *server_options(_SHARE),
                ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
            ),
            interceptors=[
                self._guard,
                *([TokenInterceptor(token, self._guard.log)] if token is not None else []),
            ],
        )
        where = host_and_port(host, port)
        try:
            bound = self._server.add_insecure_port(where)
        except RuntimeError as error:
            raise RefitConfigError(f"cannot listen on {where}: {error}") from None
        self.address = host_and_port(told, bound)
        """HOST:PORT that clients connect to."""
        self._closed = False
        self.plane = ControlPlane(
            store,
            limits=replace(limits or Limits(), retention=retention),
            restart_grace_s=restart_grace_s,
        )
        if observe is None:
            add_servicers(self._server, self.plane)
        else:
            add_servicers(self._server, self.plane, observe)
        self._server.start()

    def close(self) -> None:
        """Stop: calls under way have two seconds, then the store is closed. May be called again."""
        if not self._closed:
            self._closed = True
            self._server.stop(_STOP_S).wait(2 * _STOP_S)
            self._guard.close()
            self.plane.close()

    def __enter__(self) -> EmbeddedControlServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
