"""The HTTP side of the receiver: OTLP over HTTP with protobuf, on loopback.

It follows the OTLP specification (https://opentelemetry.io/docs/specs/otlp/#otlphttp). No client is
trusted: body sizes, connections and waits are bounded. The Host header is checked, so a web page
cannot send requests by DNS rebinding.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any, get_args  # Any: socketserver's own types of requests and addresses

from google.protobuf.message import DecodeError

from observability.bounded_http import BoundedHandler, BoundedServer
from observability.wire import (
    INVALID_ARGUMENT,
    PROTOBUF,
    UNAVAILABLE,
    BodyTooLong,
    OtlpSignal,
    export_response,
    gunzip,
    status_response,
)

MAX_CONNECTIONS = 256
"""Maximum number of concurrent connections; an exporting process keeps up to four open."""

# Deadlines: to read a body, to send a response, to discard input after an error response.
_BODY_S = 30.0
_RESPONSE_S = 30.0
_DISCARD_S = 1.0
_CHUNK_BYTES = 1 << 16

_SIGNALS: dict[str, OtlpSignal] = {f"/v1/{signal}": signal for signal in get_args(OtlpSignal)}
"""Signal of a request by its URL path."""

_REJECTED = "a trace or span id is all zero or has a wrong length"
"""Reason in the response if spans were rejected."""

_MAX_MESSAGE_LENGTH = 120
_HTTP_2 = b"PRI * HTTP/2"
"""First bytes of an HTTP/2 connection, which gRPC uses."""

Accept = Callable[[OtlpSignal, bytes], int]
"""Function that accepts the decompressed body of a request.

