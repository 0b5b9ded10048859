"""The content of a step on the page: its drawing, a tooltip for each bar, and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from observability.records import Span
from observability.views import attributes
from observability.views.critical_path import critical_path
from observability.views.drawing import Drawing, draw
from observability.views.figures import waste
from observability.views.intervals import Interval
from observability.views.printable import printable
from observability.views.processes import process_times, summed_buckets
from observability.views.quantities import duration, percent
from observability.views.steps import Step
from observability.views.tables import Table, tables_of

MAX_BARS = 4_000
"""Maximum number of bars. Pages of the admin service have fewer, because they are refreshed."""

_MAX_TIP_ATTRIBUTES = 24
_MAX_TIP_CHARACTERS = 160
"""Maximum length of a name or value in a tooltip."""


@dataclass(frozen=True)
class StepOnPage:
    """The values that the template shows of a step.

    Attributes:
        anchor: id of the step's section.
        is_open: whether the section is open at first.
        step: the step.
        productive: share of productive time in all time with a bucket, as text.
        wasted_share: share of the samples that were dropped, as text.
        mean_staleness: mean staleness of the trained samples, as text.
        drawing: waterfall of the step.
        tips: tooltip of a bar by span id.
        tables: figures of the step.
    """

    anchor: str
    is_open: bool
    step: Step
    productive: str
    wasted_share: str
    mean_staleness: str
    drawing: Drawing
    tips: Mapping[str, str]
    tables: Sequence[Table]


@dataclass(frozen=True)
class _Span:
    """A span as `drawing.DrawnSpan`."""

    span_id: str
    parent_id: str | None
    name: str
    process: str
    depth: int
    start_s: float
    seconds: float
    bucket: str | None
    outcome: str
    critical: bool


@dataclass(frozen=True)
class _ProcessTime:
    """The times of a process as `drawing.DrawnProcess`."""

    process: str
    busy: Sequence[tuple[float, float]]
    busy_s: float | None
    busy_elsewhere: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class _Segment:
    """A segment of the critical path as `drawing.DrawnSegment`."""

    span_id: str
    start_s: float
    seconds: float


def step_on_page(step: Step, *, anchor: str, is_open: bool) -> StepOnPage:
    """Return what the template shows of a step.

    Args:
        step: the step.
        anchor: id of its section.
        is_open: whether the section is open at first.
    """
    path = critical_path(step)
    times = process_times(step)
    seconds = summed_buckets(times)
    critical_ids = {segment.span.span_id for segment in path}
    depths: dict[str | None, int] = {}
    for span, is_before in step.tree.walk():
        if is_before:
            depths[span.span_id] = depths.get(span.parent_id, 0) + 1

    def since_start(time_ns: int) -> float:
        return (time_ns - step.start_ns) / 1e9

    def busy(intervals: Sequence[Interval]) -> list[tuple[float, float]]:
        return [(since_start(start_ns), since_start(end_ns)) for start_ns, end_ns in intervals]

    drawing = draw(
        step.seconds,
        [
            _Span(
                span.span_id,
                span.parent_id,
                span.name,
                step.labels[span.process],
                depths[span.span_id],
                since_start(span.start_ns),
                span.seconds,
                attributes.bucket(span),
                span.outcome,
                span.span_id in critical_ids,
            )
            for span in step.spans
        ],
        [
            _ProcessTime(
                time.label,
                busy(time.busy),
                time.busy_seconds,
                busy(time.busy_elsewhere),
            )
            for time in times
        ],
        [
            _Segment(segment.span.span_id, since_start(segment.start_ns), segment.seconds)
            for segment in path
        ],
        max_bars=MAX_BARS,
    )
    spans = {span.span_id: span for span in step.spans}
    return StepOnPage(
        anchor=anchor,
        is_open=is_open,
        step=step,
        productive=percent(seconds["productive"], sum(seconds.values())) if seconds else "n/a",
        wasted_share=percent(waste(step).share, 1),
        mean_staleness=f"{step.staleness.mean:.2f}" if step.staleness else "-",
        drawing=drawing,
        tips={bar.span_id: _tip(step, spans[bar.span_id]) for bar in drawing.bars},
        tables=tables_of(step, path),
    )


def _tip(step: Step, span: Span) -> str:
    """Return the tooltip of a span, with several lines of printable text."""
    offset = duration((span.start_ns - step.start_ns) / 1e9)
    lines = [
        f"{printable(span.name)} in {step.labels[span.process]}",
        f"{duration(span.reported_seconds)}, starts at {offset}",
    ]
    if span.outcome == "error":
        lines.append(f"failed: {_shorten(span.message)}")
    pairs = sorted(span.attributes.items(), key=lambda pair: pair[0])
    lines += [
        f"{_shorten(name)} = {_shorten(value)}" for name, value in pairs[:_MAX_TIP_ATTRIBUTES]
    ]
    if len(pairs) > _MAX_TIP_ATTRIBUTES:
        lines.append(f"and {len(pairs) - _MAX_TIP_ATTRIBUTES} more attributes")
    return "\n".join(lines)


def _shorten(value: object) -> str:
    text = printable(value)
    return text if len(text) <= _MAX_TIP_CHARACTERS else f"{text[:_MAX_TIP_CHARACTERS]}…"
