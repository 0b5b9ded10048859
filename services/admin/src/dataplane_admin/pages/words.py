"""Numbers and moments as the pages write them."""

from __future__ import annotations

from datetime import UTC, datetime

from observability.views.quantities import duration, percent, size

__all__ = [
    "ago",
    "clock",
    "count",
    "duration",
    "instant",
    "listed",
    "percent",
    "plural",
    "size",
    "told",
]

_LATEST_NS = 253_402_300_799 * 10**9  # the end of the year 9999, beyond which datetime has no form


def count(number: float) -> str:
    """``100,000``."""
    return f"{number:,.0f}"


def plural(number: int, name: str) -> str:
    """``1 sample``, ``2,048 samples``."""
    return f"{count(number)} {name}{'' if number == 1 else 's'}"


def instant(time_ns: int) -> datetime:
    """A moment in UTC; those that a calendar cannot hold become the nearest that it can."""
    return datetime.fromtimestamp(min(max(0, time_ns), _LATEST_NS) / 1e9, UTC)


def clock(time_ns: int | None, now_ns: int) -> str:
    """``23:41:07.214`` of today, ``19 Nov 23:41:07`` of another day; UTC. ``n/a`` of None."""
    if time_ns is None:
        return "n/a"
    moment, now = instant(time_ns), instant(now_ns)
    if moment.date() == now.date():
        return f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03}"
    year = "" if moment.year == now.year else f" {moment.year}"
    return f"{moment.day} {moment:%b}{year} {moment:%H:%M:%S}"


def ago(seconds: float) -> str:
    """An age in its two largest units: ``12 s``, ``3 min 5 s``, ``2 h 10 min``, ``4 d 3 h``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    for large, small, one, part in (
        ("min", "s", 60, 1),
        ("h", "min", 3600, 60),
        ("d", "h", 86_400, 3600),
    ):
        if whole < 60 * one or large == "d" or (large == "h" and whole < 86_400):
            rest = whole % one // part
            return f"{whole // one} {large}" + (f" {rest} {small}" if rest else "")
    raise AssertionError(seconds)


def listed(names: list[str], most: int = 3) -> str:
    """``a, b, c and 4 more``."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {count(rest)} more" if rest > 0 else "")


def told(value: object) -> str:
    """The value of an attribute or tag: lists without their brackets, the rest as it is."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
