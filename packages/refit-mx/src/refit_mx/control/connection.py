"""`Connection`: a gRPC channel to a control plane whose every failure is a `RefitError`."""

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
    # A server that was restarted is found again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 64 << 20),
    # Else clients of one process share a connection, and its back-off after a failure.
    ("grpc.use_local_subchannel_pool", 1),
    # A proxy of the environment would see the token of a connection to loopback.
    ("grpc.enable_http_proxy", 0),
)
_NOT_TRUSTED = (
    "CERTIFICATE_VERIFY_FAILED",
    "Hostname Verification Check failed",
    "is not in peer certificate",
)
"""What gRPC says, as UNAVAILABLE, of a server whose certificate does not do."""
_NOT_TLS = "WRONG_VERSION_NUMBER"


class PreconditionError(ControlError):
    """FAILED_PRECONDITION; each call knows what that means for it."""


class Connection:
    """A channel, made when the first call needs it and again when it broke.

    Args:
        address: HOST:PORT.
        tls_ca: PEM file of the certificates to trust; None speaks without TLS.
        tls_name: that the server's certificate has to be of; None for the host of ``address``.
        token: sent as ``authorization: Bearer``; without TLS only to a loopback address.

    Raises:
        RefitConfigError: the address is empty, a token would travel in the clear or cannot be sent,
            or the certificates cannot be read.
    """

    def __init__(
        self,
        address: str,
        *,
        tls_ca: Path | str | None,
        tls_name: str | None = None,
        token: str | None,
    ) -> None:
        if not address:
            raise RefitConfigError("address of the control plane: none; expected HOST:PORT")
        if tls_name is not None and tls_ca is None:
            raise RefitConfigError(f"tls_name {tls_name!r} without tls_ca; expected both")
        # gRPC would write one that it cannot send into its log.
        if token is not None and not is_sendable(token):
            raise RefitConfigError(
                f"token for {address}: {len(token)} characters, some of them not visible ASCII"
            )
        if token is not None and tls_ca is None and not _is_loopback(address):
            raise RefitConfigError(
                f"a token for {address} without TLS would travel in the clear; give tls_ca"
            )
        self._said = f"control plane at {address}"
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
        """The answer of a stub's method.

        Raises:
            ControlUnavailableError: nobody answers at the address, or the channel is closed.
            ControlAccessError: the token is refused, or the server is not the one to trust.
            RefitTimeoutError: no answer within ``timeout_s``.
            VersionNotFoundError: NOT_FOUND.
            PreconditionError: FAILED_PRECONDITION.
            ControlError: any other refusal; names its status code.
        """
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._as_ours(error, timeout_s) from None
        except ValueError as error:  # grpc raises it on a closed channel
            raise ControlUnavailableError(f"{self._said}: {error}") from None

    def close(self) -> None:
        """Disconnect. May be called again."""
        self.channel.close()

    def _as_ours(self, error: Any, timeout_s: float) -> RefitError:  # grpc has no types
        said = f"{self._said}: {error.details()}"
        match error.code():
            case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.PERMISSION_DENIED:
                return ControlAccessError(f"{said} ({error.code().name})")
            case grpc.StatusCode.UNAVAILABLE if any(each in said for each in _NOT_TRUSTED):
                return ControlAccessError(
                    f"{said}; its certificate is not of tls_ca, or of another name"
                )
            case grpc.StatusCode.UNAVAILABLE if _NOT_TLS in said:
                return ControlAccessError(f"{said}; it does not speak TLS, and tls_ca is given")
            case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.CANCELLED:
                return ControlUnavailableError(said)
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return RefitTimeoutError(f"{self._said}: no answer within {timeout_s:g} s")
            case grpc.StatusCode.NOT_FOUND:
                return VersionNotFoundError(said)
            case grpc.StatusCode.FAILED_PRECONDITION:
                return PreconditionError(said)
            case code:
                return ControlError(f"{said} ({code.name})")


def _credentials(tls_ca: Path | str) -> grpc.ChannelCredentials:
    """To trust the certificates of a file."""
    try:
        roots = Path(tls_ca).read_bytes()
        # gRPC would take anything, and fail every call.
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
    elif ":" in host:  # gRPC takes all of it for an address of IPv6
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # Any other name, such as one that begins with `127.`, is what a name server says it is.
        return host == "localhost"
