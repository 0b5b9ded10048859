"""The drawing of a trace: a lane per process, its spans in rows, the critical path as a line.

The page of a step and the admin service's page of a trace show it. Both render it with the macros
of ``waterfall.html.j2``. Horizontal positions are percent of the trace, so the drawing scales to
any width. Zooming in makes it wider. Vertical positions are pixels from the top:

                                                      position
    ruler    |0 s        |1 s        |2 s       |     0
    lane 0   name        busy ‾‾‾‾‾‾‾‾   bubble       _RULER_HEIGHT
               [ row 0: grpo.step              ]      _RULER_HEIGHT + _NAME_HEIGHT
               [ row 1: rollout ][ row 1: train]      _RULER_HEIGHT + _NAME_HEIGHT + _ROW_HEIGHT
    lane 1   name                                     _RULER_HEIGHT + height of lane 0
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from observability.views.processes import BUCKETS
from observability.views.quantities import duration, percent, ticks

MAX_BARS = 1_500
"""Maximum number of bars. If there are more spans, the shortest are omitted, with a note."""

# Heights in pixels. Below the rows of a lane, _LANE_MARGIN pixels are empty.
BAR_HEIGHT = 16
_RULER_HEIGHT = 20
_NAME_HEIGHT = 24
_ROW_HEIGHT = 21
_LANE_MARGIN = 5
_BUSY_OFFSET = _NAME_HEIGHT - 6
"""Distance of the line of busy and idle intervals from the top of its lane."""

_MAX_TICKS = 9
"""Maximum number of ticks, besides the tick at 0."""
_MIN_WIDTH = 0.12
"""Minimum width of a bar in percent, so that it can be seen and clicked."""
_MIN_LABELED_WIDTH = 11.0
"""Minimum width in percent of a bubble with a label, so that the label fits."""
_MIN_LABELED_END = 34.0
"""Minimum end in percent of a bubble with a label: the label must be right of the lane's name."""


class DrawnSpan(Protocol):
    """A span to draw, with times in seconds from the start of the trace.

    `depth` is the number of spans from the root to this span.
    """

    @property
    def span_id(self) -> str: ...
    @property
    def parent_id(self) -> str | None: ...
    @property
    def name(self) -> str: ...
    @property
    def process(self) -> str: ...
    @property
    def depth(self) -> int: ...
    @property
    def start_s(self) -> float: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def bucket(self) -> str | None: ...
    @property
    def outcome(self) -> str: ...
    @property
    def critical(self) -> bool: ...


class DrawnSegment(Protocol):
    """A segment of the critical path, with times in seconds from the start of the trace."""

    @property
    def span_id(self) -> str: ...
    @property
    def start_s(self) -> float: ...
    @property
    def seconds(self) -> float: ...


class DrawnProcess(Protocol):
    """The busy intervals of a process, in seconds from the start of the trace.

    `busy_s` is their total; None if it is unknown when the process was busy. `busy_elsewhere` are
    further intervals in which it was busy in other traces.
    """

    @property
    def process(self) -> str: ...
    @property
    def busy(self) -> Sequence[tuple[float, float]]: ...
    @property
    def busy_s(self) -> float | None: ...
    @property
    def busy_elsewhere(self) -> Sequence[tuple[float, float]]: ...


@dataclass(frozen=True)
class Lane:
    """The lane of a process; ``busy`` has the shares of its busy time as text."""

    label: str
    busy: str
    top: int
    height: int


@dataclass(frozen=True)
class Mark:
    """An interval in a lane; its ``label`` is drawn at its end."""

    x: float
    width: float
    y: int
    label: str = ""


@dataclass(frozen=True)
class Bar:
    """The bar of a span.

    Attributes:
        description: text for screen readers.
        kind: bucket of the span, or ``groups``; see `kind_of`.
        x: start in percent of the trace.
        width: width in percent of the trace.
        y: top in pixels.
        row: index of the row, counted from the top across all lanes.
        lane: index of the lane.
    """

    span_id: str
    name: str
    description: str
    kind: str
    failed: bool
    critical: bool
    x: float
    width: float
    y: int
    row: int
    lane: int


@dataclass(frozen=True)
class RowChange:
    """A vertical line where the critical path continues in another row."""

    x: float
    top: int
    bottom: int


