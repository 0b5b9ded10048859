"""Geometry of stacked bars and trends. Horizontal places are percent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dataplane_admin.models import PartitionTask
from dataplane_admin.pages.words import count, duration

BUCKETS = ("productive", "overhead", "wasted", "idle")
"""Buckets in the order in which they are stacked."""

STATES = ("acknowledged", "leased", "assigned", "unclaimed")
"""States of samples in the order in which they are stacked."""


@dataclass(frozen=True)
class Stretch:
    """A piece of a stacked bar.

    Attributes:
        kind: bucket or state; the end of its CSS class.
        x: left edge, in percent.
    """

    kind: str
    x: float
    width: float


@dataclass(frozen=True)
class Stack:
    """A stacked bar and its description."""

    stretches: Sequence[Stretch]
    words: str


def stack(parts: Iterable[tuple[str, float]], total: float, words: str) -> Stack:
    """Return a bar of which ``total`` is the full width; negative parts count as 0."""
    stretches = []
    x = 0.0
    for kind, value in parts:
        width = 100 * max(0.0, value) / total if total > 0 else 0.0
        width = min(width, 100 - x)
        if width > 0:
            stretches.append(Stretch(kind, round(x, 3), round(width, 3)))
        x += width
    return Stack(stretches, words)


def of_buckets(seconds: Mapping[str, float], total: float | None = None) -> Stack:
    """Return the bar of bucket times; by default they fill the width."""
    stacked_s = sum(seconds.get(bucket, 0.0) for bucket in BUCKETS)
    words = ", ".join(
        f"{bucket} {duration(seconds[bucket])}" for bucket in BUCKETS if seconds.get(bucket)
    )
    parts = [(bucket, seconds.get(bucket, 0.0)) for bucket in BUCKETS]
    return stack(parts, stacked_s if total is None else total, words or "no data")


def of_task(task: PartitionTask, total: int) -> Stack:
    """Return the bar of a task's progress over ``total`` samples."""
    parts = [(state, getattr(task, state)) for state in STATES]
    texts = (f"{count(held)} {state}" for state, held in parts if held or state != "assigned")
    return stack(parts, max(total, 1), f"{task.name}: {', '.join(texts)}")


@dataclass(frozen=True)
class Trend:
    """A line over time in a box of 100 by 24.

    Attributes:
        line: points of a polyline.
        area: points of a polygon, down to the base.
        last: newest value.
    """

    line: str
    area: str
    maximum: float
    last: float


def trend(values: Sequence[float], *, base: float = 0.0) -> Trend | None:
    """Return a trend from ``base`` up, None for fewer than two values."""
    if len(values) < 2:
        return None
    height = max(max(values) - base, 1e-12)
    points = [
        f"{100 * place / (len(values) - 1):.2f},{23 - 21 * max(0.0, value - base) / height:.2f}"
        for place, value in enumerate(values)
    ]
    line = " ".join(points)
    return Trend(line, f"0,24 {line} 100,24", max(values), values[-1])
