"""A trace drawn: a lane per process, its spans in rows, the critical path as a line through them.

Places along the time are percent of the trace, so that the drawing fits any width and zooms by
being made wider; places down are pixels.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dataplane_admin.answers import models
from dataplane_admin.pages import words
from dataplane_admin.pages.links import to
from dataplane_admin.pages.marks import BUCKETS

MOST_BARS = 1_500
"""Of more spans the shortest are left out of the drawing, and the page says so."""

BAR = 16
"""Height of a bar in pixels."""

_RULER = 20
_NAME = 24
_ROW = 21
_FOOT = 5
# Percent; what is shorter is drawn so wide, to be seen and hit.
_NARROWEST = 0.12
# A bubble says how long it is if it has this many percent of the width, right of the lane's name.
_TOLD_WIDTH = 9.0
_TOLD_AFTER = 34.0


@dataclass(frozen=True)
class Lane:
    """The place of a process."""

    label: str
    busy: str
    top: int
    height: int


@dataclass(frozen=True)
class Mark:
    """A stretch of time in a lane; ``words`` are written at its end."""

    x: float
    width: float
    y: int
    words: str = ""


@dataclass(frozen=True)
class Bar:
    """A span.

    Attributes:
        row: counts rows from the top over all lanes.
        lane: counts lanes.
        kind: its bucket, or ``groups``.
    """

    span_id: str
    name: str
    url: str
    words: str
    kind: str
    failed: bool
    chosen: bool
    x: float
    width: float
    y: int
    row: int
    lane: int


@dataclass(frozen=True)
class Turn:
    """Where the critical path goes on in another row."""

    x: float
    top: int
    bottom: int


@dataclass(frozen=True)
class Tick:
    """A moment on the ruler."""

    x: float
    label: str


@dataclass(frozen=True)
class Waterfall:
    """A drawn trace."""

    seconds: float
    height: int
    lanes: Sequence[Lane]
    ticks: Sequence[Tick]
    busy: Sequence[Mark]
    bubbles: Sequence[Mark]
    bars: Sequence[Bar]
    path: Sequence[Mark]
    turns: Sequence[Turn]
    left_out: int


def waterfall(trace: models.Trace, *, chosen: str | None) -> Waterfall:
    """A trace, drawn; ``chosen`` is the span that is looked at."""
    spans = sorted(trace.rows, key=lambda span: -(span.seconds or 0.0))[:MOST_BARS]
    spans.sort(key=lambda span: (span.start_s, -(span.seconds or 0.0), span.depth))
    by_process: dict[str, list[models.SpanRow]] = {time.process: [] for time in trace.process_times}
    for span in spans:
        by_process.setdefault(span.process, []).append(span)
    lanes: list[Lane] = []
    placed: dict[str, tuple[int, int, int]] = {}  # span to pixel, row over all lanes, lane
    times = {time.process: time for time in trace.process_times}
    top, rows_above = _RULER, 0
    for process, own in by_process.items():
        rows = _rows(own)
        for span_id, row in rows.items():
            placed[span_id] = top + _NAME + row * _ROW, rows_above + row, len(lanes)
        count = 1 + max(rows.values(), default=0)
        height = _NAME + count * _ROW + _FOOT
        lanes.append(Lane(process, _busy(times.get(process), trace), top, height))
        top, rows_above = top + height, rows_above + count
    path = [one for one in trace.critical_path if one.span_id in placed]
    return Waterfall(
        seconds=trace.seconds,
        height=top,
        lanes=lanes,
        ticks=_ticks(trace.seconds),
        busy=list(_busy_marks(trace, lanes, times)),
        bubbles=list(_bubbles(trace, lanes, times)),
        bars=[_bar(trace, span, placed[span.span_id], span.span_id == chosen) for span in spans],
        path=[
            Mark(*place(trace, one.start_s, one.seconds), placed[one.span_id][0] + BAR)
            for one in path
        ],
        turns=list(_turns(trace, path, placed)),
        left_out=len(trace.rows) - len(spans) + trace.rows_left_out,
    )


def place(trace: models.Trace, start_s: float, seconds: float) -> tuple[float, float]:
    """Where a stretch begins and how wide it is; what is outside of the trace is cut off."""
    whole = trace.seconds if trace.seconds > 0 else 1.0
    left = 100 * min(max(0.0, start_s), whole) / whole
    right = 100 * min(max(0.0, start_s + seconds), whole) / whole
    left = min(left, 100 - _NARROWEST)
    return round(left, 4), round(max(right - left, _NARROWEST), 4)


def kind_of(span: models.SpanRow) -> str:
    """The bucket of a span, or ``groups`` where it has none that is known."""
    return span.bucket if span.bucket in BUCKETS else "groups"


def _rows(spans: Sequence[models.SpanRow]) -> dict[str, int]:
    """The row of each span of a lane: below its ancestors in it, and no two over each other.

    Args:
        spans: by start, of those that start together the longer first.
    """
    found: dict[str, int] = {}
    ends: list[float] = []
    for span in spans:
        row = found[span.parent_id] + 1 if span.parent_id in found else 0
        while row < len(ends) and ends[row] > span.start_s + 1e-9:
            row += 1
        ends += [span.start_s] * (row + 1 - len(ends))
        ends[row] = span.start_s + (span.seconds or 0.0)
        found[span.span_id] = row
    return found


def _bar(
    trace: models.Trace, span: models.SpanRow, where: tuple[int, int, int], chosen: bool
) -> Bar:
    x, width = place(trace, span.start_s, span.seconds or 0.0)
    kind = kind_of(span)
    told = [span.name, span.process, words.duration(span.seconds)]
    told.append(f"from {words.duration(span.start_s)}")
    if kind != "groups":
        told.append(kind)
    if span.critical:
        told.append("on the critical path")
    if span.outcome == "error":
        told.append("failed")
    y, row, lane = where
    return Bar(
        span_id=span.span_id,
        name=span.name,
        url=to("/trace", id=trace.trace_id, span=span.span_id),
        words=", ".join(told),
        kind=kind,
        failed=span.outcome == "error",
        chosen=chosen,
        x=x,
        width=width,
        y=y,
        row=row,
        lane=lane,
    )


def _busy(time: models.ProcessTime | None, trace: models.Trace) -> str:
    if time is None or time.busy_s is None:
        return ""
    return f"{words.percent(time.busy_s, trace.seconds)} busy"


def _busy_marks(
    trace: models.Trace, lanes: Sequence[Lane], times: Mapping[str, models.ProcessTime]
) -> Iterable[Mark]:
    for lane in lanes:
        if lane.label in times:
            for begin, end in times[lane.label].busy:
                yield Mark(*place(trace, begin, end - begin), lane.top + _NAME - 6)


def _bubbles(
    trace: models.Trace, lanes: Sequence[Lane], times: Mapping[str, models.ProcessTime]
) -> Iterable[Mark]:
    """The stretches in which a process did not work, with words on the long ones."""
    for lane in lanes:
        if lane.label not in times or times[lane.label].busy_s is None:
            continue
        moment = 0.0
        for begin, end in [*times[lane.label].busy, (trace.seconds, trace.seconds)]:
            if begin > moment:
                x, width = place(trace, moment, begin - moment)
                long = width >= _TOLD_WIDTH and x + width >= _TOLD_AFTER
                told = f"bubble {words.duration(begin - moment)}" if long else ""
                yield Mark(x, width, lane.top + _NAME - 6, told)
            moment = max(moment, end)


def _turns(
    trace: models.Trace,
    path: Sequence[models.Segment],
    placed: Mapping[str, tuple[int, int, int]],
) -> Iterable[Turn]:
    seen: defaultdict[tuple[float, int, int], int] = defaultdict(int)
    for before, after in pairwise(path):
        one, other = placed[before.span_id][0] + BAR + 1, placed[after.span_id][0] + BAR + 1
        if one == other:
            continue
        key = place(trace, after.start_s, 0)[0], min(one, other), max(one, other)
        seen[key] += 1
        if seen[key] == 1:
            yield Turn(*key)


def _ticks(seconds: float) -> list[Tick]:
    """Moments at round distances, at most nine."""
    if not 0 < seconds < math.inf:
        return []
    power = 10.0 ** math.floor(math.log10(seconds / 9))
    distance = power * next(one for one in (1, 2, 5, 10, 20) if seconds / (power * one) <= 9)
    return [
        Tick(round(100 * at * distance / seconds, 4), words.duration(at * distance))
        for at in range(int(seconds / distance * (1 + 1e-9)) + 1)
    ]
