"""One trace: its drawing, where the time went, and one span in detail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any  # Any: attribute values

from dataplane_admin.answers import models
from dataplane_admin.pages import marks, words
from dataplane_admin.pages.links import outward, to
from dataplane_admin.pages.waterfall import Waterfall, kind_of, place, waterfall

_PATH = 10
_TREE = 400
_EVENTS = 12
_STACK = 60
_CHILDREN = 12


@dataclass(frozen=True)
class PathPart:
    """A span on the critical path, with all of its segments together."""

    name: str
    process: str
    seconds: float
    share: str
    url: str
    span_id: str
    bar: marks.Stack


@dataclass(frozen=True)
class ProcessRow:
    """How a process spent the trace."""

    time: models.ProcessTime
    bar: marks.Stack
    bubble: str


@dataclass(frozen=True)
class TreeRow:
    """A span in the list of all."""

    span: models.SpanRow
    url: str
    kind: str
    x: float
    width: float


@dataclass(frozen=True)
class EventInSpan:
    """A span event: what it says first, a stack trace by lines, and its other attributes."""

    name: str
    time_s: float | None
    words: str
    stack: Sequence[str]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class SpanDetail:
    """One span, with its neighbours and what it is about."""

    span: models.SpanRow
    kind: str
    share: str
    parent: models.SpanRow | None
    children: Sequence[models.SpanRow]
    more_children: int
    events: Sequence[EventInSpan]
    samples: Sequence[models.TraceEvent]
    """Lifecycle events of the span."""
    resource: Mapping[str, Any]
    """What its process reported of itself."""
    links: Sequence[tuple[str, str]]
    """Words and address."""
    partition: str


@dataclass(frozen=True)
class TracePage:
    """Everything on the page of a trace."""

    facts: models.Trace
    title: str
    drawing: Waterfall
    detail: SpanDetail | None
    missing: str
    """The span that was asked for and is not there."""
    path: Sequence[PathPart]
    path_rest: tuple[int, float]
    processes: Sequence[ProcessRow]
    most_bytes: int
    tree: Sequence[TreeRow]
    external: Sequence[models.ExternalLink]


def trace_page(trace: models.Trace, *, span_id: str | None) -> TracePage:
    """The page of a trace, with the details of ``span_id`` if it is one of its spans."""
    spans = {span.span_id: span for span in trace.rows}
    chosen = spans.get(span_id or "")
    path, rest = _path(trace, spans)
    return TracePage(
        facts=trace,
        title=title_of(trace),
        drawing=waterfall(trace, chosen=chosen.span_id if chosen else None),
        detail=_detail(trace, spans, chosen) if chosen else None,
        missing=span_id if span_id and chosen is None else "",
        path=path,
        path_rest=rest,
        processes=[
            ProcessRow(
                time,
                marks.of_buckets(time.seconds, trace.seconds),
                "n/a" if time.bubble_s is None else words.percent(time.bubble_s, trace.seconds),
            )
            for time in trace.process_times
        ],
        most_bytes=max((max(one.put, one.get) for one in trace.stages), default=0),
        tree=[
            TreeRow(
                span,
                to("/trace", id=trace.trace_id, span=span.span_id),
                kind_of(span),
                *place(trace, span.start_s, span.seconds or 0.0),
            )
            for span in trace.rows[:_TREE]
        ],
        external=[link for link in trace.external if outward(link.url)],
    )


def title_of(trace: models.TraceFacts) -> str:
    """``Step 12`` of a step, else the name of the trace."""
    return trace.name if trace.step is None else f"Step {trace.step}"


def _path(
    trace: models.Trace, spans: Mapping[str, models.SpanRow]
) -> tuple[list[PathPart], tuple[int, float]]:
    """The spans that the trace waited for longest, and how many others for how long."""
    seconds: dict[str, float] = {}
    of: dict[str, models.Segment] = {}
    for segment in trace.critical_path:
        seconds[segment.span_id] = seconds.get(segment.span_id, 0.0) + segment.seconds
        of.setdefault(segment.span_id, segment)
    ranked = sorted(seconds, key=lambda one: -seconds[one])
    longest = seconds[ranked[0]] if ranked else 0.0
    parts = [
        PathPart(
            of[one].name,
            of[one].process,
            seconds[one],
            words.percent(seconds[one], trace.seconds),
            to("/trace", id=trace.trace_id, span=one),
            one,
            marks.stack(
                [(kind_of(spans[one]) if one in spans else "groups", seconds[one])],
                longest,
                words.duration(seconds[one]),
            ),
        )
        for one in ranked[:_PATH]
    ]
    others = ranked[_PATH:]
    return parts, (len(others), sum(seconds[one] for one in others))


def _detail(
    trace: models.Trace, spans: Mapping[str, models.SpanRow], span: models.SpanRow
) -> SpanDetail:
    children = [one for one in trace.rows if one.parent_id == span.span_id]
    links = []
    for link in span.links:
        near = link.trace_id in (trace.trace_id, "")
        known = spans.get(link.span_id) if near else None
        told = f"{known.name} of {known.process}" if known else f"span {link.span_id}"
        where = "" if near else f" in trace {link.trace_id[:8]}…"
        target = to("/trace", id=link.trace_id or trace.trace_id, span=link.span_id)
        links.append((told + where, target))
    held = span.attributes
    partition = held.get("messaging.destination.name") or held.get("db.collection.name") or ""
    return SpanDetail(
        span=span,
        kind=kind_of(span),
        share="" if span.seconds is None else words.percent(span.seconds, trace.seconds),
        parent=spans.get(span.parent_id or ""),
        children=children[:_CHILDREN],
        more_children=max(0, len(children) - _CHILDREN),
        events=[_event(event) for event in span.events],
        samples=[event for event in trace.events if event.span_id == span.span_id][:_EVENTS],
        resource=next(
            (one.resource for one in trace.process_times if one.process == span.process), {}
        ),
        links=links,
        partition=str(partition),
    )


def _event(event: models.SpanEvent) -> EventInSpan:
    rest = dict(event.attributes)
    # https://opentelemetry.io/docs/specs/semconv/exceptions/exceptions-spans/
    kind, message = (str(rest.pop(f"exception.{name}", "")) for name in ("type", "message"))
    stack = str(rest.pop("exception.stacktrace", ""))
    return EventInSpan(
        name=event.name,
        time_s=event.time_s,
        words=": ".join(filter(None, (kind, message))),
        stack=stack.splitlines()[-_STACK:],
        attributes=rest,
    )
