"""The HTTP side of the receiver: OTLP over HTTP with protobuf, on loopback.

It answers as the OTLP specification says (https://opentelemetry.io/docs/specs/otlp/#otlphttp) and
trusts no client: bodies, connections and waiting are bounded, and a web page that got hold of the
address by DNS rebinding is refused by its Host header.
"""

from __future__ import annotations

import errno
import io
import ipaddress
import socket
import socketserver
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any  # Any: socketserver's own types of requests and addresses

import structlog
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from observability.peer_log import PeerLog
from observability.receiver_frames import Kind

logger = structlog.get_logger("observability")

MOST_CONNECTIONS = 256
"""At once; every process that exports keeps up to three. For a further one the connection that has
owed a request for longest is closed, if for `_SILENT_S`; else the further one is answered 503."""

_PROTOBUF = "application/x-protobuf"
_IDLE_S = 30.0  # from when a connection is free for a request until its headers are complete
_SILENT_S = 1.0
_ACCEPT_PAUSE_S = 0.1
_BODY_S = 30.0
_LINGER_S = 1.0
_CHUNK = 1 << 16
_FRAMES = 4

_KINDS: dict[str, Kind] = {"/v1/traces": "traces", "/v1/logs": "logs", "/v1/metrics": "metrics"}
_ANSWERS: dict[Kind, bytes] = {
    "traces": ExportTraceServiceResponse().SerializeToString(),
    "logs": ExportLogsServiceResponse().SerializeToString(),
    "metrics": ExportMetricsServiceResponse().SerializeToString(),
}
# google.rpc.Code, of the message that tells a client what was wrong.
_INVALID_ARGUMENT, _UNAVAILABLE = 3, 14

