"""The content of a step's page: its drawing, a tooltip for each bar, and its tables."""

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
"""Maximum number of bars; more than on the admin service's pages, which are refreshed."""

_TIP_ATTRIBUTES = 24
_TIP_WIDTH = 160


@dataclass(frozen=True)
class StepOnPage:
    """The values of a step for the template; ``tips`` are tooltips by span id."""

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
    """The `drawing.SpanTime` of a span."""

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
class _Lane:
    """The `drawing.LaneTime` of a process."""

    process: str
    busy: Sequence[tuple[float, float]]
    busy_s: float | None


@dataclass(frozen=True)
class _Part:
    """The `drawing.PathTime` of a segment of the critical path."""

    span_id: str
    start_s: float
    seconds: float


def step_on_page(step: Step, *, anchor: str, is_open: bool) -> StepOnPage:
    """Return the content of a step's page.

    Args:
        step: the step.
        anchor: id of its section.
        is_open: whether it is unfolded at first.
    """
    path = critical_path(step)
    times = process_times(step)
    seconds = summed_buckets(times)
    critical = {segment.span.span_id for segment in path}

    def since(interval: Interval) -> tuple[float, float]:
        begin, end = interval
        return (begin - step.start_ns) / 1e9, (end - step.start_ns) / 1e9

    drawing = draw(
        step.seconds,
        [
            _Span(
                span.span_id,
                span.parent_id,
                span.name,
                step.labels[span.process],
                len(step.tree.line(span.span_id)),
                (span.start_ns - step.start_ns) / 1e9,
                span.seconds,
                attributes.bucket(span),
                span.outcome,
                span.span_id in critical,
            )
            for span in step.spans
        ],
        [_Lane(time.label, [*map(since, time.busy)], time.busy_seconds) for time in times],
        [_Part(part.span.span_id, since((part.start_ns, 0))[0], part.seconds) for part in path],
        max_bars=MAX_BARS,
    )
    by_id = {span.span_id: span for span in step.spans}
    return StepOnPage(
        anchor=anchor,
        is_open=is_open,
        step=step,
        productive=percent(seconds["productive"], sum(seconds.values())) if seconds else "n/a",
        wasted_share=percent(waste(step).share, 1),
        mean_staleness=f"{step.staleness.mean:.2f}" if step.staleness else "-",
        drawing=drawing,
        tips={bar.span_id: _tip(step, by_id[bar.span_id]) for bar in drawing.bars},
        tables=tables_of(step, path),
    )


def _tip(step: Step, span: Span) -> str:
    offset = duration((span.start_ns - step.start_ns) / 1e9)
    lines = [
        f"{printable(span.name)} in {step.labels[span.process]}",
        f"{duration(span.reported_seconds)}, starts at {offset}",
    ]
    if span.outcome == "error":
        lines.append(f"failed: {_short(span.message)}")
    pairs = sorted((str(name), value) for name, value in span.attributes.items())
    lines += [f"{_short(name)} = {_short(value)}" for name, value in pairs[:_TIP_ATTRIBUTES]]
    if len(pairs) > _TIP_ATTRIBUTES:
        lines.append(f"and {len(pairs) - _TIP_ATTRIBUTES} more attributes")
    return "\n".join(lines)


def _short(value: object) -> str:
    shown = printable(value)
    return shown if len(shown) <= _TIP_WIDTH else f"{shown[:_TIP_WIDTH]}…"
