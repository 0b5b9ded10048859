"""What the points of a metric series come to, whatever their aggregation temporality.

https://opentelemetry.io/docs/specs/otel/metrics/data-model/#temporality. Delta points add up. Of
cumulative ones the last counts, until the counting starts anew: then what was counted before stays.
Points are taken in the order in which they come, since the clocks of their senders may be wrong.
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
    """What came so far.

    Attributes:
        before: what was counted before the counting started anew the last time.
        since: what was counted since then.
        start_ns: when that was; 0 if unknown.
        time_ns: time of the last point, by the clock of its sender.
        starts: of earlier countings, the last ones.
    """

    before: Figures | None = None
    since: Figures | None = None
    start_ns: int = 0
    time_ns: int = 0
    starts: list[int] = field(default_factory=list)

    @classmethod
    def read(cls, text: str) -> Sums:
        """From what `write` gave."""
        return cls(**json.loads(text))

    def write(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @property
    def total(self) -> Figures | None:
        """What all points come to; None if nothing was recorded."""
        return _added(self.before, self.since)

    def add(self, point: SeriesPoint) -> None:
        """Take in one more point, that did not come before."""
        figures = point.figures
        if figures is None:
            # Of a sum that the sender says nothing more of, what was counted stays true.
            if point.temporality == "newest":
                self.since = None
        elif point.temporality == "delta":
            self.since = _added(self.since, figures)
        elif point.temporality == "newest" or self.since is None:
            self.since = figures
            self.start_ns = point.start_ns
        elif point.start_ns == self.start_ns:
            self._go_on(figures, is_anew=not point.start_ns and _less(figures, self.since))
        elif point.start_ns in self.starts:
            return  # of a counting that has ended: it was on its way for long
        else:
            # Some senders work their start out anew each time, and it moves a little. A counting
            # that did not start before the last point, and is not less, is the same one.
            started = point.start_ns >= self.time_ns or _less(figures, self.since)
            if started:
                self.starts = [*self.starts, self.start_ns][-_MAX_STARTS:]
            self._go_on(figures, is_anew=started)
            self.start_ns = point.start_ns
        self.time_ns = point.time_ns

    def _go_on(self, figures: Figures, *, is_anew: bool) -> None:
        if is_anew:
            self.before = _added(self.before, self.since)
            self.since = figures
        elif self.since is None or not _less(figures, self.since):
            self.since = figures


def _less(one: Figures, other: Figures) -> bool:
    return _size(one) < _size(other)


def _size(figures: Figures) -> float:
    return float(figures.get("value", figures.get("count", 0)))


def _added(one: Figures | None, other: Figures | None) -> Figures | None:
    """The sum of two; what only one of them knows of a histogram is unknown."""
    if one is None or other is None:
        return other if one is None else one
    known = one.keys() & other.keys()
    found: dict[str, Any] = {
        name: one[name] + other[name] for name in ("value", "count", "sum") if name in known
    }
    for name, choose in (("min", min), ("max", max)):
        if name in known:
            found[name] = choose(one[name], other[name])
    if "bounds" in known and one["bounds"] == other["bounds"]:
        found["bounds"] = one["bounds"]
        found["counts"] = [a + b for a, b in zip(one["counts"], other["counts"], strict=True)]
    return found
