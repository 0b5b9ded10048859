"""The server: one event loop, the standard health service, and a stop that is bounded.

Health is what an orchestrator and a load balancer look at, so it goes NOT_SERVING before anything
else stops.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from refit_server.address import Address
from refit_server.tls import TlsFiles


class BindError(OSError):
    """The address cannot be listened on."""


async def serve(
    address: Address,
    *,
    tls: TlsFiles | None = None,
    grace_s: float = 10.0,
    on_ready: Callable[[Address], None] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Then the health service turns NOT_SERVING, no new call is accepted, and calls under way may
    finish until ``grace_s`` seconds after the signal.

    Args:
        address: where to listen; port 0 takes a free one.
        tls: certificate and key; needed unless the address is loopback.
        grace_s: how long the stop may take, in seconds.
        on_ready: called once with the bound address, when calls are answered.

    Raises:
        ValueError: if the address is not loopback and there is no ``tls``, or its files are wrong.
        BindError: (an OSError) if the address is in use or not one of this machine.
    """
    if tls is None and not address.is_loopback:
        raise ValueError(
            f"{address} is reachable from other machines; give a TLS certificate and key, "
            "or a loopback address"
        )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for asked_to_stop in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(asked_to_stop, stop.set)

    # Without the option a second server on the same port would share its calls.
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    bound = _bind(server, address, tls)
    await server.start()
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    if on_ready is not None:
        on_ready(bound)

    await stop.wait()
    deadline = loop.time() + grace_s
    # A watcher that does not read its stream can hold the announcement up.
    with suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            await servicer.enter_graceful_shutdown()
    await server.stop(max(0.0, deadline - loop.time()))


def _bind(server: grpc.aio.Server, address: Address, tls: TlsFiles | None) -> Address:
    try:
        # gRPC would only say that it failed, and log the reason by itself.
        address.check_free()
        if tls is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), tls.credentials())
    except OSError as error:
        raise BindError(f"cannot listen on {address}: {error.strerror}") from None
    except RuntimeError as error:
        raise BindError(f"cannot listen on {address}: {error}") from None
    return address.with_port(port)
