"""`CollectorSession`: the HTTP session of the SDK's exporters.

The SDK treats a redirect as success and ignores the body of a response. Here a redirect is a
failure, rejected items are counted, and only the first part of a long response is read.
"""

from __future__ import annotations

import time
from typing import Any  # Any: keyword arguments of requests pass through

import requests
import urllib3
from google.protobuf.message import DecodeError

from observability.wire import Kind, rejected_count

_MAX_ANSWER_BYTES = 1 << 16
_MIN_TIMEOUT_S = 0.01
"""Minimum timeout: the library `requests` rejects the 0 that the SDK passes at its deadline."""
_RETRYABLE = frozenset({429, 502, 503, 504})
"""Statuses after which OTLP allows a retry."""


class NotDelivered(Exception):
    """A failed request that the SDK must not retry."""


class CollectorSession(requests.Session):
    """A session that sends one request at a time and stores its outcome.

    Args:
        kind: signal of its requests.

    Attributes:
        once: whether the SDK must not retry a failed request.
        deadline: monotonic time beyond which no request continues.
        sent: 1 if a request was sent for the current batch, else 0.
        rejected: number of items of the last request that the collector rejected.
        trouble: kind and details of the last request's failure; None if it succeeded.
        transient: whether the last failure was transient: no connection, no response in time, or a
            status that allows a retry.
    """

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._kind = kind
        self.once = False
        self.deadline: float | None = None
        self.reset()

    def reset(self) -> None:
        """Discard the outcome of the previous batch."""
        self.sent = self.rejected = 0
        self.trouble: tuple[str, str] | None = None
        self.transient = False

    def request(self, method: str, url: str | bytes, *args: Any, **kwargs: Any) -> Any:
        """Send as `requests.Session.request` does, and read the response.

        Raises:
            NotDelivered: the request failed and must not be retried.
            requests.RequestException: the request failed; the SDK decides whether to retry.
        """
        self.reset()
        self.sent = 1
        timeouts = [] if kwargs.get("timeout") is None else [kwargs["timeout"]]
        if self.deadline is not None:
            timeouts.append(self.deadline - time.monotonic())
        if timeouts:
            kwargs["timeout"] = max(min(timeouts), _MIN_TIMEOUT_S)
        try:
            answer = super().request(method, url, *args, **{**kwargs, "stream": True})
            with answer:
                body = answer.raw.read(_MAX_ANSWER_BYTES, decode_content=True)
        except Exception as error:  # an adapter may raise anything
            self.trouble = _trouble(error)
            transient_types = (
                requests.ConnectionError,
                requests.Timeout,
                urllib3.exceptions.HTTPError,
            )
            self.transient = isinstance(error, transient_types) and not isinstance(
                error, requests.exceptions.SSLError
            )
            if self.once or isinstance(error, ValueError):
                raise NotDelivered(self.trouble[0]) from error
            raise
        if not 200 <= answer.status_code < 300:
            self.trouble = f"collector answered {answer.status_code}", str(answer.reason)
            self.transient = answer.status_code in _RETRYABLE
            if self.once or answer.status_code < 400:
                raise NotDelivered(self.trouble[0])
            return answer
        try:
            self.rejected = rejected_count(self._kind, body)
        except DecodeError:
            self.rejected = 0  # a 2xx status means success, whatever the body
        if self.rejected:
            self.trouble = "collector rejected a part", f"{self.rejected} items"
        return answer


def _trouble(error: Exception) -> tuple[str, str]:
    if isinstance(error, requests.Timeout):
        return "collector timed out", type(error).__name__
    if isinstance(error, requests.RequestException) and isinstance(error, ValueError):
        return "invalid endpoint", type(error).__name__
    if isinstance(error, requests.ConnectionError):
        inner = error.args[0] if error.args else error
        return "collector is unreachable", str(getattr(inner, "reason", inner))
    return f"export raised {type(error).__name__}", str(error)
