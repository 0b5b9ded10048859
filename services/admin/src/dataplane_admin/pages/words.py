"""Formats of numbers, times and texts on the pages."""

from __future__ import annotations

from datetime import UTC, datetime

from observability.views.quantities import duration, percent, size

__all__ = [
    "ago",
    "capital",
    "clock",
    "count",
    "duration",
    "instant",
    "listed",
    "percent",
    "plain",
    "plural",
    "size",
]

_LATEST_NS = 253_402_300_799 * 10**9  # end of the year 9999, datetime's maximum


def count(number: float) -> str:
    """Return ``100,000``."""
    return f"{number:,.0f}"


def plural(number: int, name: str) -> str:
    """Return ``1 sample`` or ``2,048 samples``."""
    return f"{count(number)} {name}{'' if number == 1 else 's'}"


def instant(time_ns: int) -> datetime:
    """Return a time in UTC, clamped to the range of datetime."""
    return datetime.fromtimestamp(min(max(0, time_ns), _LATEST_NS) / 1e9, UTC)


def clock(time_ns: int | None, now_ns: int) -> str:
    """Return ``23:41:07.214`` for today, ``19 Nov 23:41:07`` for another day, in UTC.

    None is ``n/a``.
    """
    if time_ns is None:
        return "n/a"
    moment, now = instant(time_ns), instant(now_ns)
    if moment.date() == now.date():
        return f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03}"
    year = "" if moment.year == now.year else f" {moment.year}"
    return f"{moment.day} {moment:%b}{year} {moment:%H:%M:%S}"


def ago(seconds: float) -> str:
    """Return an age in two units: ``12 s``, ``3 min 5 s``, ``2 h 10 min``, ``4 d 3 h``."""
    total_s = max(0, round(seconds))
    if total_s < 60:
        return f"{total_s} s"
    for large, small, unit_s, part in (
        ("min", "s", 60, 1),
        ("h", "min", 3600, 60),
        ("d", "h", 86_400, 3600),
    ):
        if total_s < 60 * unit_s or large == "d" or (large == "h" and total_s < 86_400):
            rest = total_s % unit_s // part
            return f"{total_s // unit_s} {large}" + (f" {rest} {small}" if rest else "")
    raise AssertionError(seconds)


def listed(names: list[str], maximum: int = 3) -> str:
    """Return ``a, b, c and 4 more``."""
    rest = len(names) - maximum
    return ", ".join(names[:maximum]) + (f" and {count(rest)} more" if rest > 0 else "")


def capital(text: str) -> str:
    """Return a message with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def plain(value: object) -> str:
    """Return the value of an attribute or tag as text, a list without its brackets."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
