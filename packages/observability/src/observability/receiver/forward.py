"""Forwarding of export requests to a collector, without blocking the sender."""

from __future__ import annotations

import http.client
import threading
import time
from collections import deque
from urllib.parse import urlsplit

import structlog

from observability.wire import OtlpSignal

logger = structlog.get_logger("observability")

_MAX_QUEUED_BYTES = 64 << 20
_MAX_QUEUED_REQUESTS = 4096
_TIMEOUT_S = 5.0
"""Timeout of each socket operation: connect, send and receive."""


class Forwarder:
    """A bounded queue of requests, and a thread that posts each request once.

    A request is dropped and counted if the queue is full, if `close` has begun, or if the collector
    does not accept it. Requests still queued at the end of `close` are dropped and counted too.

    Args:
        base_url: URL of an OTLP/HTTP collector, for example ``http://127.0.0.1:4318``.

    Attributes:
        sent: number of requests that the collector accepted.
        dropped: number of requests that were dropped.

    Raises:
        ValueError: ``base_url`` is not such a URL.
    """

    def __init__(self, base_url: str) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            # The message omits user and password.
            raise ValueError(
                f"forward={base_url.rpartition('@')[2]!r}: expected http://host:port or "
                "https://host:port, without a user"
            )
        self._is_https = parts.scheme == "https"
        self._host, self._port, self._path = parts.hostname, parts.port, parts.path.rstrip("/")
        self._changed = threading.Condition()
        self._queue: deque[tuple[OtlpSignal, bytes]] = deque()
        self._pending_bytes = 0  # bytes of requests that are queued or in flight
        self._closing = False
        self.sent = self.dropped = 0
        self._warned = False
        self._thread = threading.Thread(target=self._run, name="otlp-forward", daemon=True)
        self._thread.start()

    def enqueue(self, signal: OtlpSignal, body: bytes) -> None:
        """Queue a request without blocking.

        The request is dropped if 4,096 requests are queued, if it would raise the pending bytes
        above 64 MiB, or if `close` has begun. A single request above 64 MiB is queued only if
        nothing is pending.
        """
        with self._changed:
            is_full = len(self._queue) >= _MAX_QUEUED_REQUESTS or (
                self._pending_bytes > 0 and self._pending_bytes + len(body) > _MAX_QUEUED_BYTES
            )
            if is_full or self._closing:
                self.dropped += 1
            else:
                self._pending_bytes += len(body)
                self._queue.append((signal, body))
                self._changed.notify_all()
        if is_full:
            self._warn("the queue is full")

    def close(self, timeout_s: float) -> None:
        """Send queued requests for up to ``timeout_s`` seconds; drop those that remain."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(max(deadline - time.monotonic(), 0))
        with self._changed:
            self.dropped += len(self._queue)
            self._queue.clear()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                signal, body = self._queue.popleft()
            failure = self._post(signal, body)
            with self._changed:
                self._pending_bytes -= len(body)
                if failure is None:
                    self.sent += 1
                    continue
                self.dropped += 1
            self._warn(failure)

    def _post(self, signal: OtlpSignal, body: bytes) -> str | None:
        """Post a request.

        Returns:
            The reason of a failure; None if the collector accepted the request.
        """
        connect = http.client.HTTPSConnection if self._is_https else http.client.HTTPConnection
        connection = connect(self._host, self._port, timeout=_TIMEOUT_S)
        headers = {"Content-Type": "application/x-protobuf"}
        try:
            connection.request("POST", f"{self._path}/v1/{signal}", body, headers)
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        return None if 200 <= status < 300 else f"the collector answered {status}"

    def _warn(self, reason: str) -> None:
        """Log the first failure only; `dropped` counts the others."""
        with self._changed:
            has_warned, self._warned = self._warned, True
        if not has_warned:
            logger.warning("forwarding_failed", host=self._host, port=self._port, reason=reason)