@dataclass(frozen=True)
class Tick:
    """A moment on the ruler."""

    x: float
    label: str


@dataclass(frozen=True)
class Drawing:
    """The drawing of a trace.

    Attributes:
        seconds: duration of the trace.
        height: height in pixels.
        lanes: lanes from top to bottom.
        ticks: ticks of the ruler.
        busy: busy intervals of the processes.
        elsewhere: intervals in which the processes were busy in other traces.
        bubbles: idle intervals of the processes.
        bars: bars of the spans.
        path: segments of the critical path, each below the bar of its span.
        row_changes: vertical lines between segments of the path in different rows.
        omitted: number of spans without a bar.
    """

    seconds: float
    height: int
    lanes: Sequence[Lane]
    ticks: Sequence[Tick]
    busy: Sequence[Mark]
    elsewhere: Sequence[Mark]
    bubbles: Sequence[Mark]
    bars: Sequence[Bar]
    path: Sequence[Mark]
    row_changes: Sequence[RowChange]
    omitted: int


_BarPosition = tuple[int, int, int]
"""Top of the bar in pixels, index of the row across all lanes, and index of the lane."""


def draw(
    seconds: float,
    spans: Sequence[DrawnSpan],
    processes: Iterable[DrawnProcess],
    path: Iterable[DrawnSegment],
    *,
    max_bars: int = MAX_BARS,
) -> Drawing:
    """Draw a trace.

    Args:
        seconds: duration of the trace, which takes the full width.
        spans: all spans of the trace.
        processes: processes in the order of their lanes. Lanes of other processes follow.
        path: the critical path in time order.
        max_bars: maximum number of spans to draw; the longest are drawn.
    """
    shown = heapq.nlargest(max_bars, spans, key=lambda span: span.seconds or 0.0)
    shown.sort(key=lambda span: (span.start_s, -(span.seconds or 0.0), span.depth))
    by_label = {process.process: process for process in processes}
    spans_by_label: dict[str, list[DrawnSpan]] = {label: [] for label in by_label}
    for span in shown:
        spans_by_label.setdefault(span.process, []).append(span)
    lanes: list[Lane] = []
    positions: dict[str, _BarPosition] = {}
    top, rows_above = _RULER_HEIGHT, 0
    for label, lane_spans in spans_by_label.items():
        rows = _rows(lane_spans)
        for span_id, row in rows.items():
            y = top + _NAME_HEIGHT + row * _ROW_HEIGHT
            positions[span_id] = y, rows_above + row, len(lanes)
        row_count = 1 + max(rows.values(), default=0)
        height = _NAME_HEIGHT + row_count * _ROW_HEIGHT + _LANE_MARGIN
        process = by_label.get(label)
        lanes.append(Lane(label, _shares(seconds, process), top, height))
        top, rows_above = top + height, rows_above + row_count
    drawn_path = [segment for segment in path if segment.span_id in positions]
    return Drawing(
        seconds=seconds,
        height=top,
        lanes=lanes,
        ticks=[
            Tick(round(100 * at / seconds, 4), label) for at, label in ticks(seconds, _MAX_TICKS)
        ],
        busy=list(_marks(seconds, lanes, {label: each.busy for label, each in by_label.items()})),
        elsewhere=list(
            _marks(seconds, lanes, {label: each.busy_elsewhere for label, each in by_label.items()})
        ),
        bubbles=list(_bubbles(seconds, lanes, by_label)),
        bars=[_bar(seconds, span, positions[span.span_id]) for span in shown],
        path=[
            Mark(
                *x_and_width(seconds, segment.start_s, segment.seconds),
                positions[segment.span_id][0] + BAR_HEIGHT,
            )
            for segment in drawn_path
        ],
        row_changes=list(_row_changes(seconds, drawn_path, positions)),
        omitted=len(spans) - len(shown),
    )


def x_and_width(total_s: float, start_s: float, seconds: float) -> tuple[float, float]:
    """Return position and width of an interval in percent, clipped to the trace.

    The width is at least `_MIN_WIDTH`. An interval at the right edge is shifted left so that the
    minimum width fits.
    """
    total = total_s if total_s > 0 else 1.0
    left = 100 * min(max(0.0, start_s), total) / total
    right = 100 * min(max(0.0, start_s + seconds), total) / total
    left = min(left, 100 - _MIN_WIDTH)
    return round(left, 4), round(max(right - left, _MIN_WIDTH), 4)


