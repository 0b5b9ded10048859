"""Errors of queries and actions, each with its HTTP status."""

from __future__ import annotations


class ServiceError(Exception):
    """A failed query or action; its text is one sentence for the user."""

    status = 500


class Refused(ServiceError):
    """A request with invalid parameters."""

    status = 422


class NotFound(ServiceError):
    """A request for something that does not exist."""

    status = 404


class NotAllowed(ServiceError):
    """An action while actions are disabled."""

    status = 404


class Conflict(ServiceError):
    """An action that the data plane's state does not allow now."""

    status = 409


class Unavailable(ServiceError):
    """A query or action that needs the store or the data plane while it is unavailable."""

    status = 503


class TimedOut(ServiceError):
    """A query that the data plane did not answer in time."""

    status = 504
