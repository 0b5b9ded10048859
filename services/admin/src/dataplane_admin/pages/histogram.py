"""Staleness as bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataplane_admin.answers import models
from dataplane_admin.pages import words

_MOST = 24


@dataclass(frozen=True)
class Column:
    """A bar.

    Attributes:
        x: percent; the middle.
        left: percent.
        width: percent.
        height: pixels.
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
    """Bars from the freshest to the stalest; from `_MOST` on, versions share the last."""

    columns: Sequence[Column]
    mean_x: float | None
    total: int
    most: int
    height: int = 180


def histogram(found: models.Staleness) -> Histogram | None:
    """The histogram of staleness; None if nothing is known."""
    if not found.counts:
        return None
    first = min(found.counts)
    last = max(found.counts)
    cut = min(last, first + _MOST - 1)
    counts = {version: found.counts.get(version, 0) for version in range(first, cut)}
    counts[cut] = sum(count for version, count in found.counts.items() if version >= cut)
    total = sum(counts.values())
    tallest = max(counts.values())
    # A few columns do not fill the width: bars as wide as doors say nothing more.
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
    if found.mean is not None:
        mean_x = round(min(100.0, max(0.0, (found.mean - first + 0.5) * pitch)), 3)
    return Histogram(columns, mean_x, total, last)
