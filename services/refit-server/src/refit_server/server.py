"""The server: the control plane and the standard health service, with a bounded stop.

Orchestrators and load balancers read the health status, so it becomes NOT_SERVING before anything
else stops. Servicers are synchronous and run in threads next to the event loop.
"""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from refit_mx.control import Limits, MemoryStore, SqliteStore
from refit_mx.control.embedded import MAX_REQUEST_BYTES, THREADS
from refit_mx.control.plane import ControlPlane
from refit_mx.control.servicer import add_servicers
from refit_mx.listening.grpc_server import server_options
from refit_mx.listening.peers import PeerLog
from refit_mx.listening.threaded import ThreadedListener
from refit_server.address import Address
from refit_server.interceptors import RequestGuard, TokenInterceptor
from refit_server.metrics import REQUEST_S, Metrics
from refit_server.tls import TlsFiles

SERVICES = ("", "model_express.refit.RefitService", "model_express.p2p.P2pService")
"""Names that the health service knows; the empty name is the complete server."""
_POLL_S = 1.0
_DESCRIPTORS = 1 << 16
_CONNECTIONS_SHARE = 0.75
"""Fraction of this process's file descriptors that connections may use."""


class BindError(OSError):
    """An address that the server cannot listen on."""


class StateError(RuntimeError):
    """A state that cannot be stored any more, so that the server stopped."""


async def serve(
    address: Address,
    *,
    tls: TlsFiles | None,
    token: str | None,
    state: Path | None,
    limits: Limits,
    restart_grace_s: float,
    metrics: tuple[str, int] | None,
    grace_s: float,
    on_ready: Callable[[Address], None],
    on_metrics: Callable[[str], None],
) -> None:
    """Run the server until SIGTERM or SIGINT.

    Then the health status becomes NOT_SERVING, new calls are refused, and calls in progress may
    finish within ``grace_s`` after the signal.

    Args:
        address: address to listen on; port 0 picks a free one.
        tls: certificate and key; required unless the address is loopback.
        token: token that calls must send; required unless the address is loopback.
        state: SQLite file; None holds the state in memory, and a restart forgets it.
        limits: bounds on what is retained.
        restart_grace_s: minimum time for which live records stay live after a restart or a pause;
            see `ControlPlane`.
        metrics: numeric host and port of the metrics, 0 for a free port; None for no metrics.
        grace_s: time limit of calls in progress; then the metrics and the store are closed.
        on_ready: callback with the bound address, called once when the server answers calls.
        on_metrics: callback with the metrics' URL, called once before ``on_ready``.

    Raises:
        ValueError: the address is not loopback and ``tls`` or ``token`` is missing, or a file of
            TLS or of the state is wrong.
        BindError: (an OSError) an address is in use, or does not belong to this machine.
        StateError: the state could not be stored any more.
    """
    address.check_access(has_tls=tls is not None, has_token=token is not None)
    credentials = tls.credentials() if tls is not None else None
    try:
        # Checked here: gRPC logs the reason of a failure, but its error does not contain the
        # reason.
        address.check_free()
    except OSError as error:
        raise BindError(f"cannot listen on {address}: {error.strerror}") from None
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    _raise_descriptor_limit()
    log = PeerLog("control plane")
    threads = ThreadPoolExecutor(THREADS, thread_name_prefix="refit-control")
    interceptors: Sequence[grpc.aio.ServerInterceptor] = [
        RequestGuard(threads, log),
        *([TokenInterceptor(token, log)] if token is not None else []),
    ]
    server = grpc.aio.server(
        migration_thread_pool=threads,
        options=(
            *server_options(_CONNECTIONS_SHARE),
            ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ),
        interceptors=interceptors,
    )
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    bound = _bind(server, address, credentials)
    store = MemoryStore() if state is None else SqliteStore(state)
    plane = ControlPlane(store, limits=limits, restart_grace_s=restart_grace_s)
    metrics_listener: ThreadedListener | None = None
    try:
        collected = Metrics()
        collected.watch(plane)
        if metrics is not None:
            metrics_listener = _serve_metrics(collected, *metrics)
            on_metrics(f"http://{Address(metrics[0], metrics_listener.port)}/metrics")
        add_servicers(server, plane, collected.observe)
        await server.start()
        for name in SERVICES:
            await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        on_ready(bound)
        await _until_stop(stop, plane)
        await _stop(server, servicer, loop.time() + grace_s)
    finally:
        if metrics_listener is not None:
            metrics_listener.close(REQUEST_S)
        plane.close()
    if plane.failed is not None:
        raise StateError(f"the state cannot be stored: {plane.failed}")


async def _until_stop(stop: asyncio.Event, plane: ControlPlane) -> None:
    # A server that cannot store its state must not look healthy; its orchestrator restarts it.
    while not stop.is_set() and plane.failed is None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_POLL_S):
                await stop.wait()


async def _stop(
    server: grpc.aio.Server, servicer: health.aio.HealthServicer, deadline: float
) -> None:
    # A health watcher that does not read its stream can block this call.
    with suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            await servicer.enter_graceful_shutdown()
    await server.stop(max(0.0, deadline - asyncio.get_running_loop().time()))


def _raise_descriptor_limit() -> None:
    """Raise the limit of open files, so that this process can hold many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _serve_metrics(metrics: Metrics, host: str, port: int) -> ThreadedListener:
    try:
        return metrics.serve(host, port)
    except OSError as error:
        raise BindError(f"cannot listen on {host}:{port} for metrics: {error.strerror}") from None


def _bind(
    server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None
) -> Address:
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError as error:
        raise BindError(f"cannot listen on {address}: {error}") from None
    return Address(address.host, port)
