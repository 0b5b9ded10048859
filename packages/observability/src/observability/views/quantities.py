"""Formatting of durations, sizes and shares."""

from __future__ import annotations


def duration(seconds: float | None) -> str:
    """Format a duration: ``12.3 s``, ``850 ms``, ``85.0 µs``, ``2 min 5 s``; ``n/a`` for None."""
    if seconds is None:
        return "n/a"
    size = abs(seconds)
    if size >= 120:
        minutes, rest = divmod(round(size), 60)
        return f"{'-' if seconds < 0 else ''}{minutes} min {rest} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        # A value that would round up to 1000 of a unit is shown in the next larger one.
        if size >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return "0 s" if not seconds else f"{seconds * 1e9:.0f} ns"


def size(n_bytes: float) -> str:
    """Format a size in decimal units: ``0 B``, ``12.3 kB``, ``4.50 GB``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= 0.9995 * scale:
            return f"{_three_digits(n_bytes / scale)} {unit}"
    return f"{n_bytes:.0f} B"


def percent(part: float, total: float) -> str:
    """Format a share: ``12.3 %``; a dash if the total is 0."""
    return f"{100 * part / total:.1f} %" if total else "-"


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
