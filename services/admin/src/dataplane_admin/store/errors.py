"""What the store raises."""

from __future__ import annotations


class StoreError(Exception):
    """What was asked for was not done."""


class QueueFull(StoreError):
    """The writer has more to write than it may hold; come again in ``retry_s`` seconds."""

    def __init__(self, message: str, retry_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_s = retry_s


class StoreUnavailable(StoreError):
    """The database did not take it now, or not in time; the same may be sent again."""


class WriteRefused(StoreError):
    """The database does not take it, nor would it later."""
