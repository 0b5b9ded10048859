"""Histogram of staleness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataplane_admin import models
from dataplane_admin.pages import words

_MAX_COLUMNS = 24


@dataclass(frozen=True)
class Column:
    """A bar of the histogram.

    Attributes:
        x: middle, in percent.
        left: left edge, in percent.
    """

    label: str
    count: int
    share: str
    x: float
    left: float
    width: float
    height: float


@dataclass(frozen=True)
class Histogram:
    """Bars from fresh to stale; beyond `_MAX_COLUMNS` bars, the last one counts the rest."""

    columns: Sequence[Column]
    mean_x: float | None
    total: int
    maximum: int
    height: int = 180


def histogram(staleness: models.Staleness) -> Histogram | None:
    """Return the histogram of staleness, None if no version is known."""
    if not staleness.counts:
        return None
    first = min(staleness.counts)
    last = max(staleness.counts)
    cut = min(last, first + _MAX_COLUMNS - 1)
    counts = {version: staleness.counts.get(version, 0) for version in range(first, cut)}
    counts[cut] = sum(count for version, count in staleness.counts.items() if version >= cut)
    total = sum(counts.values())
    tallest = max(counts.values())
    # Limit the bar width if there are only a few columns.
    pitch = min(100 / len(counts), 12.0)
    columns = [
        Column(
            label=f"{version}+" if version == cut < last else str(version),
            count=count,
            share=words.percent(count, total),
            x=round((place + 0.5) * pitch, 3),
            left=round((place + 0.12) * pitch, 3),
            width=round(0.76 * pitch, 3),
            height=round(150 * count / tallest, 2) if tallest else 0.0,
        )
        for place, (version, count) in enumerate(counts.items())
    ]
    mean_x = None
    if staleness.mean is not None:
        mean_x = round(min(100.0, max(0.0, (staleness.mean - first + 0.5) * pitch)), 3)
    return Histogram(columns, mean_x, total, last)
