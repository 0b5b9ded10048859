"""What stands on the page of a step: places of bars, and tables of printable text.

Places along the time are percent of the step, so that the drawing fits any width; places down are
pixels.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from observability.records import Process, Span
from observability.views import attributes
from observability.views.critical_path import critical_path
from observability.views.figures import waste
from observability.views.lanes import rows
from observability.views.printable import printable
from observability.views.processes import BUCKETS, ProcessTime, process_times, summed_buckets
from observability.views.quantities import duration, percent
from observability.views.steps import Step
from observability.views.tables import Table, tables_of

MOST_BARS = 4_000
"""Of more spans the shortest are left out of the drawing, and the page says so."""

_RULER = 22
_ROW = 21
_MARGIN = 5
# Percent; what is shorter is drawn so wide, to be seen and hit.
_NARROWEST = 0.08
_TIP_ATTRIBUTES = 24
_TIP_WIDTH = 160


@dataclass(frozen=True)
class Lane:
    """The place of a process."""

    label: str
    busy: str
    top: int
    height: int


@dataclass(frozen=True)
class Tick:
    """A moment on the ruler."""

    at: float
    label: str


@dataclass(frozen=True)
class Mark:
    """A rectangle over a stretch of time."""

    left: float
    width: float
    top: int


@dataclass(frozen=True)
class Bar(Mark):
    """A span."""

    name: str
    bucket: str
    tip: str
    critical: bool
    failed: bool


@dataclass(frozen=True)
class StepOnPage:
    """A step as the template takes it."""

    anchor: str
    is_open: bool
    number: int
    run_id: str
    trace_id: str
    took: str
    span_count: int
    productive: str
    wasted_share: str
    mean_staleness: str
    incomplete: Sequence[str]
    clock_notes: Sequence[str]
    left_out: str
    lanes: Sequence[Lane]
    height: int
    ticks: Sequence[Tick]
    bars: Sequence[Bar]
    path_marks: Sequence[Mark]
    tables: Sequence[Table]


def step_on_page(step: Step, *, anchor: str, is_open: bool) -> StepOnPage:
    """A step, drawn.

    Args:
        step: which.
        anchor: the id of its section.
        is_open: whether it is unfolded at first.
    """
    path = critical_path(step)
    times = process_times(step)
    seconds = summed_buckets(times)
    spans = heapq.nlargest(MOST_BARS, step.spans, key=lambda span: span.end_ns - span.start_ns)
    hidden = len(step.spans) - len(spans)
    lanes, tops = _lanes(times, spans, lambda span: step.tree.line(span.span_id))
    critical = {segment.span.span_id for segment in path}
    lost = waste(step)
    return StepOnPage(
        anchor=anchor,
        is_open=is_open,
        number=step.number,
        run_id=printable(step.run_id),
        trace_id=printable(step.trace_id),
        took=duration(step.seconds),
        span_count=len(step.spans),
        productive=percent(seconds["productive"], sum(seconds.values())) if seconds else "n/a",
        wasted_share=percent(lost.share, 1),
        mean_staleness=f"{step.staleness.mean:.2f}" if step.staleness else "-",
        incomplete=step.incomplete,
        clock_notes=step.clock_notes,
        left_out=f"The {hidden} shortest spans are not drawn." if hidden else "",
        lanes=lanes,
        height=lanes[-1].top + lanes[-1].height,
        ticks=_ticks(step.seconds),
        bars=[
            _bar(step, span, tops[span.span_id], span.span_id in critical)
            for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
        ],
        path_marks=[
            Mark(*_place(step, segment.start_ns, segment.end_ns), tops[segment.span.span_id])
            for segment in path
            if segment.span.span_id in tops
        ],
        tables=tables_of(step, path),
    )


def _lanes(
    times: Iterable[ProcessTime], spans: Sequence[Span], line: Callable[[Span], list[Span]]
) -> tuple[list[Lane], dict[str, int]]:
    """The lane of each process, and how far down each span is drawn."""
    by_process: dict[Process, list[Span]] = {}
    for span in spans:
        by_process.setdefault(span.process, []).append(span)
    lanes = []
    tops: dict[str, int] = {}
    top = _RULER
    for one in times:
        placed = rows(by_process.get(one.process, ()), line)
        for (_, span_id), row in placed.items():
            tops[span_id] = top + _MARGIN + row * _ROW
        height = 2 * _MARGIN + _ROW * (1 + max(placed.values(), default=0))
        busy = "" if one.busy_seconds is None else percent(one.busy_seconds, one.step_seconds)
        lanes.append(Lane(one.label, busy, top, height))
        top += height
    return lanes, tops


def _bar(step: Step, span: Span, top: int, critical: bool) -> Bar:
    bucket = attributes.bucket(span)
    return Bar(
        *_place(step, span.start_ns, span.end_ns),
        top,
        name=printable(span.name),
        bucket=bucket if bucket in BUCKETS else "groups",
        tip=_tip(step, span),
        critical=critical,
        failed=span.outcome == "error",
    )


def _place(step: Step, start_ns: int, end_ns: int) -> tuple[float, float]:
    """Where a stretch begins, and how wide it is; what is outside of the step is cut off."""
    whole = max(1, step.end_ns - step.start_ns)
    left = 100 * min(max(0, start_ns - step.start_ns), whole) / whole
    right = 100 * min(max(0, end_ns - step.start_ns), whole) / whole
    left = min(left, 100 - _NARROWEST)
    return round(left, 4), round(max(right - left, _NARROWEST), 4)


def _tip(step: Step, span: Span) -> str:
    offset = duration((span.start_ns - step.start_ns) / 1e9)
    lines = [
        f"{printable(span.name)} in {step.labels[span.process]}",
        f"{duration(span.reported_seconds)}, from {offset} on",
    ]
    if span.outcome == "error":
        lines.append(f"failed: {_short(span.message)}")
    told = sorted((str(name), value) for name, value in span.attributes.items())
    lines += [f"{_short(name)} = {_short(value)}" for name, value in told[:_TIP_ATTRIBUTES]]
    if len(told) > _TIP_ATTRIBUTES:
        lines.append(f"and {len(told) - _TIP_ATTRIBUTES} more attributes")
    return "\n".join(lines)


def _short(value: object) -> str:
    shown = printable(value)
    return shown if len(shown) <= _TIP_WIDTH else f"{shown[:_TIP_WIDTH]}…"


def _ticks(seconds: float) -> list[Tick]:
    """Moments at round distances, about eight."""
    if seconds <= 0:
        return []
    distance = 10.0 ** math.floor(math.log10(seconds / 4))
    distance *= next(factor for factor in (1, 2, 5, 10) if seconds / (distance * factor) <= 10)
    return [
        Tick(round(100 * place * distance / seconds, 4), duration(place * distance))
        for place in range(int(seconds / distance * (1 + 1e-9)) + 1)
    ]
