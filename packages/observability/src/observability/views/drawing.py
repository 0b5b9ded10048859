"""Drawing of a trace: a lane per process, its spans in rows, the critical path as a line.

The page of a step and the admin service's page of a trace use it, and render it with the macros of
``waterfall.html.j2``. Horizontal positions are percent of the trace, so the drawing fits any width
and zooms when it is made wider. Vertical positions are pixels:

    ruler    |0 s        |1 s        |2 s       |
    lane 0   name        busy ‾‾‾‾‾‾‾‾   bubble      _RULER
               [ row 0: grpo.step              ]     _RULER + _NAME
               [ row 1: rollout ][ row 1: train]     _RULER + _NAME + _ROW
    lane 1   name                                    the height of lane 0 further down
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
"""Maximum number of bars; beyond it the shortest spans are omitted, and the page says so."""

BAR = 16
"""Height of a bar in pixels."""

_TICKS = 9
"""Maximum number of ticks, besides that of 0."""

_RULER = 20
_NAME = 24
_ROW = 21
_FOOT = 5
_MIN_WIDTH = 0.12
"""Minimum width of a bar in percent, so that it can be seen and clicked."""
# A bubble has a label if it is at least this wide and its end is past the lane's name; in percent.
_LABEL_WIDTH = 9.0
_LABEL_AFTER = 34.0


class SpanTime(Protocol):
    """A span to draw, with times in seconds from the start of the trace."""

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


class PathTime(Protocol):
    """A segment of the critical path."""

    @property
    def span_id(self) -> str: ...
    @property
    def start_s(self) -> float: ...
    @property
    def seconds(self) -> float: ...


class LaneTime(Protocol):
    """The busy intervals of a process, in seconds; ``busy_s`` is None if unknown."""

    @property
    def process(self) -> str: ...
    @property
    def busy(self) -> Sequence[tuple[float, float]]: ...
    @property
    def busy_s(self) -> float | None: ...


@dataclass(frozen=True)
class Lane:
    """The lane of a process."""

    label: str
    busy: str
    top: int
    height: int


@dataclass(frozen=True)
class Mark:
    """An interval in a lane, with its ``label`` at the end."""

    x: float
    width: float
    y: int
    label: str = ""


@dataclass(frozen=True)
class Bar:
    """The bar of a span.

    Attributes:
        description: text for screen readers.
        kind: its bucket, or ``groups``.
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
class Turn:
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
    """The drawing of a trace."""

    seconds: float
    height: int
    lanes: Sequence[Lane]
    ticks: Sequence[Tick]
    busy: Sequence[Mark]
    bubbles: Sequence[Mark]
    bars: Sequence[Bar]
    path: Sequence[Mark]
    turns: Sequence[Turn]
    omitted: int
    """Number of spans without a bar."""


_Place = tuple[int, int, int]
"""Pixels from the top, index of the row across all lanes, and index of the lane."""


def draw(
    seconds: float,
    spans: Sequence[SpanTime],
    lanes: Iterable[LaneTime],
    path: Iterable[PathTime],
    *,
    max_bars: int = MAX_BARS,
) -> Drawing:
    """Draw a trace.

    Args:
        seconds: duration of the trace, the full width.
        spans: every span.
        lanes: the processes, topmost first; further processes of spans come below.
        path: the critical path in time order.
        max_bars: maximum number of spans to draw; the longest are drawn.
    """
    shown = heapq.nlargest(max_bars, spans, key=lambda span: span.seconds or 0.0)
    shown.sort(key=lambda span: (span.start_s, -(span.seconds or 0.0), span.depth))
    times = {time.process: time for time in lanes}
    by_process: dict[str, list[SpanTime]] = {process: [] for process in times}
    for span in shown:
        by_process.setdefault(span.process, []).append(span)
    drawn: list[Lane] = []
    places: dict[str, _Place] = {}
    top, rows_above = _RULER, 0
    for process, own in by_process.items():
        rows = _rows(own)
        for span_id, row in rows.items():
            places[span_id] = top + _NAME + row * _ROW, rows_above + row, len(drawn)
        count = 1 + max(rows.values(), default=0)
        height = _NAME + count * _ROW + _FOOT
        time = times.get(process)
        busy_s = None if time is None else time.busy_s
        busy = "" if busy_s is None else f"{percent(busy_s, seconds)} busy"
        drawn.append(Lane(process, busy, top, height))
        top, rows_above = top + height, rows_above + count
    on_path = [part for part in path if part.span_id in places]
    return Drawing(
        seconds=seconds,
        height=top,
        lanes=drawn,
        ticks=[Tick(round(100 * at / seconds, 4), label) for at, label in ticks(seconds, _TICKS)],
        busy=list(_busy(seconds, drawn, times)),
        bubbles=list(_bubbles(seconds, drawn, times)),
        bars=[_bar(seconds, span, places[span.span_id]) for span in shown],
        path=[
            Mark(*place(seconds, part.start_s, part.seconds), places[part.span_id][0] + BAR)
            for part in on_path
        ],
        turns=list(_turns(seconds, on_path, places)),
        omitted=len(spans) - len(shown),
    )


