"""Formatting of durations, sizes and shares."""

from __future__ import annotations

import math

_LARGE = (("d", 86_400, "h", 3_600), ("h", 3_600, "min", 60), ("min", 60, "s", 1))
"""Pairs of units of a long duration, with their seconds."""

_ROUND = (60, 120, 300, 600, 1_200, 1_800, 3_600, 7_200, 14_400, 21_600, 43_200, 86_400)
"""Distances of ticks from a minute to a day, in seconds."""


def duration(seconds: float | None) -> str:
    """Format a duration, for example ``12.3 s``, ``85.0 µs``, ``2 min 5 s`` or ``1 h 5 min``; None
    as ``n/a``."""
    if seconds is None:
        return "n/a"
    magnitude = abs(seconds)
    if magnitude >= 120:
        total = round(magnitude)
        large, large_s, small, small_s = next(each for each in _LARGE if total >= each[1])
        sign = "-" if seconds < 0 else ""
        return f"{sign}{total // large_s} {large} {total % large_s // small_s} {small}"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        # 999.5 ms and more would round to 1000 ms, so they are shown in seconds.
        if magnitude >= 0.9995 * scale:
            return f"{_three_digits(seconds / scale)} {unit}"
    return "0 s" if not seconds else f"{seconds * 1e9:.0f} ns"


def ticks(seconds: float, maximum: int) -> list[tuple[float, str]]:
    """Return 0 and up to ``maximum`` further round times up to ``seconds``, each with a label.

    The units of the labels depend on ``seconds``. ``zoom.js`` of the admin service does the same.
    """
    if not 0 < seconds < math.inf:
        return []
    distance = _distance(seconds / maximum)
    count = int(seconds / distance * (1 + 1e-9))
    return [(at * distance, _tick(at * distance, distance, seconds)) for at in range(count + 1)]


def _distance(minimum_s: float) -> float:
    """Return the smallest round distance of at least ``minimum_s`` seconds."""
    if 20 < minimum_s <= 30:
        return 30.0
    if 30 < minimum_s <= _ROUND[-1]:
        return float(next(distance for distance in _ROUND if distance >= minimum_s))
    scale = 86_400.0 if minimum_s > _ROUND[-1] else 1.0
    power = scale * 10.0 ** math.floor(math.log10(minimum_s / scale))
    # The factor 20 is needed only if rounding made the logarithm one too small.
    return power * next(factor for factor in (1, 2, 5, 10, 20) if minimum_s <= power * factor)


def _tick(time_s: float, distance_s: float, total_s: float) -> str:
    if total_s < 1:
        unit, scale = ("ms", 1e-3) if total_s >= 1e-3 else ("µs", 1e-6)
        return f"{time_s / scale:.{_digits(distance_s / scale)}f} {unit}"
    parts = []
    time_s = round(time_s, 9)
    for unit, scale in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if time_s >= scale:
            parts.append(f"{int(time_s // scale)} {unit}")
            time_s %= scale
    rest = f"{time_s:.{_digits(distance_s)}f}"
    if float(rest) or not parts:
        parts.append(f"{rest if float(rest) else 0} s")
    return " ".join(parts)


def _digits(distance: float) -> int:
    return max(0, -math.floor(math.log10(distance) + 1e-9))


def size(n_bytes: float) -> str:
    """Format a number of bytes in decimal units, for example ``12.3 kB`` or ``4.50 GB``."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= 0.9995 * scale:
            return f"{_three_digits(n_bytes / scale)} {unit}"
    return f"{n_bytes:.0f} B"


def percent(part: float, total: float) -> str:
    """Format a part of a total, for example ``12.3 %``; as a dash if the total is 0."""
    return f"{100 * part / total:.1f} %" if total else "-"


def _three_digits(value: float) -> str:
    # 9.995 and 99.95 are the smallest values that round to one more digit before the point.
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
