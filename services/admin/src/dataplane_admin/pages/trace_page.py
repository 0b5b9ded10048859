"""Trace page: waterfall, times, and one span in detail."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any  # Any: attribute values

from dataplane_admin import models
from dataplane_admin.pages import words
from dataplane_admin.pages.flame import Flame, draw_flame
from dataplane_admin.pages.links import Link, external_url, to
from dataplane_admin.pages.load import LoadDrawing, draw_load
from dataplane_admin.pages.params import Params
from dataplane_admin.pages.span_names import NameTable, name_table
from dataplane_admin.service.traces import MAX_ROWS
from observability.records import Span
from observability.views.drawing import Drawing, draw, kind_of, x_and_width

# Maximum numbers of rows.
_NAMES = 100
_PATH = 10
_TREE = 400
_EVENTS = 12
_STACK = 60
_LOGS = 200
_SERVICES = 12
_TONES = 8
"""Number of colors of services; any further services share the last color."""

QUERY = ("span", "name", "service", "sort", "order", "frame")
"""Parameters of the page, besides the id of the trace."""


@dataclass(frozen=True)
class TreeRow:
    """A row of the span list."""

    span: models.SpanRow
    kind: str
    x: float
    width: float


@dataclass(frozen=True)
class EventInSpan:
    """A span event: exception, stack trace by lines, and other attributes."""

    name: str
    time_s: float | None
    words: str
    stack: Sequence[str]
    attributes: Mapping[str, Any]


@dataclass(frozen=True)
class SpanDetail:
    """One span with its parent, children, events and links."""

    span: models.SpanRow
    kind: str
    share: str
    parent: models.SpanRow | None
    children: Sequence[models.SpanRow]
    events: Sequence[EventInSpan]
    samples: Sequence[models.TraceEvent]
    """Lifecycle events of the span."""
    logs: Sequence[models.TraceLog]
    resource: Mapping[str, Any]
    """Resource attributes of its process."""
    links: Sequence[tuple[str, str]]
    """Text and URL of each link."""
    partition: str


@dataclass(frozen=True)
class TracePage:
    """Content of the trace page."""

    facts: models.Trace
    query: Mapping[str, str]
    """The parameters `QUERY`, as in the URL."""
    title: str
    services: Sequence[tuple[models.ServiceSpans, int]]
    """Services with their colors."""
    names: NameTable
    marked: frozenset[str] | None
    """Ids of the spans that ``name`` and ``service`` mark; None if the URL has neither."""
    flame: Flame
    logs: Sequence[tuple[models.TraceLog, str]]
    """Logs, each with the name of its span."""
    drawing: Drawing
    load: LoadDrawing | None
    """Engines and nodes below the spans; None without any."""
    detail: SpanDetail | None
    missing: str
    """Id of the requested span if it is not in the trace; else empty."""
    path: Sequence[tuple[models.Segment, float, str]]
    """Spans on the critical path: first segment, seconds of all segments, and bucket."""
    path_rest: tuple[int, float]
    """Number and seconds of the spans on the critical path that ``path`` omits."""
    max_bytes: int
    tree: Sequence[TreeRow]
    tree_rest: int
    """Number of spans, or of marked spans if there are marks, that ``tree`` omits."""
    external: Sequence[models.ExternalLink]

    def url(self, **changes: str) -> Link:
        """Return the URL of this page with some parameters changed."""
        return _url(self.facts, self.query, **changes)


def trace_page(trace: models.Trace, load: models.Load | None, params: Params) -> TracePage:
    """Return the page of a trace, with the details of the span in the URL if it is received.

    ``load`` is the load of engines and nodes during the trace; None if the time of the trace is
    unknown. Raises Refused if the sort order is invalid.
    """
    query = query_of(params)
    max_names = params.rows("names", _NAMES)
    max_tree = params.rows("tree", _TREE, MAX_ROWS)
    spans = {span.span_id: span for span in trace.rows}
    chosen = spans.get(query["span"])
    tones: dict[str, int] = defaultdict(lambda: _TONES - 1)
    tones.update((row.service, place) for place, row in enumerate(trace.services[:_TONES]))
    path, rest = _path(trace, spans)
    marked = _marked(trace, query)
    in_tree = [span for span in trace.rows if marked is None or span.span_id in marked]
    drawing = draw(trace.seconds, trace.rows, trace.process_times, trace.critical_path)
    if trace.others_omitted:  # a process may have been busy in one of them
        drawing = replace(drawing, bubbles=[])
    if not trace.buckets:  # color by service
        bars = [
            replace(bar, kind=f"tone-{tones[spans[bar.span_id].service]}") for bar in drawing.bars
        ]
        drawing = replace(drawing, bars=bars)
    lanes = None if load is None else draw_load(load, drawing.height)
    if lanes is not None:
        drawing = replace(drawing, height=drawing.height + lanes.height)
    return TracePage(
        facts=trace,
        query=query,
        title=title_of(trace),
        services=[(row, tones[row.service]) for row in trace.services[:_SERVICES]],
        names=name_table(trace, query, tones, partial(_url, trace, query), max_names),
        marked=marked,
        flame=draw_flame(trace.paths, tones, query["frame"]),
        logs=[
            (log, spans[log.span_id].name if log.span_id in spans else log.span_id)
            for log in trace.logs[: params.rows("logs", _LOGS)]
        ],
        drawing=drawing,
        load=lanes,
        detail=_detail(trace, query, spans, chosen) if chosen else None,
        missing="" if chosen else query["span"],
        path=path,
        path_rest=rest,
        max_bytes=max((max(stage.put, stage.get) for stage in trace.stages), default=0),
        tree=[
            TreeRow(
                span,
                kind_of(span) if trace.buckets else f"tone-{tones[span.service]}",
                *x_and_width(trace.seconds, span.start_s, span.seconds or 0.0),
            )
            for span in in_tree[:max_tree]
        ],
        tree_rest=max(0, _count(trace, query) - min(len(in_tree), max_tree)),
        external=[link for link in trace.external if external_url(link.url)],
    )


def query_of(params: Params) -> dict[str, str]:
    """Return the values of `QUERY`."""
    return {name: params.text(name) for name in QUERY}


def _url(trace: models.Trace, query: Mapping[str, str], **changes: str) -> Link:
    return to("/trace", id=trace.trace_id, **{**query, **changes})


def marks_of(query: Mapping[str, str]) -> Callable[[Span], bool] | None:
    """Return a predicate for the spans that ``query`` marks; None if it marks none."""
    if not query["name"] and not query["service"]:
        return None
    return lambda span: _is_marked(query, span.name, span.process.service)


def _is_marked(query: Mapping[str, str], name: str, service: str) -> bool:
    return query["name"] in ("", name) and query["service"] in ("", service)


def _marked(trace: models.Trace, query: Mapping[str, str]) -> frozenset[str] | None:
    if not query["name"] and not query["service"]:
        return None
    return frozenset(
        span.span_id for span in trace.rows if _is_marked(query, span.name, span.service)
    )


def _count(trace: models.Trace, query: Mapping[str, str]) -> int:
    """Return the number of marked spans, or of all spans if there are no marks."""
    if not query["name"] and not query["service"]:
        return len(trace.rows) + trace.rows_omitted
    return sum(group.count for group in trace.names if _is_marked(query, group.name, group.service))


def title_of(trace: models.TraceFacts) -> str:
    """Return ``Step 12`` for a step, else the name of the trace."""
    return trace.name if trace.step is None else f"Step {trace.step}"


def _path(
    trace: models.Trace, spans: Mapping[str, models.SpanRow]
) -> tuple[list[tuple[models.Segment, float, str]], tuple[int, float]]:
    """Return `TracePage.path`, the longest first, and `TracePage.path_rest`."""
    seconds: dict[str, float] = {}
    segment_of: dict[str, models.Segment] = {}
    for segment in trace.critical_path:
        seconds[segment.span_id] = seconds.get(segment.span_id, 0.0) + segment.seconds
        segment_of.setdefault(segment.span_id, segment)
    ranked = sorted(seconds, key=lambda span_id: -seconds[span_id])
    parts = [
        (
            segment_of[span_id],
            seconds[span_id],
            kind_of(spans[span_id]) if span_id in spans else "groups",
        )
        for span_id in ranked[:_PATH]
    ]
    others = ranked[_PATH:]
    return parts, (len(others), sum(seconds[span_id] for span_id in others))


def _detail(
    trace: models.Trace,
    query: Mapping[str, str],
    spans: Mapping[str, models.SpanRow],
    span: models.SpanRow,
) -> SpanDetail:
    links = []
    for link in span.links:
        is_same_trace = link.trace_id in (trace.trace_id, "")
        known = spans.get(link.span_id) if is_same_trace else None
        text = f"{known.name} of {known.process}" if known else f"span {link.span_id}"
        suffix = "" if is_same_trace else f" in trace {link.trace_id[:8]}…"
        target = _url(trace, query, span=link.span_id)
        if not is_same_trace:
            target = to("/trace", id=link.trace_id, span=link.span_id)
        links.append((text + suffix, target))
    attributes = span.attributes
    partition = attributes.get("messaging.destination.name") or attributes.get("db.collection.name")
    return SpanDetail(
        span=span,
        kind=kind_of(span),
        share="" if span.seconds is None else words.percent(span.seconds, trace.seconds),
        parent=spans.get(span.parent_id or ""),
        children=[row for row in trace.rows if row.parent_id == span.span_id],
        events=[_event(event) for event in span.events],
        samples=[event for event in trace.events if event.span_id == span.span_id][:_EVENTS],
        logs=[log for log in trace.logs if log.span_id == span.span_id],
        resource=next(
            (row.resource for row in trace.process_times if row.process == span.process), {}
        ),
        links=links,
        partition=str(partition or ""),
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
