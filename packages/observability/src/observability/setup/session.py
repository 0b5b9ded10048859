"""`CollectorSession`: the HTTP session of the SDK's exporters.

The SDK treats a redirect as success and ignores the body of a response. This session treats a
redirect as a failure, counts rejected items, and reads only the first part of a long response.
"""

from __future__ import annotations

import io
import socket
import time
from functools import partial
from http.client import HTTPResponse
from typing import Any  # Any: keyword arguments of requests and urllib3 pass through

import requests
import urllib3
from google.protobuf.message import DecodeError
from requests.adapters import HTTPAdapter

from observability.bounded_http import DeadlineStream
from observability.wire import OtlpSignal, rejected_records

_MAX_RESPONSE_BYTES = 1 << 16
_MAX_MESSAGE = 300
"""Maximum characters of a collector's message in a warning."""
_MIN_TIMEOUT_S = 0.01
"""Minimum timeout of a request. The SDK passes 0 at its deadline, which `requests` rejects."""
_RETRYABLE = frozenset({429, 502, 503, 504})
"""Statuses of a response after which OTLP allows a retry."""


class NotDelivered(Exception):
    """A failed request that the SDK must not retry."""


class CollectorSession(requests.Session):
    """A session that sends one request at a time and stores its outcome.

    Args:
        signal: signal of its requests.

    Attributes:
        no_retry: whether to prevent the SDK from retrying a failed request.
        deadline: monotonic time at which every request ends; None for no deadline.
        response_deadline: monotonic time at which the current response must be complete.
        is_sent: whether a request was sent for the current batch.
        rejected: number of items of the last request that the collector rejected.
        trouble: kind and details of the last request's failure, or of rejected items; None if the
            request succeeded.
        is_transient: whether the last failure was transient: no connection, no response in time, or
            a status that allows a retry.
    """

    def __init__(self, signal: OtlpSignal) -> None:
        super().__init__()
        self._signal = signal
        self.no_retry = False
        self.deadline: float | None = None
        self.response_deadline = 0.0
        for scheme in ("http://", "https://"):
            self.mount(scheme, _DeadlineAdapter(self))
        self.reset()

    def reset(self) -> None:
        """Discard the outcome of the previous batch."""
        self.is_sent = False
        self.rejected = 0
        self.trouble: tuple[str, str] | None = None
        self.is_transient = False

    def request(self, method: str, url: str | bytes, *args: Any, **kwargs: Any) -> Any:
        """Send a request as `requests.Session.request` does, and read the response.

        Raises:
            NotDelivered: the request failed and must not be retried.
            requests.RequestException: the request failed; the SDK decides whether to retry.
        """
        self.reset()
        self.is_sent = True
        timeout_s = kwargs["timeout"]
        if self.deadline is not None:
            timeout_s = min(timeout_s, self.deadline - time.monotonic())
        kwargs["timeout"] = timeout_s = max(timeout_s, _MIN_TIMEOUT_S)
        self.response_deadline = time.monotonic() + timeout_s
        try:
            response = super().request(method, url, *args, **{**kwargs, "stream": True})
            with response:
                body = response.raw.read(_MAX_RESPONSE_BYTES, decode_content=True)
        except Exception as error:  # an adapter may raise anything
            self.trouble = _describe(error)
            transient_types = (
                requests.ConnectionError,
                requests.Timeout,
                urllib3.exceptions.HTTPError,
            )
            self.is_transient = isinstance(error, transient_types) and not isinstance(
                error, requests.exceptions.SSLError
            )
            # `requests` raises a ValueError for an invalid URL: a retry would fail as well.
            if self.no_retry or isinstance(error, ValueError):
                raise NotDelivered(self.trouble[0]) from error
            raise
        if not 200 <= response.status_code < 300:
            self.trouble = f"collector answered {response.status_code}", str(response.reason)
            self.is_transient = response.status_code in _RETRYABLE
            if self.no_retry or response.status_code < 400:
                raise NotDelivered(self.trouble[0])
            return response
        try:
            self.rejected, message = rejected_records(self._signal, body)
        except DecodeError:
            message = ""  # a 2xx status means success, even if the body is malformed
        if self.rejected:
            shown = " ".join(message[:_MAX_MESSAGE].split())
            details = f"{self.rejected} items: {shown}" if shown else f"{self.rejected} items"
            self.trouble = "collector rejected items", details
        return response


class _DeadlineAdapter(HTTPAdapter):
    """An adapter whose responses must be complete at the deadline of the session.

    A timeout of `requests` begins anew with every byte that arrives.
    """

    def __init__(self, session: CollectorSession) -> None:
        super().__init__()
        self._session = session

    def get_connection_with_tls_context(self, *args: Any, **kwargs: Any) -> Any:
        """Return a pool whose connections read responses until the deadline."""
        pool: Any = super().get_connection_with_tls_context(*args, **kwargs)
        connection_class = type(pool).ConnectionCls

        def connect(**options: Any) -> Any:
            connection = connection_class(**options)
            connection.response_class = partial(_response, self._session)
            return connection

        pool.ConnectionCls = connect
        return pool


def _response(session: CollectorSession, connection: socket.socket, **kwargs: Any) -> HTTPResponse:
    """Return a response that is read from the connection until the deadline of the session."""
    response = HTTPResponse(connection, **kwargs)
    response.fp.close()
    response.fp = io.BufferedReader(DeadlineStream(connection, lambda: session.response_deadline))
    return response


def _describe(error: Exception) -> tuple[str, str]:
    """Return the kind and the details of a failure."""
    if isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError):
        return "collector timed out", type(error).__name__
    if isinstance(error, requests.RequestException) and isinstance(error, ValueError):
        return "invalid endpoint", type(error).__name__
    if isinstance(error, requests.ConnectionError):
        inner = error.args[0] if error.args else error
        return "collector is unreachable", str(getattr(inner, "reason", inner))
    return f"export raised {type(error).__name__}", str(error)
