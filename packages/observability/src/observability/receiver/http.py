"""The HTTP side of the receiver: OTLP over HTTP with protobuf, on loopback.

It follows the OTLP specification (https://opentelemetry.io/docs/specs/otlp/#otlphttp) and trusts no
client: body sizes, connections and waits are bounded. The Host header is checked, which stops web
pages that reach the address by DNS rebinding.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any  # Any: socketserver's own types of requests and addresses

from google.protobuf.message import DecodeError

from observability.bounded_http import BoundedHandler, BoundedServer
from observability.wire import (
    INVALID_ARGUMENT,
    PROTOBUF,
    UNAVAILABLE,
    Kind,
    TooLong,
    export_answer,
    gunzip,
    status_answer,
)

MAX_CONNECTIONS = 256
"""Maximum number of concurrent connections; an exporting process keeps up to four open."""

_ANSWER_S = 30.0
_BODY_S = 30.0
_LINGER_S = 1.0
_CHUNK = 1 << 16

_KINDS: dict[str, Kind] = {"/v1/traces": "traces", "/v1/logs": "logs", "/v1/metrics": "metrics"}
_REFUSED = "a trace or span id is all zero or has a wrong length"
_MAX_MESSAGE = 120
_HTTP_2 = b"PRI * HTTP/2"  # the first bytes of a gRPC connection

Accept = Callable[[Kind, bytes], int]
"""Function that accepts the body of a request; raises DecodeError if the body is malformed.

It returns how many spans were rejected because of invalid ids.
"""


class Refused(Exception):
    """A request to be answered with an error."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class OtlpServer(BoundedServer):
    """A server that calls ``accept`` for every request, in one thread per connection.

    Raises:
        ValueError: ``host`` is not loopback.
        OSError: the port is taken.
    """

    def __init__(self, host: str, port: int, *, max_body: int, accept: Accept) -> None:
        if not is_loopback(host):
            raise ValueError(f"host={host!r}: expected a loopback address, 127.0.0.1 for example")
        self.max_body = max_body
        self.accept = accept
        self._idle = threading.Condition()
        self._busy = 0
        self._closing = False
        super().__init__(host, port, _Handler, max_connections=MAX_CONNECTIONS)

    def refuse_grpc(self, peer: str) -> None:
        """Log that a peer sends OTLP over gRPC."""
        self.log.warn(
            "otlp_grpc_refused",
            peer,
            expected="OTLP over HTTP: OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf",
        )

    def begin(self) -> None:
        """Count a request as running.

        Raises:
            Refused: the server is closing.
        """
        with self._idle:
            if self._closing:
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the receiver is closing")
            self._busy += 1

    def end(self) -> None:
        """Count a running request as answered."""
        with self._idle:
            self._busy -= 1
            self._idle.notify_all()

    def close(self, timeout_s: float) -> None:
        """Answer running requests within ``timeout_s`` seconds, then hang up."""
        with self._idle:
            self._closing = True
        self.shutdown()
        self.server_close()
        with self._idle:
            self._idle.wait_for(lambda: self._busy == 0, timeout_s)
        self.hang_up()


