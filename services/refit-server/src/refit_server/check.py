"""Health check of a server, as container probes run it; imports only what it needs."""

from __future__ import annotations

from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from refit_server.address import split_address

_DIRECT = (("grpc.enable_http_proxy", 0),)
"""Options of the channel: ignore proxies from the environment."""


class CheckError(Exception):
    """A server that does not answer, or that reports another status than SERVING."""


def check(
    address: str, *, tls_ca: Path | None = None, tls_name: str | None = None, timeout_s: float = 5.0
) -> None:
    """Check that the server reports SERVING. No token is needed.

    Args:
        address: HOST:PORT.
        tls_ca: PEM file of the certificates to trust; None connects without TLS.
        tls_name: expected name in the server's certificate; None for the host of ``address``.
        timeout_s: time limit for the connection and the answer.

    Raises:
        CheckError: the server does not answer, reports another status, or ``address`` has another
            form.
    """
    try:
        split_address(address)  # gRPC would connect to another port
    except ValueError as error:
        raise CheckError(f"--address: {error}") from None
    if tls_name is not None and tls_ca is None:
        raise CheckError("--tls-name without --tls-ca; expected both")
    if tls_ca is None:
        channel = grpc.insecure_channel(address, options=_DIRECT)
    else:
        try:
            trusted = tls_ca.read_bytes()
        except OSError as error:
            raise CheckError(f"--tls-ca {tls_ca}: {error.strerror}") from None
        named = (("grpc.ssl_target_name_override", tls_name),) if tls_name is not None else ()
        channel = grpc.secure_channel(
            address, grpc.ssl_channel_credentials(trusted), options=(*_DIRECT, *named)
        )
    with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise CheckError(f"{address}: {error.code().name}: {error.details()}") from None
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        raise CheckError(f"{address}: {status}")
