"""Places of the small drawings: stacked bars and trends. Places along are percent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dataplane_admin.answers.models import PartitionTask
from dataplane_admin.pages.words import count, duration

BUCKETS = ("productive", "overhead", "wasted", "idle")
"""Buckets in the order in which they are stacked."""

STATES = ("settled", "leased", "assigned", "unclaimed")
"""States of samples in the order in which they are stacked."""


@dataclass(frozen=True)
class Stretch:
    """A piece of a stacked bar.

    Attributes:
        kind: what it stands for, the end of its class.
        x: percent.
        width: percent.
    """

    kind: str
    x: float
    width: float


@dataclass(frozen=True)
class Stack:
    """A stacked bar, and what it says in words."""

    stretches: Sequence[Stretch]
    words: str


def stack(parts: Iterable[tuple[str, float]], whole: float, words: str) -> Stack:
    """A bar of which ``whole`` is the full width; negative parts count as nothing."""
    found = []
    x = 0.0
    for kind, value in parts:
        width = 100 * max(0.0, value) / whole if whole > 0 else 0.0
        width = min(width, 100 - x)
        if width > 0:
            found.append(Stretch(kind, round(x, 3), round(width, 3)))
        x += width
    return Stack(found, words)


def of_buckets(seconds: Mapping[str, float], whole: float | None = None) -> Stack:
    """Bucket times; by default they fill the width."""
    total = sum(seconds.get(bucket, 0.0) for bucket in BUCKETS)
    words = ", ".join(
        f"{bucket} {duration(seconds[bucket])}" for bucket in BUCKETS if seconds.get(bucket)
    )
    parts = [(bucket, seconds.get(bucket, 0.0)) for bucket in BUCKETS]
    return stack(parts, total if whole is None else whole, words or "nothing told")


def of_task(task: PartitionTask, whole: int) -> Stack:
    """Progress of a task over ``whole`` samples."""
    parts = [(state, getattr(task, state)) for state in STATES]
    told = (f"{count(held)} {state}" for state, held in parts if held or state != "assigned")
    return stack(parts, max(whole, 1), f"{task.name}: {', '.join(told)}")


@dataclass(frozen=True)
class Trend:
    """A line over time in a box of 100 by 24.

    Attributes:
        line: the points of a polyline.
        area: as a polygon, down to zero.
        most: the largest value.
        last: the newest value.
    """

    line: str
    area: str
    most: float
    last: float


def trend(values: Sequence[float]) -> Trend | None:
    """A trend, from zero up; None of fewer than two values."""
    if len(values) < 2:
        return None
    most = max(*values, 1e-12)
    points = [
        f"{100 * place / (len(values) - 1):.2f},{23 - 21 * max(0.0, value) / most:.2f}"
        for place, value in enumerate(values)
    ]
    line = " ".join(points)
    return Trend(line, f"0,24 {line} 100,24", max(values), values[-1])