class _Handler(BoundedHandler):
    server: OtlpServer
    protocol_version = "HTTP/1.1"
    server_version = "otlp-receiver"
    sys_version = ""

    def parse_request(self) -> bool:
        """Parse the head of a request; hang up on gRPC clients, which cannot read an answer."""
        if self.raw_requestline.startswith(_HTTP_2):
            self.server.refuse_grpc(self.client_address[0])
            self.close_connection = True
            return False
        return super().parse_request()

    def do_POST(self) -> None:  # noqa: N802  # the base's name
        """Handle an export request."""
        try:
            self.server.begin()
        except Refused as refused:
            self._refuse(refused)
            return
        try:
            kind = self._kind()
            sent = self._body(self._length())
            self.server.mark_busy(self.connection)
            body = self._decompressed(sent)
            refused_spans = self.server.accept(kind, body)
            answer = export_answer(kind, refused_spans, _REFUSED)
            self._answer(HTTPStatus.OK, answer.SerializeToString())
        except Refused as refused:
            self._refuse(refused)
        except DecodeError as error:
            self._refuse(Refused(HTTPStatus.BAD_REQUEST, f"not an OTLP request: {error}"))
        finally:
            self.server.end()

    def __getattr__(self, name: str) -> Any:
        # http.server looks up do_<METHOD>; one function handles all methods but POST.
        if name.startswith("do_"):
            return self._wrong_method
        raise AttributeError(name)

    def _wrong_method(self) -> None:
        known = self.path in _KINDS
        status = HTTPStatus.METHOD_NOT_ALLOWED if known else HTTPStatus.NOT_FOUND
        self._refuse(Refused(status, f"expected POST to {', '.join(_KINDS)}"))

    def _kind(self) -> Kind:
        host = self.headers.get("Host", "")
        if not is_loopback(_without_port(host)):
            raise Refused(HTTPStatus.FORBIDDEN, f"Host {host!r} is not loopback")
        kind = _KINDS.get(self.path)
        if kind is None:
            raise Refused(HTTPStatus.NOT_FOUND, f"expected one of {', '.join(_KINDS)}")
        content = self.headers.get_content_type()
        if content != PROTOBUF or "Content-Type" not in self.headers:
            raise Refused(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type {content}: expected {PROTOBUF}"
            )
        encoding = self.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in ("gzip", "identity"):
            raise Refused(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"Content-Encoding {encoding}: expected gzip or none",
            )
        return kind

    def _length(self) -> int:
        if "Transfer-Encoding" in self.headers:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "expected Content-Length")
        lengths = self.headers.get_all("Content-Length") or []
        if len(lengths) != 1:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "expected one Content-Length")
        if not (lengths[0].isascii() and lengths[0].isdecimal()):
            raise Refused(HTTPStatus.BAD_REQUEST, f"Content-Length {lengths[0]!r} is not a number")
        length = int(lengths[0]) if len(lengths[0]) < 19 else 1 << 62
        if length > self.server.max_body:
            raise self._too_large()
        return length

    def _body(self, length: int) -> bytes:
        self.deadline = time.monotonic() + _BODY_S
        body = bytearray()
        while len(body) < length:
            try:
                chunk = self.rfile.read1(min(length - len(body), _CHUNK))
            except TimeoutError:
                raise Refused(
                    HTTPStatus.REQUEST_TIMEOUT, f"{len(body)} of {length} bytes arrived"
                ) from None
            if not chunk:
                raise Refused(HTTPStatus.BAD_REQUEST, f"{len(body)} of {length} bytes arrived")
            body += chunk
        return bytes(body)

    def _decompressed(self, body: bytes) -> bytes:
        if self.headers.get("Content-Encoding", "identity").strip().lower() == "identity":
            return body
        try:
            return gunzip(body, self.server.max_body)
        except TooLong:
            raise self._too_large() from None
        except ValueError as error:
            raise Refused(HTTPStatus.BAD_REQUEST, str(error)) from error

    def _too_large(self) -> Refused:
        return Refused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {self.server.max_body} bytes"
        )

    def _refuse(self, refused: Refused) -> None:
        """Answer with an error and hang up, because the body may be unread."""
        self.close_connection = True
        code = UNAVAILABLE if refused.status >= 500 else INVALID_ARGUMENT
        self._answer(refused.status, status_answer(code, str(refused)[:_MAX_MESSAGE]))
        # Closing while the body still arrives would reset the connection and lose the answer.
        deadline = time.monotonic() + _LINGER_S
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_LINGER_S)
            while time.monotonic() < deadline and self.connection.recv(_CHUNK):
                continue

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.connection.settimeout(_ANSWER_S)
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
    """Return whether a host name or address without its port is a loopback one."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # Since Python 3.13, `is_loopback` is True for ::ffff:127.0.0.1, too.
    return address.is_loopback and getattr(address, "ipv4_mapped", None) is None


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
