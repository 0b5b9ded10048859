"""`Connection`: a gRPC channel to a control plane; each of its failures is a `RefitError`."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from refit_mx.control.auth import is_sendable
from refit_mx.control.protocol import Message
from refit_mx.errors import (
    ControlAccessError,
    ControlError,
    ControlUnavailableError,
    RefitConfigError,
    RefitError,
    RefitTimeoutError,
    VersionNotFoundError,
)

_OPTIONS = (
    # Reconnect within a second after a server restart.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 64 << 20),
    # Otherwise clients of one process share a connection, and its back-off after a failure.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy from the environment would see the token of a loopback connection.
    ("grpc.enable_http_proxy", 0),
)
_NOT_TRUSTED = (
    "CERTIFICATE_VERIFY_FAILED",
    "Hostname Verification Check failed",
    "is not in peer certificate",
)
"""Parts of gRPC's UNAVAILABLE messages for a server whose certificate is not trusted."""
_NOT_TLS = "WRONG_VERSION_NUMBER"


class PreconditionError(ControlError):
    """A FAILED_PRECONDITION status, which each call interprets."""


class Connection:
    """A channel that connects on the first call, and again after a failure.

    Arguments and errors are those of `refit_mx.control.client.ControlClient`.
    """

    def __init__(
        self, address: str, *, tls_ca: Path | str | None, tls_name: str | None, token: str | None
    ) -> None:
        if not address:
            raise RefitConfigError("address of the control plane: none; expected HOST:PORT")
        if tls_name is not None and tls_ca is None:
            raise RefitConfigError(f"tls_name {tls_name!r} without tls_ca; expected both")
        # gRPC would log a token that it cannot send.
        if token is not None and not is_sendable(token):
            raise RefitConfigError(
                f"token for {address}: {len(token)} characters, some of them not visible ASCII"
            )
        if token is not None and tls_ca is None and not _is_loopback(address):
            raise RefitConfigError(
                f"a token for {address} without TLS would be sent unencrypted; set tls_ca"
            )
        self._label = f"control plane at {address}"
        self._metadata = (("authorization", f"Bearer {token}"),) if token is not None else None
        if tls_ca is None:
            self.channel = grpc.insecure_channel(address, options=_OPTIONS)
        else:
            named = (("grpc.ssl_target_name_override", tls_name),) if tls_name is not None else ()
            self.channel = grpc.secure_channel(
                address, _credentials(tls_ca), options=(*_OPTIONS, *named)
            )

    def call(
        self, method: Callable[..., Message], request: Message, *, timeout_s: float
    ) -> Message:
        """Call a stub's method and return its response.

        Raises:
            ControlUnavailableError: no server answers at the address, or the channel is closed.
            ControlAccessError: the token is refused, or the server is not trusted.
            RefitTimeoutError: no answer within ``timeout_s``.
            VersionNotFoundError: NOT_FOUND.
            PreconditionError: FAILED_PRECONDITION.
            ControlError: any other refusal; the message has the status code.
        """
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._translated(error, timeout_s) from None
        except ValueError as error:  # grpc raises it on a closed channel
            raise ControlUnavailableError(f"{self._label}: {error}") from None

    def close(self) -> None:
        """Disconnect. May be called again."""
        self.channel.close()

    def _translated(self, error: Any, timeout_s: float) -> RefitError:  # grpc has no types
        message = f"{self._label}: {error.details()}"
        match error.code():
            case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
                return ControlAccessError(f"{message} ({error.code().name})")
            case grpc.StatusCode.UNAVAILABLE if any(each in message for each in _NOT_TRUSTED):
                return ControlAccessError(
                    f"{message}; its certificate is not signed by tls_ca, or is for another name"
                )
            case grpc.StatusCode.UNAVAILABLE if _NOT_TLS in message:
                return ControlAccessError(f"{message}; it does not use TLS, but tls_ca is set")
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
                return ControlUnavailableError(message)
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return RefitTimeoutError(f"{self._label}: no answer within {timeout_s:g} s")
            case grpc.StatusCode.NOT_FOUND:
                return VersionNotFoundError(message)
            case grpc.StatusCode.FAILED_PRECONDITION:
                return PreconditionError(message)
            case code:
                return ControlError(f"{message} ({code.name})")


def _credentials(tls_ca: Path | str) -> grpc.ChannelCredentials:
    """Return credentials that trust the certificates of a file."""
    try:
        roots = Path(tls_ca).read_bytes()
        # gRPC accepts any bytes here, and then fails every call.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(tls_ca)
    except ssl.SSLError:
        raise RefitConfigError(f"tls_ca {str(tls_ca)!r}: no certificate in PEM") from None
    except OSError as error:
        raise RefitConfigError(f"tls_ca {str(tls_ca)!r}: {error.strerror}") from None
    return grpc.ssl_channel_credentials(roots)


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0]
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:  # gRPC takes the complete address for an IPv6 host
        return False
    try:
        numeric = ipaddress.ip_address(host)
    except ValueError:
        # A name server decides about any other name, even one that begins with `127.`.
        return host == "localhost"
    # Since Python 3.13, `is_loopback` is True for ::ffff:127.0.0.1, too.
    return numeric.is_loopback and getattr(numeric, "ipv4_mapped", None) is None
