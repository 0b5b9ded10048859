"""Health check of a server, as container probes run it; imports only what it needs."""

from __future__ import annotations

from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_DIRECT = (("grpc.enable_http_proxy", 0),)
"""Options of the channel: ignore proxies from the environment."""


SERVING = "SERVING"
"""Status of a server that answers calls."""


class CheckError(Exception):
    """A server that does not answer."""


def check(
    address: str, *, tls_ca: Path | None = None, tls_name: str | None = None, timeout_s: float = 5.0
) -> str:
    """Return the health status that the server reports, such as `SERVING`. No token is needed.

    Args:
        address: HOST:PORT.
        tls_ca: PEM file of the certificates to trust; None connects without TLS.
        tls_name: expected name in the server's certificate; None for the host of ``address``.
        timeout_s: time limit for the connection and the answer.

    Raises:
        CheckError: the server does not answer.
        OSError: ``tls_ca`` cannot be read.
    """
    if tls_ca is None:
        channel = grpc.insecure_channel(address, options=_DIRECT)
    else:
        trusted = tls_ca.read_bytes()
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
    status: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return status
