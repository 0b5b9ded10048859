"""Formats of numbers, times and texts on the pages."""

from __future__ import annotations

from contextvars import ContextVar
from datetime import UTC, datetime, tzinfo
from zoneinfo import ZoneInfo

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
    "percentage",
    "plain",
    "plural",
    "problems",
    "shorten",
    "shown_zone",
    "size",
    "yes",
    "zone_named",
]

_LATEST_NS = 253_402_214_400 * 10**9  # a day before datetime's maximum, for any zone
_MAX_ZONE = 64

shown_zone: ContextVar[tzinfo] = ContextVar("shown_zone", default=UTC)
"""Time zone of the page that is being rendered."""


def count(number: float) -> str:
    """Return a rounded number with thousands separators, such as ``100,000``."""
    return f"{number:,.0f}"


def plural(number: int, name: str) -> str:
    """Return ``1 sample`` or ``2,048 samples``."""
    return f"{count(number)} {name}{'' if number == 1 else 's'}"


def zone_named(name: str) -> tzinfo:
    """Return an IANA time zone; UTC if there is none of this name."""
    try:
        return ZoneInfo(name) if 0 < len(name) <= _MAX_ZONE else UTC
    except (OSError, ValueError, LookupError):  # unknown, a folder, or outside of the zones
        return UTC


def instant(time_ns: int) -> datetime:
    """Return a time in the zone of `shown_zone`, clamped to the range of datetime."""
    clamped_s = min(max(0, time_ns), _LATEST_NS) / 1e9
    return datetime.fromtimestamp(clamped_s, UTC).astimezone(shown_zone.get())


def clock(time_ns: int | None, now_ns: int) -> str:
    """Return ``23:41:07.214`` for today, ``19 Nov 23:41:07`` for another day.

    The zone is that of `shown_zone`. None is ``n/a``.
    """
    if time_ns is None:
        return "n/a"
    moment, now = instant(time_ns), instant(now_ns)
    if moment.date() == now.date():
        return f"{moment:%H:%M:%S}.{moment.microsecond // 1000:03}"
    year = "" if moment.year == now.year else f" {moment.year}"
    return f"{moment.day} {moment:%b}{year} {moment:%H:%M:%S}"


def ago(seconds: float) -> str:
    """Return an age in one or two units: ``12 s``, ``3 min 5 s``, ``2 h 10 min``, ``4 d 3 h``."""
    total_s = max(0, round(seconds))
    if total_s < 60:
        return f"{total_s} s"
    if total_s < 3600:
        large, small, large_s, small_s = "min", "s", 60, 1
    elif total_s < 86_400:
        large, small, large_s, small_s = "h", "min", 3600, 60
    else:
        large, small, large_s, small_s = "d", "h", 86_400, 3600
    rest = total_s % large_s // small_s
    return f"{total_s // large_s} {large}" + (f" {rest} {small}" if rest else "")


def listed(names: list[str], maximum: int = 3) -> str:
    """Return ``a, b, c and 4 more``."""
    rest = len(names) - maximum
    return ", ".join(names[:maximum]) + (f" and {count(rest)} more" if rest > 0 else "")


def shorten(text: str, maximum: int = 32) -> str:
    """Return a text without its middle if it is long: ids of runs differ at their ends."""
    head = maximum // 3
    tail = maximum - head - 1
    return text if len(text) <= maximum else f"{text[:head]}…{text[-tail:]}"


def percentage(percents: float | None) -> str:
    """Return ``12.3 %``; a dash for None."""
    return "-" if percents is None else f"{percents:.1f} %"


def problems(number: int) -> str:
    """Return a number of failures; nothing for 0."""
    return count(number) if number else ""


def yes(value: bool | None) -> str:
    """Return ``yes`` if a value is true, else nothing."""
    return "yes" if value else ""


def capital(text: str) -> str:
    """Return a message with its first letter in upper case, unless it starts with a name."""
    first = text.partition(" ")[0]
    return text if "." in first or "_" in first else text[:1].upper() + text[1:]


def plain(value: object) -> str:
    """Return the value of an attribute or tag as text, a list without its brackets."""
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)