It returns the number of spans that it rejects because of invalid ids, and raises `DecodeError` if
the body is malformed.
"""


class Refused(Exception):
    """The reason why a request is refused, and the status of its response."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class OtlpServer(BoundedServer):
    """A server that calls ``accept`` for every request, in one thread per connection.

    Args:
        host: a loopback address.
        port: port to bind; 0 selects a free one.
        max_body: maximum size of a body in bytes, before and after decompression.
        accept: function that accepts the body of a request.

    Raises:
        ValueError: ``host`` is not a loopback address.
        OSError: the port is in use.
    """

    def __init__(self, host: str, port: int, *, max_body: int, accept: Accept) -> None:
        if not is_loopback(host):
            raise ValueError(f"host={host!r}: expected a loopback address, for example 127.0.0.1")
        self.max_body = max_body
        self.accept = accept
        self._request_ended = threading.Condition()
        self._running_requests = 0
        self._closing = False
        super().__init__(host, port, _Handler, max_connections=MAX_CONNECTIONS)

    def log_grpc(self, peer: str) -> None:
        """Log that a peer sends OTLP over gRPC, which is refused."""
        self.log.warn(
            "otlp_grpc_refused",
            peer,
            expected="OTLP over HTTP: OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf",
        )

    def begin_request(self) -> None:
        """Count a request as running.

        Raises:
            Refused: the server is closing.
        """
        with self._request_ended:
            if self._closing:
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the receiver is closing")
            self._running_requests += 1

    def end_request(self) -> None:
        """Count a running request as answered."""
        with self._request_ended:
            self._running_requests -= 1
            self._request_ended.notify_all()

    def close(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds for running requests, then shut down all connections."""
        with self._request_ended:
            self._closing = True
        self.shutdown()
        self.server_close()
        with self._request_ended:
            self._request_ended.wait_for(lambda: self._running_requests == 0, timeout_s)
        self.shut_down_connections()


class _Handler(BoundedHandler):
    """Handler of a connection that may carry several requests."""

    server: OtlpServer
    protocol_version = "HTTP/1.1"
    server_version = "otlp-receiver"
    sys_version = ""

    def parse_request(self) -> bool:
        """Parse the request line and headers.

        A gRPC client gets no response, because it cannot read one in HTTP/1.1.
        """
        if self.raw_requestline.startswith(_HTTP_2):
            self.server.log_grpc(self.client_address[0])
            self.close_connection = True
            return False
        return super().parse_request()

    def do_POST(self) -> None:  # noqa: N802  # the base's name
        """Handle an export request."""
        try:
            self.server.begin_request()
        except Refused as refused:
            self._refuse(refused)
            return
        try:
            signal = self._checked_signal()
            encoded = self._read_body(self._checked_length())
            self.server.mark_busy(self.connection)
            body = self._decompress(encoded)
            rejected_spans = self.server.accept(signal, body)
            response = export_response(signal, rejected_spans, _REJECTED)
            self._respond(HTTPStatus.OK, response.SerializeToString())
        except Refused as refused:
            self._refuse(refused)
        except DecodeError as error:
            self._refuse(Refused(HTTPStatus.BAD_REQUEST, f"not an OTLP request: {error}"))
        finally:
            self.server.end_request()

    def __getattr__(self, name: str) -> Any:
        # `http.server` calls do_<METHOD>; one function handles all methods but POST.
        if name.startswith("do_"):
            return self._refuse_method
        raise AttributeError(name)

    def _refuse_method(self) -> None:
        is_known_path = self.path in _SIGNALS
        status = HTTPStatus.METHOD_NOT_ALLOWED if is_known_path else HTTPStatus.NOT_FOUND
        self._refuse(Refused(status, f"expected POST to {', '.join(_SIGNALS)}"))

    def _checked_signal(self) -> OtlpSignal:
        """Return the signal of the request; raise `Refused` if path or headers are unsupported."""
        host = self.headers.get("Host", "")
        if not is_loopback(_without_port(host)):
            raise Refused(HTTPStatus.FORBIDDEN, f"Host {host!r} is not a loopback address")
        signal = _SIGNALS.get(self.path)
        if signal is None:
            raise Refused(HTTPStatus.NOT_FOUND, f"expected one of {', '.join(_SIGNALS)}")
        media_type = self.headers.get_content_type()
        if media_type != PROTOBUF:
            raise Refused(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type {media_type}: expected {PROTOBUF}"
            )
        encoding = self.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("gzip", "identity"):
            raise Refused(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"Content-Encoding {encoding}: expected gzip or none",
            )
        return signal

    def _checked_length(self) -> int:
        """Return the length of the body; raise `Refused` if it is missing or too large."""
        if "Transfer-Encoding" in self.headers:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "expected Content-Length")
        lengths = self.headers.get_all("Content-Length") or []
        if len(lengths) != 1:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "expected one Content-Length")
        if not (lengths[0].isascii() and lengths[0].isdecimal()):
            raise Refused(HTTPStatus.BAD_REQUEST, f"Content-Length {lengths[0]!r} is not a number")
        # A number of 19 digits exceeds every limit. `int` raises for very long ones.
        if len(lengths[0]) >= 19 or int(lengths[0]) > self.server.max_body:
            raise self._body_too_large()
        return int(lengths[0])

    def _read_body(self, length: int) -> bytes:
        self.deadline = time.monotonic() + _BODY_S
        body = bytearray()
        while len(body) < length:
            try:
                chunk = self.rfile.read1(min(length - len(body), _CHUNK_BYTES))
            except TimeoutError:
                raise Refused(
                    HTTPStatus.REQUEST_TIMEOUT,
                    f"{len(body)} of {length} bytes arrived within {_BODY_S:g} s",
                ) from None
            if not chunk:
                raise Refused(
                    HTTPStatus.BAD_REQUEST,
                    f"the connection ended after {len(body)} of {length} bytes",
                )
            body += chunk
        return bytes(body)

    def _decompress(self, body: bytes) -> bytes:
        if self.headers.get("Content-Encoding", "identity").strip().lower() == "identity":
            return body
        try:
            return gunzip(body, self.server.max_body)
        except BodyTooLong:
            raise self._body_too_large() from None
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from error

    def _body_too_large(self) -> Refused:
        return Refused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
            f"the body is longer than {self.server.max_body} bytes",
        )

    def _refuse(self, refused: Refused) -> None:
        """Respond with an error, and close the connection, since the body may be unread."""
        self.close_connection = True
        code = UNAVAILABLE if refused.status >= 500 else INVALID_ARGUMENT
        self._respond(refused.status, status_response(code, str(refused)[:_MAX_MESSAGE_LENGTH]))
        # Closing while the body still arrives would reset the connection, and the client might
        # never read the response. So discard the body for a while.
        deadline = time.monotonic() + _DISCARD_S
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_DISCARD_S)
            while time.monotonic() < deadline and self.connection.recv(_CHUNK_BYTES):
                continue

    def _respond(self, status: HTTPStatus, body: bytes) -> None:
        self.connection.settimeout(_RESPONSE_S)
        self.send_response(status)
        self.send_header("Content-Type", PROTOBUF)
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "POST")
        if status is HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
            self.send_header("Accept-Encoding", "gzip")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")


def is_loopback(host: str) -> bool:
    """Return whether a host, without a port, is ``localhost`` or a loopback address."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # Since Python 3.13, `is_loopback` is also True for ::ffff:127.0.0.1. Refuse it in all versions.
    return address.is_loopback and getattr(address, "ipv4_mapped", None) is None


def _without_port(host: str) -> str:
    """Return the host of a Host header; an IPv6 address is in brackets there."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