Accept = Callable[[Kind, bytes], int]
"""Takes the body of a request; raises DecodeError if it is none of this kind.

Returns how many spans of it were refused, because their ids are not valid.
"""


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class OtlpServer(ThreadingHTTPServer):
    """Calls ``accept`` for every request, from one thread per connection.

    Raises:
        ValueError: ``host`` is not loopback.
        OSError: the port is taken.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, *, max_body: int, accept: Accept) -> None:
        if not is_loopback(host):
            raise ValueError(f"host={host!r}: expected a loopback address, 127.0.0.1 for example")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.max_body = max_body
        self.accept = accept
        self._log = PeerLog(logger)
        self._changed = threading.Condition()
        # Since when each connection owes a request; None while one is answered.
        self._open: dict[socket.socket, float | None] = {}
        self._dropped: set[socket.socket] = set()
        self._busy = 0
        self._closing = False
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind, without asking DNS for our name as `http.server` does."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def get_request(self) -> tuple[Any, Any]:
        """Accept a connection; without descriptors for it, wait for some to become free."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._log.warn("connection_not_accepted", "any", reason=error.strerror or "")
                time.sleep(_ACCEPT_PAUSE_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread of its own, if there is room for it."""
        if not self._make_room(request):
            self._log.warn("connection_refused", client_address[0], reason="too many connections")
            request.setblocking(False)
            with suppress(OSError):
                request.send(
                    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
                    b"Content-Length: 0\r\nConnection: close\r\n\r\n"
                )
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread to be had
            self._let_go(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._let_go(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log a mistake of the receiver's, without its text, which may quote what was sent."""
        error = sys.exception()
        if isinstance(error, OSError):  # a client that went away is no news
            return
        where = traceback.extract_tb(error.__traceback__ if error else None)[-_FRAMES:]
        frames = str([f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in where])
        self._log.warn("receiver_failed", "any", error=type(error).__name__, where=frames)

    def owes(self, connection: socket.socket) -> None:
        """The client owes a request from now on."""
        with self._changed:
            if connection in self._open:
                self._open[connection] = time.monotonic()

    def settled(self, connection: socket.socket) -> None:
        """The client has sent its request."""
        with self._changed:
            if connection in self._open:
                self._open[connection] = None

    def begin(self) -> None:
        """A request begins.

        Raises:
            Refused: the server closes.
        """
        with self._changed:
            if self._closing:
                raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "the receiver closes")
            self._busy += 1

    def end(self) -> None:
        """A request that began has been answered."""
        with self._changed:
            self._busy -= 1
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Answer the requests under way within ``timeout_s`` seconds, then hang up."""
        with self._changed:
            self._closing = True
        self.shutdown()
        self.server_close()
        with self._changed:
            self._changed.wait_for(lambda: self._busy == 0, timeout_s)
            for connection in (*self._open, *self._dropped):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _make_room(self, connection: socket.socket) -> bool:
        """Count a connection, and hang up on a silent one if there are too many."""
        now = time.monotonic()
        with self._changed:
            if len(self._open) >= MOST_CONNECTIONS:
                owing = [(since, one) for one, since in self._open.items() if since is not None]
                since, oldest = min(owing, key=lambda one: one[0], default=(now, None))
                if oldest is None or now - since < _SILENT_S:
                    return False
                # Its thread ends by that, and closes it.
                del self._open[oldest]
                self._dropped.add(oldest)
                with suppress(OSError):
                    self._log.warn("connection_dropped", oldest.getpeername()[0])
                    oldest.shutdown(socket.SHUT_RDWR)
            self._open[connection] = now
        return True

    def _let_go(self, connection: socket.socket) -> None:
        with self._changed:
            self._open.pop(connection, None)
            self._dropped.discard(connection)


class _Handler(BaseHTTPRequestHandler):
    server: OtlpServer
    protocol_version = "HTTP/1.1"
    server_version = "otlp-receiver"
    sys_version = ""

    def setup(self) -> None:
        """Read with one deadline for all of a request's headers, and one for its body."""
        super().setup()
        self.rfile.close()
        self._reader = _Timed(self.connection)
        self.rfile = io.BufferedReader(self._reader)

    def handle_one_request(self) -> None:
        """Wait for a request and answer it."""
        self.server.owes(self.connection)
        self._reader.deadline = time.monotonic() + _IDLE_S
        super().handle_one_request()

    def do_POST(self) -> None:
        """Take an export request."""
        try:
            self.server.begin()
        except Refused as refused:
            self._refuse(refused)
            return
        try:
            kind = self._kind()
            sent = self._body(self._length())
            self.server.settled(self.connection)
            body = self._decompressed(sent)
            count = self.server.accept(kind, body)
            self._answer(HTTPStatus.OK, _without(count) if count else _ANSWERS[kind])
        except Refused as refused:
            self._refuse(refused)
        except DecodeError as error:
            self._refuse(Refused(HTTPStatus.BAD_REQUEST, f"not an OTLP request: {error}"))
        finally:
            self.server.end()

    def __getattr__(self, name: str) -> Any:
        # http.server looks up do_<METHOD>; one for all that are not POST.
        if name.startswith("do_"):
            return self._wrong_method
        raise AttributeError(name)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name it has there
        """One line per request is no news."""

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
        if content != _PROTOBUF or "Content-Type" not in self.headers:
            raise Refused(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Content-Type {content}: expected {_PROTOBUF}"
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
            raise Refused(HTTPStatus.BAD_REQUEST, f"Content-Length {lengths[0]!r} is no number")
        length = int(lengths[0]) if len(lengths[0]) < 19 else 1 << 62
        if length > self.server.max_body:
            raise self._too_large()
        return length

    def _body(self, length: int) -> bytes:
        self._reader.deadline = time.monotonic() + _BODY_S
        body = bytearray()
        while len(body) < length:
            try:
                chunk = self.rfile.read1(min(length - len(body), _CHUNK))
            except TimeoutError:
                raise Refused(
                    HTTPStatus.REQUEST_TIMEOUT, f"{len(body)} of {length} bytes came"
                ) from None
            if not chunk:
                raise Refused(HTTPStatus.BAD_REQUEST, f"{len(body)} of {length} bytes came")
            body += chunk
        return bytes(body)

    def _decompressed(self, body: bytes) -> bytes:
        if self.headers.get("Content-Encoding", "identity").strip().lower() == "identity":
            return body
        gzip = zlib.decompressobj(wbits=31)
        try:
            plain = gzip.decompress(body, self.server.max_body + 1)
        except zlib.error as error:
            raise Refused(HTTPStatus.BAD_REQUEST, f"not gzip: {error}") from error
        if len(plain) > self.server.max_body:
            raise self._too_large()
        if not gzip.eof or gzip.unused_data:
            raise Refused(HTTPStatus.BAD_REQUEST, "not one whole gzip stream")
        return plain

    def _too_large(self) -> Refused:
        return Refused(
            HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {self.server.max_body} bytes"
        )

    def _refuse(self, refused: Refused) -> None:
        """Answer with an error and hang up, because the body may not have been read."""
        self.close_connection = True
        code = _UNAVAILABLE if refused.status >= 500 else _INVALID_ARGUMENT
        self._answer(refused.status, _status(code, str(refused)))
        # To hang up on a body that still comes resets the connection, and our answer is lost.
        deadline = time.monotonic() + _LINGER_S
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_LINGER_S)
            while time.monotonic() < deadline and self.connection.recv(_CHUNK):
                continue

    def _answer(self, status: HTTPStatus, body: bytes) -> None:
        self.connection.settimeout(_IDLE_S)
        self.send_response(status)
        self.send_header("Content-Type", _PROTOBUF)
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "POST")
        if status is HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
            self.send_header("Accept-Encoding", "gzip")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body if self.command != "HEAD" else b"")


class _Timed(io.RawIOBase):
    """Reads from a connection until a deadline, however little comes at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.deadline = 0.0

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what is there.

        Raises:
            TimeoutError: nothing came until the deadline.
        """
        rest = self.deadline - time.monotonic()
        if rest <= 0:
            raise TimeoutError("the time for it has run out")
        self._connection.settimeout(rest)
        return self._connection.recv_into(buffer)


def is_loopback(host: str) -> bool:
    """Whether a host name, or an address without its port, is this machine's own."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _without(spans: int) -> bytes:
    """The answer to a request of which so many spans were refused."""
    answer = ExportTraceServiceResponse()
    answer.partial_success.rejected_spans = spans
    answer.partial_success.error_message = "a trace or span id is all zero or of a wrong length"
    return answer.SerializeToString()


def _status(code: int, message: str) -> bytes:
    """A ``google.rpc.Status``, whose Python package is not worth depending on for two fields."""
    text = message.encode()[:120]
    return bytes([0x08, code, 0x12, len(text)]) + text.decode(errors="ignore").encode()
