"""Errors of the store."""

from __future__ import annotations


class StoreError(Exception):
    """An operation of the store that failed."""


class QueueFull(StoreError):
    """A write while the queue is full; retry in ``retry_s`` seconds."""

    def __init__(self, message: str, retry_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class StoreUnavailable(StoreError):
    """An operation that the database did not finish now; it can be retried."""


class WriteUnfinished(StoreUnavailable):
    """A write that the database did not finish in time, and may still finish."""


class WriteRefused(StoreError):
    """A write that the database rejects, now and later."""
