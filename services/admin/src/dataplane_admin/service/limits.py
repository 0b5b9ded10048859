"""Limits of the parameters of queries."""

from __future__ import annotations

from dataplane_admin.service.errors import Refused

MAX_ID = 4_096
"""Maximum length of an id in a query, in characters."""
MAX_WINDOWS = 500
MAX_PAGE = 1_000
MAX_STEPS = 10_000
MAX_RANGES = 500
MAX_POINTS = 2_000
MAX_S = 10**9
"""Maximum duration in a query, in seconds."""


def check(name: str, value: float, minimum: int, maximum: int) -> None:
    """Raise `Refused` if a parameter is out of its range."""
    if not minimum <= value <= maximum:
        raise Refused(f"{name}: found {value}; expected {minimum} to {maximum}")


def check_id(name: str, value: str | None) -> None:
    """Raise `Refused` if an id is empty or too long; None is no id."""
    if value is not None and not 1 <= len(value) <= MAX_ID:
        raise Refused(f"{name}: found {len(value)} characters; expected 1 to {MAX_ID}")