def kind_of(span: DrawnSpan) -> str:
    """Return the bucket of a span; ``groups`` if it has none of `BUCKETS`."""
    return span.bucket if span.bucket in BUCKETS else "groups"


def _rows(spans: Iterable[DrawnSpan]) -> dict[str, int]:
    """Return the row of each span of a lane.

    Of the rows below its parent's row, a span gets the first in which it overlaps no other.

    Args:
        spans: spans by start; of those that start together, the longer first.
    """
    rows: dict[str, int] = {}
    ends: list[float] = []  # end of the last span in each row
    for span in spans:
        row = rows[span.parent_id] + 1 if span.parent_id in rows else 0
        while row < len(ends) and ends[row] > span.start_s + 1e-9:  # tolerates rounding
            row += 1
        ends += [span.start_s] * (row + 1 - len(ends))
        ends[row] = span.start_s + (span.seconds or 0.0)
        rows[span.span_id] = row
    return rows


def _bar(total_s: float, span: DrawnSpan, position: _BarPosition) -> Bar:
    x, width = x_and_width(total_s, span.start_s, span.seconds or 0.0)
    kind = kind_of(span)
    parts = [span.name, span.process, duration(span.seconds), f"from {duration(span.start_s)}"]
    if kind != "groups":
        parts.append(kind)
    if span.critical:
        parts.append("on the critical path")
    failed = span.outcome == "error"
    if failed:
        parts.append("failed")
    y, row, lane = position
    return Bar(
        span_id=span.span_id,
        name=span.name,
        description=", ".join(parts),
        kind=kind,
        failed=failed,
        critical=span.critical,
        x=x,
        width=width,
        y=y,
        row=row,
        lane=lane,
    )


def _shares(total_s: float, process: DrawnProcess | None) -> str:
    if process is None or process.busy_s is None:
        return ""
    elsewhere_s = sum(end - begin for begin, end in process.busy_elsewhere)
    suffix = f", {percent(elsewhere_s, total_s)} in other traces" if elsewhere_s else ""
    return f"{percent(process.busy_s, total_s)} busy{suffix}"


def _marks(
    total_s: float, lanes: Iterable[Lane], intervals: Mapping[str, Sequence[tuple[float, float]]]
) -> Iterator[Mark]:
    for lane in lanes:
        for begin, end in intervals.get(lane.label, ()):
            yield Mark(*x_and_width(total_s, begin, end - begin), lane.top + _BUSY_OFFSET)


def _bubbles(
    total_s: float, lanes: Iterable[Lane], processes: Mapping[str, DrawnProcess]
) -> Iterator[Mark]:
    """Yield the idle intervals of each process, the long ones with a label."""
    for lane in lanes:
        process = processes.get(lane.label)
        if process is None or process.busy_s is None:
            continue
        idle_since = 0.0
        busy = sorted([*process.busy, *process.busy_elsewhere, (total_s, total_s)])
        for begin, end in busy:
            if begin > idle_since:
                x, width = x_and_width(total_s, idle_since, begin - idle_since)
                has_label = width >= _MIN_LABELED_WIDTH and x + width >= _MIN_LABELED_END
                label = f"bubble {duration(begin - idle_since)}" if has_label else ""
                yield Mark(x, width, lane.top + _BUSY_OFFSET, label)
            idle_since = max(idle_since, end)


def _row_changes(
    total_s: float, path: Iterable[DrawnSegment], positions: Mapping[str, _BarPosition]
) -> Iterator[RowChange]:
    seen: set[RowChange] = set()
    for before, after in pairwise(path):
        # The line of the path is directly below a bar; 1 pixel further down is within the line.
        ends = sorted(positions[segment.span_id][0] + BAR_HEIGHT + 1 for segment in (before, after))
        change = RowChange(x_and_width(total_s, after.start_s, 0)[0], *ends)
        if change.top != change.bottom and change not in seen:
            seen.add(change)
            yield change
