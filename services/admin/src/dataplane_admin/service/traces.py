"""Traces with waterfall, critical path and bubbles, and comparisons of two traces."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from urllib.parse import quote

from dataplane_admin import models
from dataplane_admin.service.errors import NotFound, Refused
from dataplane_admin.service.model_calls import model_calls_of
from dataplane_admin.service.span_totals import (
    name_statistics,
    path_statistics,
    self_times_ns,
    services_of,
)
from dataplane_admin.service.trace_logs import trace_logs
from dataplane_admin.settings import Settings
from dataplane_admin.store import Store
from observability.records import Event, Records, Span
from observability.views import (
    Segment,
    Step,
    attributes,
    bucket_seconds,
    bytes_by_stage,
    critical_path,
    process_times,
    step_of_trace,
    steps_of,
)
from observability.views.concurrent import TracesByTime
from observability.views.processes import summed_buckets
from observability.views.tree import Tree

MAX_ROWS = 5_000
MAX_EVENTS = 500
MAX_COMPARED = 500
MAX_SPAN_EVENTS = 32
_EXAMPLES = 5
_MAX_LINKS = 1_000
_MAX_DEPTH = 30


def _on_one_clock(facts: models.TraceFacts, step: Step) -> models.TraceFacts:
    """Return the facts, with corrected times where clocks disagree."""
    if not step.clock_offsets:
        return facts
    start_ns = min(span.start_ns for span in step.spans)
    end_ns = max(span.end_ns for span in step.spans)
    seconds = (end_ns - start_ns) / 1e9
    return facts.model_copy(update={"start_ns": start_ns, "end_ns": end_ns, "seconds": seconds})


def canonical_trace_id(given: str) -> str:
    """Return a trace id as stored: lower case, without dashes and spaces."""
    return "".join(given.split()).replace("-", "").lower()


@dataclass(frozen=True)
class Selection:
    """The spans and lifecycle events to return of a trace.

    Attributes:
        max_rows: maximum number of spans, besides those of ``span_id``.
        span_id: span to return, with its parent and children, however short it is.
        prefer: selects spans to return before longer spans, in up to two thirds of the rows.
        max_events: maximum number of lifecycle events, the earliest.
        details_of: the only span whose attributes, links, events and lifecycle events are returned;
            None returns those of all spans.
    """

    max_rows: int = MAX_ROWS
    span_id: str | None = None
    prefer: Callable[[Span], bool] | None = None
    max_events: int = MAX_EVENTS
    details_of: str | None = None


def trace(
    store: Store, settings: Settings, trace_id: str, chosen: Selection = Selection()
) -> models.Trace:
    """Return a trace with its longest spans and its earliest lifecycle events.

    Raises:
        NotFound: the trace is not stored.
        Refused: the id is invalid.
    """
    trace_id = canonical_trace_id(trace_id)
    facts, records, more_events = _read(
        store, trace_id, max_events=chosen.max_events, events_of=chosen.details_of
    )
    step, others_omitted = _with_others(store, _step(facts, records))
    path = critical_path(step)
    out, into = store.linked(trace_id)
    shown = _shown(step, chosen)
    rows = _rows(step, path, shown, chosen.details_of)
    logs, logs_full = store.logs(trace_id)
    self_ns = self_times_ns(step)
    names, names_omitted = name_statistics(step, self_ns)
    paths, paths_omitted = path_statistics(step, self_ns)
    services, services_omitted = services_of(step)
    times_of_processes = process_times(step)
    return models.Trace(
        **dict(_on_one_clock(facts, step)),
        incomplete=_incomplete(store, facts, step),
        clocks=step.clock_notes,
        rows=rows,
        rows_omitted=len(step.spans) - len(rows),
        critical_path=[_segment(step, segment) for segment in path[:MAX_ROWS]],
        process_times=[
            models.ProcessTime(
                process=times.label,
                busy=[_since(step, *interval) for interval in times.busy[:MAX_ROWS]],
                seconds=dict(times.seconds),
                busy_s=times.busy_seconds,
                busy_elsewhere=[
                    _since(step, *interval) for interval in times.busy_elsewhere[:MAX_ROWS]
                ],
                elsewhere_s=times.elsewhere_seconds,
                bubble_s=None if others_omitted else times.bubble_seconds,
                resource=dict(times.process.resource),
            )
            for times in times_of_processes
        ],
        others_omitted=others_omitted,
        buckets=summed_buckets(times_of_processes),
        links_out=out[:_MAX_LINKS],
        links_in=into[:_MAX_LINKS],
        events=[_event(step, event) for event in step.events],
        events_omitted=more_events,
        logs=trace_logs(step, logs),
        logs_full=logs_full,
        services=services,
        services_omitted=services_omitted,
        names=names,
        names_omitted=names_omitted,
        paths=paths,
        paths_omitted=paths_omitted,
        model_calls=model_calls_of(step),
        stages=[models.StageBytes.of(stage) for stage in bytes_by_stage(step)],
        staleness=store.trace_staleness(trace_id),
        external=_external(settings, trace_id),
    )


def compare(store: Store, a: str, b: str) -> models.TraceComparison:
    """Compare two traces. Raises NotFound, Refused."""
    a, b = canonical_trace_id(a), canonical_trace_id(b)
    facts_a, records_a, _ = _read(store, a)
    facts_b, records_b, _ = _read(store, b)
    step_a, step_b = _step(facts_a, records_a), _step(facts_b, records_b)
    busy_a, busy_b = _busy(step_a), _busy(step_b)
    rows = _compared(_places(step_a), _places(step_b))
    times_a, times_b = bucket_seconds(step_a), bucket_seconds(step_b)
    critical = _compared(_on_path(step_a), _on_path(step_b))
    critical.sort(key=lambda row: -abs(row.difference_s))
    notes = [
        f"{name}: {reason}"
        for name, facts, step in (("A", facts_a, step_a), ("B", facts_b, step_b))
        for reason in [*_incomplete(store, facts, step), *step.clock_notes]
    ]
    return models.TraceComparison(
        a=_on_one_clock(facts_a, step_a),
        b=_on_one_clock(facts_b, step_b),
        rows=rows[:MAX_COMPARED],
        rows_omitted=max(0, len(rows) - MAX_COMPARED),
        buckets=[
            models.ComparedBucket(
                bucket=name,
                a_s=times_a.get(name, 0.0),
                b_s=times_b.get(name, 0.0),
                difference_s=times_b.get(name, 0.0) - times_a.get(name, 0.0),
            )
            for name in dict.fromkeys([*times_a, *times_b])
        ],
        processes=[
            models.ComparedProcess(
                process=process,
                a_busy_s=busy_a.get(process, 0.0),
                b_busy_s=busy_b.get(process, 0.0),
                difference_s=busy_b.get(process, 0.0) - busy_a.get(process, 0.0),
            )
            for process in dict.fromkeys([*busy_a, *busy_b])
        ],
        critical=critical[:MAX_COMPARED],
        notes=notes,
    )


def _busy(step: Step) -> dict[str, float]:
    return {
        times.label: times.busy_seconds
        for times in process_times(step)
        if times.busy_seconds is not None
    }


def _read(
    store: Store, trace_id: str, *, max_events: int = 0, events_of: str | None = None
) -> tuple[models.TraceFacts, Records, int]:
    """Return a trace with its first events, and how many further events it has."""
    if len(trace_id) != 32 or not set(trace_id) <= set("0123456789abcdef"):
        raise Refused(f"trace id: found {len(trace_id)} characters; expected 32 hexadecimal digits")
    facts = store.trace(trace_id)
    if facts is None:
        raise NotFound(
            f"trace {trace_id} is not stored: it was never received, or retention removed it"
        )
    records, more_events = store.trace_records(trace_id, max_events=max_events, span_id=events_of)
    return facts, records, more_events


def _step(facts: models.TraceFacts, records: Records) -> Step:
    """Return the trace as the views expect it, even if it is not a step."""
    for step in steps_of(records):
        if step.trace_id == facts.trace_id:
            return step
    spans = [span for span in records.spans if span.trace_id == facts.trace_id]
    if not spans:
        raise NotFound(f"trace {facts.trace_id} has no span; rejected spans: {facts.rejected}")
    events = sorted(records.events, key=lambda event: event.time_ns)
    return step_of_trace(
        Tree(spans), events, run_id=facts.run_id, number=0, trace_id=facts.trace_id
    )


def _with_others(store: Store, step: Step) -> tuple[Step, bool]:
    """Return the step with `Step.others`, and whether some of them are omitted."""
    concurrent, omitted = store.concurrent_spans(step.trace_id)
    spans: defaultdict[str, list[Span]] = defaultdict(list)
    for span in concurrent:
        spans[span.trace_id].append(span)
    traces = TracesByTime({trace_id: Tree(of_trace) for trace_id, of_trace in spans.items()})
    others = traces.sharing(step.processes, step.start_ns, step.end_ns, without=step.trace_id)
    return replace(step, others=tuple(others)), omitted


def _incomplete(store: Store, facts: models.TraceFacts, step: Step) -> list[str]:
    reasons = list(step.incomplete)
    dropped = store.dropped_spans()
    lost = {label: dropped.get(process.identity) for process, label in step.labels.items()}
    reasons += [
        f"{process} dropped {count} {'span' if count == 1 else 'spans'} since its start, possibly "
        "of this trace"
        for process, count in sorted(lost.items())
        if count
    ]
    if facts.rejected:
        reasons.append(f"rejected spans, invalid or beyond the limits: {facts.rejected}")
    return reasons


def _rows(
    step: Step, path: Iterable[Segment], shown: Collection[str], details_of: str | None
) -> list[models.SpanRow]:
    """Return the spans with these ids, parents first, siblings by start.

    ``details_of`` is that of `Selection`.
    """
    critical = {segment.span.span_id for segment in path}
    rows: list[models.SpanRow] = []
    stack = [(span, 0) for span in reversed(step.tree.tops)]
    while stack:
        span, depth = stack.pop()
        stack += [(child, depth + 1) for child in reversed(step.children(span.span_id))]
        if span.span_id not in shown:
            continue
        has_details = details_of in (None, span.span_id)
        links = span.links if has_details else ()
        events = span.events[:MAX_SPAN_EVENTS] if has_details else ()
        rows.append(
            models.SpanRow.of(
                span,
                depth=depth,
                service=span.process.service,
                process=step.labels[span.process],
                start_s=(span.start_ns - step.start_ns) / 1e9,
                seconds=span.reported_seconds,
                bucket=attributes.bucket(span),
                attributes=dict(span.attributes) if has_details else {},
                links=[models.SpanLink.of(link) for link in links],
                events=[
                    models.SpanEvent.of(
                        event,
                        time_s=(event.time_ns - step.start_ns) / 1e9 if event.time_ns else None,
                        attributes=dict(event.attributes),
                    )
                    for event in events
                ],
                events_omitted=len(span.events) - len(events),
                critical=span.span_id in critical,
            )
        )
    return rows


def _shown(step: Step, chosen: Selection) -> set[str]:
    """Return the ids of the spans that `trace` returns."""
    max_rows, span_id, prefer = chosen.max_rows, chosen.span_id, chosen.prefer
    if len(step.spans) <= max_rows:
        return {span.span_id for span in step.spans}
    preferred = _longest(filter(prefer, step.spans), 2 * max_rows // 3) if prefer else []
    shown = {span.span_id for span in preferred}
    rest = [span for span in step.spans if span.span_id not in shown]
    shown.update(span.span_id for span in _longest(rest, max_rows - len(shown)))
    if span_id is not None:
        shown.update(span.span_id for span in step.tree.ancestry(span_id)[:2])
        shown.update(span.span_id for span in step.children(span_id)[:max_rows])
    return shown


def _longest(spans: Iterable[Span], number: int) -> list[Span]:
    return heapq.nlargest(number, spans, key=lambda span: span.reported_seconds or 0.0)


def _segment(step: Step, segment: Segment) -> models.Segment:
    return models.Segment(
        span_id=segment.span.span_id,
        name=segment.span.name,
        process=step.labels[segment.span.process],
        start_s=(segment.start_ns - step.start_ns) / 1e9,
        seconds=segment.seconds,
    )


def _since(step: Step, start_ns: int, end_ns: int) -> tuple[float, float]:
    return (start_ns - step.start_ns) / 1e9, (end_ns - step.start_ns) / 1e9


def _event(step: Step, event: Event) -> models.TraceEvent:
    samples = attributes.count(event.attributes, "dataplane.samples")
    return models.TraceEvent(
        name=event.name,
        time_s=(event.time_ns - step.start_ns) / 1e9,
        process=step.labels.get(event.process, event.process.label),
        span_id=event.span_id,
        run_id=attributes.text(event.attributes, "rl.run_id"),
        partition=attributes.text(event.attributes, "dataplane.partition"),
        task=attributes.text(event.attributes, "dataplane.task"),
        samples=samples or len(event.sample_ids),
        examples=list(event.sample_ids[:_EXAMPLES]),
    )


def _external(settings: Settings, trace_id: str) -> list[models.ExternalLink]:
    links = []
    for name, base, path in (
        ("Jaeger", settings.jaeger_url, "/trace/"),
        ("Tempo", settings.tempo_url, "/api/traces/"),
    ):
        if base is None:
            continue
        if "{trace_id}" in base:
            url = base.replace("{trace_id}", quote(trace_id))
        else:
            url = base.rstrip("/") + path + quote(trace_id)
        links.append(models.ExternalLink(name=name, url=url))
    return links


_Place = tuple[str, ...]
_Sums = dict[_Place, tuple[int, float]]


def _places(step: Step) -> _Sums:
    """Return count and seconds of the spans at each place.

    A place is the path of span names from the root.
    """
    sums: defaultdict[_Place, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    stack: list[tuple[Span, _Place]] = [(span, ()) for span in reversed(step.tree.tops)]
    while stack:
        span, above = stack.pop()
        # Truncate deep places: their length grows with the depth, and few spans share a deep place.
        place = (*above, span.name)[:_MAX_DEPTH]
        count, seconds = sums[place]
        sums[place] = count + 1, seconds + span.seconds
        stack += [(child, place) for child in reversed(step.children(span.span_id))]
    return sums


def _on_path(step: Step) -> _Sums:
    sums: defaultdict[_Place, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for segment in critical_path(step):
        count, seconds = sums[(segment.span.name,)]
        sums[(segment.span.name,)] = count + 1, seconds + segment.seconds
    return sums


def _compared(a: _Sums, b: _Sums) -> list[models.ComparedRow]:
    """Return the rows, parents first; rows only in B follow their siblings of A."""
    children: defaultdict[_Place, dict[_Place, None]] = defaultdict(dict)
    for place in [*a, *b]:
        children[place[:-1]].setdefault(place)
    rows = []
    stack = list(reversed(children[()]))
    while stack:
        place = stack.pop()
        a_count, a_s = a.get(place, (0, 0.0))
        b_count, b_s = b.get(place, (0, 0.0))
        rows.append(
            models.ComparedRow(
                name=place[-1],
                depth=len(place) - 1,
                a_count=a_count,
                b_count=b_count,
                a_s=a_s,
                b_s=b_s,
                difference_s=b_s - a_s,
            )
        )
        stack += reversed(children.get(place, {}))
    return rows
