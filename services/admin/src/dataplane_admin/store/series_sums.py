"""Aggregate of a metric series' points of any temporality.

https://opentelemetry.io/docs/specs/otel/metrics/data-model/#temporality. Delta points add up. Of
cumulative points the last counts; when the counter restarts, its previous value is retained and
added. Points apply in order of arrival, since senders' clocks may be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any  # Any: JSON values

from dataplane_admin.store.batch import SeriesPoint

Figures = Mapping[str, Any]
"""``value`` of a number; of a histogram ``count`` and, where known, ``sum``, ``min``, ``max``, and
``bounds`` with ``counts``."""

_MAX_STARTS = 16


@dataclass
class Sums:
    """Aggregate of the points so far.

    Attributes:
        before: total before the last restart of the counter.
        since: total since then.
        start_ns: time of that restart; 0 if unknown.
        time_ns: time of the last point, by its sender's clock.
        starts: the last `_MAX_STARTS` starts of the counter before ``start_ns``.
    """

    before: Figures | None = None
    since: Figures | None = None
    start_ns: int = 0
    time_ns: int = 0
    starts: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, text: str) -> Sums:
        """Parse what `write` returned."""
        return cls(**json.loads(text))

    def write(self) -> str:
        """Return the aggregate as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @property
    def total(self) -> Figures | None:
        """Total of all points; None if nothing was recorded."""
        return _added(self.before, self.since)

    def add(self, point: SeriesPoint) -> None:
        """Add a new point."""
        figures = point.figures
        if figures is None:
            # A sum keeps its total when the sender records nothing more.
            if point.temporality == "newest":
                self.since = None
        elif point.temporality == "delta":
            self.since = _added(self.since, figures)
        elif point.temporality == "newest" or self.since is None:
            self.since = figures
            self.start_ns = point.start_ns
        elif point.start_ns == self.start_ns:
            self._continue(figures, restarted=not point.start_ns and _less(figures, self.since))
        elif point.start_ns in self.starts:
            return  # a late point from before the restart
        else:
            # Some senders compute the start anew each time, so it moves a little. It is no restart
            # if the start is before the last point and the value did not decrease.
            started = point.start_ns >= self.time_ns or _less(figures, self.since)
            if started:
                self.starts = [*self.starts, self.start_ns][-_MAX_STARTS:]
            self._continue(figures, restarted=started)
            self.start_ns = point.start_ns
        self.time_ns = point.time_ns

    def _continue(self, figures: Figures, *, restarted: bool) -> None:
        if restarted:
            self.before = _added(self.before, self.since)
            self.since = figures
        elif self.since is None or not _less(figures, self.since):
            self.since = figures


def _less(left: Figures, right: Figures) -> bool:
    return _size(left) < _size(right)


def _size(figures: Figures) -> float:
    return float(figures.get("value", figures.get("count", 0)))


def _added(left: Figures | None, right: Figures | None) -> Figures | None:
    """Return the sum of two aggregates without the figures that only one of them has."""
    if left is None or right is None:
        return right if left is None else left
    known = left.keys() & right.keys()
    total: dict[str, Any] = {
        name: left[name] + right[name] for name in ("value", "count", "sum") if name in known
    }
    for name, choose in (("min", min), ("max", max)):
        if name in known:
            total[name] = choose(left[name], right[name])
    if "bounds" in known and left["bounds"] == right["bounds"]:
        total["bounds"] = left["bounds"]
        total["counts"] = [a + b for a, b in zip(left["counts"], right["counts"], strict=True)]
    return total