def place(total_s: float, start_s: float, seconds: float) -> tuple[float, float]:
    """Return position and width of an interval in percent, clipped to the trace."""
    total = total_s if total_s > 0 else 1.0
    left = 100 * min(max(0.0, start_s), total) / total
    right = 100 * min(max(0.0, start_s + seconds), total) / total
    left = min(left, 100 - _MIN_WIDTH)
    return round(left, 4), round(max(right - left, _MIN_WIDTH), 4)


def kind_of(span: SpanTime) -> str:
    """Return the bucket of a span, or ``groups`` without a known one."""
    return span.bucket if span.bucket in BUCKETS else "groups"


def _rows(spans: Iterable[SpanTime]) -> dict[str, int]:
    """Return the row of each span of a lane: below its parent, and without overlaps.

    Args:
        spans: spans by start; of those that start together, the longer first.
    """
    rows: dict[str, int] = {}
    ends: list[float] = []  # end of the last span in each row
    for span in spans:
        row = rows[span.parent_id] + 1 if span.parent_id in rows else 0
        while row < len(ends) and ends[row] > span.start_s + 1e-9:
            row += 1
        ends += [span.start_s] * (row + 1 - len(ends))
        ends[row] = span.start_s + (span.seconds or 0.0)
        rows[span.span_id] = row
    return rows


def _bar(total_s: float, span: SpanTime, at: _Place) -> Bar:
    x, width = place(total_s, span.start_s, span.seconds or 0.0)
    kind = kind_of(span)
    parts = [span.name, span.process, duration(span.seconds), f"from {duration(span.start_s)}"]
    if kind != "groups":
        parts.append(kind)
    if span.critical:
        parts.append("on the critical path")
    failed = span.outcome == "error"
    if failed:
        parts.append("failed")
    y, row, lane = at
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


def _busy(total_s: float, lanes: Iterable[Lane], times: Mapping[str, LaneTime]) -> Iterator[Mark]:
    for lane in lanes:
        if lane.label in times:
            for begin, end in times[lane.label].busy:
                yield Mark(*place(total_s, begin, end - begin), lane.top + _NAME - 6)


def _bubbles(
    total_s: float, lanes: Iterable[Lane], times: Mapping[str, LaneTime]
) -> Iterator[Mark]:
    """Yield the idle intervals of each process, the long ones with a label."""
    for lane in lanes:
        if lane.label not in times or times[lane.label].busy_s is None:
            continue
        moment = 0.0
        for begin, end in [*times[lane.label].busy, (total_s, total_s)]:
            if begin > moment:
                x, width = place(total_s, moment, begin - moment)
                is_long = width >= _LABEL_WIDTH and x + width >= _LABEL_AFTER
                label = f"bubble {duration(begin - moment)}" if is_long else ""
                yield Mark(x, width, lane.top + _NAME - 6, label)
            moment = max(moment, end)


def _turns(
    total_s: float, path: Iterable[PathTime], places: Mapping[str, _Place]
) -> Iterator[Turn]:
    seen: set[Turn] = set()
    for before, after in pairwise(path):
        ends = sorted(places[part.span_id][0] + BAR + 1 for part in (before, after))
        turn = Turn(place(total_s, after.start_s, 0)[0], *ends)
        if turn.top != turn.bottom and turn not in seen:
            seen.add(turn)
            yield turn
