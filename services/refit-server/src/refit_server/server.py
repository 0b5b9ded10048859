"""The server: the control plane, the standard health service, and a stop that is bounded.

Health is what an orchestrator and a load balancer look at, so it goes NOT_SERVING before anything
else stops. The control plane's servicers are synchronous and run in threads beside the event loop.
"""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from refit_mx.control.embedded import MAX_REQUEST_BYTES, THREADS
from refit_mx.control.limits import Limits
from refit_mx.control.plane import ControlPlane
from refit_mx.control.servicer import add_servicers
from refit_mx.control.store import MemoryStore, SqliteStore
from refit_mx.grpc_listening import server_options
from refit_mx.listening import PeerLog
from refit_server.address import Address
from refit_server.metrics import Metrics, MetricsServer
from refit_server.requests import RequestGuard
from refit_server.tls import TlsFiles
from refit_server.token import TokenInterceptor

SERVICES = ("", "model_express.refit.RefitService", "model_express.p2p.P2pService")
"""What the health service speaks of; the empty name is the whole server."""
_LOOK_S = 1.0
_DESCRIPTORS = 1 << 16
_SHARE = 0.75
"""Of this process's file descriptors that connections may take."""


class BindError(OSError):
    """The address cannot be listened on."""


class StateError(RuntimeError):
    """The state can no longer be kept, so the server stopped."""


@dataclass(frozen=True)
class MetricsAddress:
    """Where Prometheus asks.

    Attributes:
        host: a numeric address.
        port: 0 takes a free one.
    """

    host: str = "127.0.0.1"
    port: int = 0


@dataclass(frozen=True)
class Keeping:
    """What the control plane keeps.

    Attributes:
        state: SQLite file; None keeps the state in memory, and a restart forgets it.
        retention: READY versions of each model; 0 keeps all.
        forget_after_s: until a released version without shards and leases is forgotten.
        most_ttl_s: that a worker or a lease may ask for.
        restart_grace_s: for which what was live is taken for live after a restart or a pause, at
            most.
    """

    state: Path | None = None
    retention: int = 2
    forget_after_s: float = 3600.0
    most_ttl_s: float = 86_400.0
    restart_grace_s: float = 30.0


async def serve(
    address: Address,
    *,
    tls: TlsFiles | None = None,
    token: str | None = None,
    keeping: Keeping | None = None,
    metrics: MetricsAddress | None = None,
    grace_s: float = 10.0,
    on_ready: Callable[[Address], None] | None = None,
    on_metrics: Callable[[str], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Then the health service turns NOT_SERVING, no new call is accepted, and calls under way may
    finish until ``grace_s`` seconds after the signal.

    Args:
        address: where to listen; port 0 takes a free one.
        tls: certificate and key; needed unless the address is loopback.
        token: that calls must bring; needed unless the address is loopback.
        keeping: what is kept, and where.
        metrics: where Prometheus asks; None shows no metrics.
        grace_s: how long the stop may take, in seconds.
        on_ready: called once with the bound address, when calls are answered.
        on_metrics: called once with the URL of the metrics, before ``on_ready``.

    Raises:
        ValueError: the address is not loopback and there is no ``tls`` or no ``token``, or the
            files of TLS or of the state are wrong.
        BindError: (an OSError) an address is in use or not one of this machine.
        StateError: the state could not be kept any more.
    """
    keeping = keeping or Keeping()
    if not address.is_loopback and (tls is None or token is None):
        raise ValueError(
            f"{address} is reachable from other machines; give a TLS certificate and key and a "
            "token, or a loopback address"
        )
    credentials = tls.credentials() if tls is not None else None
    _check_free(address)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for asked_to_stop in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(asked_to_stop, stop.set)

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
            *server_options(_SHARE),
            ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ),
        interceptors=interceptors,
    )
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    bound = _bind(server, address, credentials)
    limits = Limits(
        retention=keeping.retention,
        forget_after_s=keeping.forget_after_s,
        most_ttl_s=keeping.most_ttl_s,
    )
    store = MemoryStore() if keeping.state is None else SqliteStore(keeping.state)
    plane = ControlPlane(store, limits=limits, restart_grace_s=keeping.restart_grace_s)
    shown: MetricsServer | None = None
    try:
        counted = Metrics()
        counted.watch(plane)
        if metrics is not None:
            shown = _show(counted, metrics)
            if on_metrics is not None:
                host = f"[{metrics.host}]" if ":" in metrics.host else metrics.host
                on_metrics(f"http://{host}:{shown.port}/metrics")
        add_servicers(server, plane, counted.observe)
        await server.start()
        for name in SERVICES:
            await servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        if on_ready is not None:
            on_ready(bound)
        await _until_stop(stop, plane)
        await _stop(server, servicer, loop.time() + grace_s)
    finally:
        if shown is not None:
            shown.close()
        plane.close()
    if plane.failed is not None:
        raise StateError(f"the state cannot be kept: {plane.failed}")


async def _until_stop(stop: asyncio.Event, plane: ControlPlane) -> None:
    # A server that cannot keep its state must not look healthy; its orchestrator restarts it.
    while not stop.is_set() and plane.failed is None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await stop.wait()


async def _stop(
    server: grpc.aio.Server, servicer: health.aio.HealthServicer, deadline: float
) -> None:
    # A watcher that does not read its stream can hold the announcement up.
    with suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            await servicer.enter_graceful_shutdown()
    await server.stop(max(0.0, deadline - asyncio.get_running_loop().time()))


def _raise_descriptor_limit() -> None:
    """Let this process, which does nothing else, hold as many connections as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _show(metrics: Metrics, address: MetricsAddress) -> MetricsServer:
    try:
        return metrics.serve(address.host, address.port)
    except OSError as error:
        raise BindError(
            f"cannot listen on {address.host}:{address.port} for metrics: {error.strerror}"
        ) from None


def _check_free(address: Address) -> None:
    try:
        # gRPC would only say that it failed, and log the reason by itself.
        address.check_free()
    except OSError as error:
        raise BindError(f"cannot listen on {address}: {error.strerror}") from None


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
    return address.with_port(port)
