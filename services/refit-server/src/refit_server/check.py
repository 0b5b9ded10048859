"""Asks a server for its health, as probes of containers do; imports no more than that needs."""

from __future__ import annotations

from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_DIRECT = (("grpc.enable_http_proxy", 0),)
"""As every client of the server connects, whatever the environment says of proxies."""


class CheckError(Exception):
    """The server does not answer, or says that it does not serve."""


def check(
    address: str, *, tls_ca: Path | None = None, tls_name: str | None = None, timeout_s: float = 5.0
) -> None:
    """Return if the server says SERVING. The token is not needed for that.

    Args:
        address: HOST:PORT.
        tls_ca: PEM file of the certificates to trust; None speaks without TLS.
        tls_name: that the server's certificate has to be of; None for the host of ``address``.
        timeout_s: for connecting and for the answer, in seconds.

    Raises:
        CheckError: anything else.
    """
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
