"""One trace put together: waterfall, critical path, bubbles, and two of them side by side."""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any  # Any: attribute values
from urllib.parse import quote

from dataplane_admin.answers import models
from dataplane_admin.answers.errors import NotFound, Refused
from dataplane_admin.settings import Settings
from dataplane_admin.store import StalenessRow, Store, TraceRow
from observability.records import Event, Process, Records, Span
from observability.views import (
    Segment,
    Step,
    bucket_seconds,
    bytes_by_stage,
    critical_path,
    process_times,
    step_of_trace,
    steps_of,
)
from observability.views.tree import Tree

MOST_ROWS = 5_000
MOST_EVENTS = 500
MOST_COMPARED = 500
MAX_SPAN_EVENTS = 32
_DROPPED = "dataplane.telemetry.dropped"
_EXAMPLES = 5
_MOST_LINKS = 1_000


def facts(row: TraceRow) -> dict[str, Any]:
    """What `models.TraceFacts` shows of a row."""
    return {
        "trace_id": row.trace_id,
        "run_id": row.run_id,
        "step": row.step,
        "name": row.name,
        "start_ns": row.start_ns or None,
        "end_ns": row.end_ns or None,
        "received_ns": row.updated_ns,
        "seconds": row.seconds,
        "has_root": row.has_root,
        "spans": row.spans,
        "errors": row.errors,
        "processes": row.processes,
        "rejected": row.rejected,
    }


def _facts(row: TraceRow, step: Step) -> dict[str, Any]:
    """`facts`, with the times of one clock where clocks disagree."""
    found = facts(row)
    if step.clocks:
        start_ns = min(span.start_ns for span in step.spans)
        end_ns = max(span.end_ns for span in step.spans)
        found |= {"start_ns": start_ns, "end_ns": end_ns, "seconds": (end_ns - start_ns) / 1e9}
    return found


def canonical_trace_id(given: str) -> str:
    """Return a trace id as it is stored: people copy it in any case, with dashes or spaces."""
    return "".join(given.split()).replace("-", "").lower()


def trace(store: Store, settings: Settings, trace_id: str) -> models.Trace:
    """The whole trace. Raises NotFound, Refused."""
    trace_id = canonical_trace_id(trace_id)
    row, records = _read(store, trace_id)
    step = _step(row, records)
    path = critical_path(step)
    out, into = store.linked(trace_id)
    rows = _rows(step, path)
    kept = _longest(rows)
    events = [_event(step, event) for event in step.events[:MOST_EVENTS]]
    return models.Trace(
        **_facts(row, step),
        incomplete=_incomplete(store, row, step),
        clocks=step.clock_notes,
        rows=kept,
        rows_left_out=len(rows) - len(kept),
        critical_path=[_segment(step, one) for one in path[:MOST_ROWS]],
        process_times=[
            models.ProcessTime(
                process=one.label,
                busy=[_since(step, *interval) for interval in one.busy[:MOST_ROWS]],
                seconds=dict(one.seconds),
                busy_s=one.busy_seconds,
                bubble_s=one.bubble_seconds,
                resource=dict(one.process.resource),
            )
            for one in process_times(step)
        ],
        buckets=bucket_seconds(step),
        links_out=out[:_MOST_LINKS],
        links_in=into[:_MOST_LINKS],
        events=events,
        events_left_out=len(step.events) - len(events),
        stages=[
            models.StageBytes(stage=one.stage, put=one.put, get=one.get)
            for one in bytes_by_stage(step)
        ],
        staleness=_staleness(store.trace_staleness(trace_id)),
        external=_external(settings, trace_id),
    )


def _staleness(row: StalenessRow) -> models.TraceStaleness | None:
    samples = sum(row.counts.values())
    if not samples and not row.unknown:
        return None
    return models.TraceStaleness(
        least=min(row.counts, default=None),
        mean=sum(age * count for age, count in row.counts.items()) / samples if samples else None,
        most=max(row.counts, default=None),
        samples=samples,
        unknown=row.unknown,
    )


def compare(store: Store, a: str, b: str) -> models.TraceComparison:
    """Two traces side by side. Raises NotFound, Refused."""
    a, b = canonical_trace_id(a), canonical_trace_id(b)
    row_a, records_a = _read(store, a, events=False)
    row_b, records_b = _read(store, b, events=False)
    step_a, step_b = _step(row_a, records_a), _step(row_b, records_b)
    busy_a, busy_b = _busy(step_a), _busy(step_b)
    rows = _compared(_places(step_a), _places(step_b))
    times_a, times_b = bucket_seconds(step_a), bucket_seconds(step_b)
    critical = _compared(_on_path(step_a), _on_path(step_b))
    critical.sort(key=lambda one: -abs(one.difference_s))
    notes = [
        f"{name}: {reason}"
        for name, row, step in (("A", row_a, step_a), ("B", row_b, step_b))
        for reason in [*_incomplete(store, row, step), *step.clock_notes]
    ]
    return models.TraceComparison(
        a=models.TraceFacts(**_facts(row_a, step_a)),
        b=models.TraceFacts(**_facts(row_b, step_b)),
        rows=rows[:MOST_COMPARED],
        rows_left_out=max(0, len(rows) - MOST_COMPARED),
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
        critical=critical[:MOST_COMPARED],
        notes=notes,
    )


def _busy(step: Step) -> dict[str, float]:
    return {
        one.label: one.busy_seconds for one in process_times(step) if one.busy_seconds is not None
    }


def _read(store: Store, trace_id: str, *, events: bool = True) -> tuple[TraceRow, Records]:
    if len(trace_id) != 32 or not set(trace_id) <= set("0123456789abcdef"):
        raise Refused(
            f"trace id: found {len(trace_id)} characters; expected 32 hexadecimal digits in lower "
            "case"
        )
    row = store.trace(trace_id)
    if row is None:
        raise NotFound(f"trace {trace_id} is not kept: it never arrived, or is too old")
    return row, store.trace_records(trace_id, events=events)


def _step(row: TraceRow, records: Records) -> Step:
    """The trace as the views take it, whether it tells of a step or not."""
    for step in steps_of(records):
        if step.trace_id == row.trace_id:
            return step
    spans = [span for span in records.spans if span.trace_id == row.trace_id]
    if not spans:
        raise NotFound(f"trace {row.trace_id} has no span: {row.rejected} were refused by limits")
    events = sorted(records.events, key=lambda event: event.time_ns)
    return step_of_trace(Tree(spans), events, run_id=row.run_id, number=0, trace_id=row.trace_id)


def _incomplete(store: Store, row: TraceRow, step: Step) -> list[str]:
    reasons = list(step.incomplete)
    labels = {process.identity: label for process, label in step.labels.items()}
    dropped: Counter[str] = Counter()
    for series in store.series(_DROPPED):
        is_here = series.process_id in labels
        if is_here and series.attributes.get("dataplane.signal") == "spans":
            dropped[labels[series.process_id]] += int(series.value or 0)
    reasons += [
        f"{process} lost {count} spans since it began, perhaps some of these"
        for process, count in sorted(dropped.items())
        if count
    ]
    if row.rejected:
        reasons.append(f"{row.rejected} spans were refused by the service's limits")
    return reasons


def _rows(step: Step, path: Iterable[Segment]) -> list[models.SpanRow]:
    """Every span, parents first, siblings by start."""
    critical = {segment.span.span_id for segment in path}
    found: list[models.SpanRow] = []
    waiting = [(span, 0) for span in reversed(step.tree.tops)]
    while waiting:
        span, depth = waiting.pop()
        bucket = span.attributes.get("rl.bucket")
        found.append(
            models.SpanRow(
                span_id=span.span_id,
                parent_id=span.parent_id,
                depth=depth,
                name=span.name,
                kind=span.kind,
                process=step.labels[span.process],
                start_s=(span.start_ns - step.start_ns) / 1e9,
                seconds=span.reported_seconds,
                bucket=bucket if isinstance(bucket, str) and bucket else None,
                outcome=span.outcome,
                message=span.message,
                attributes=dict(span.attributes),
                links=[
                    models.SpanLink(trace_id=link.trace_id, span_id=link.span_id)
                    for link in span.links
                ],
                events=[
                    models.SpanEvent(
                        name=event.name,
                        time_s=(event.time_ns - step.start_ns) / 1e9 if event.time_ns else None,
                        attributes=dict(event.attributes),
                    )
                    for event in span.events[:MAX_SPAN_EVENTS]
                ],
                events_left_out=max(0, len(span.events) - MAX_SPAN_EVENTS),
                scope=span.scope,
                critical=span.span_id in critical,
            )
        )
        waiting += [(child, depth + 1) for child in reversed(step.children(span.span_id))]
    return found


def _longest(rows: Sequence[models.SpanRow]) -> list[models.SpanRow]:
    if len(rows) <= MOST_ROWS:
        return list(rows)
    places = heapq.nlargest(
        MOST_ROWS, range(len(rows)), key=lambda place: rows[place].seconds or 0.0
    )
    return [rows[place] for place in sorted(places)]


def _segment(step: Step, one: Segment) -> models.Segment:
    return models.Segment(
        span_id=one.span.span_id,
        name=one.span.name,
        process=step.labels[one.span.process],
        start_s=(one.start_ns - step.start_ns) / 1e9,
        seconds=one.seconds,
    )


def _since(step: Step, start_ns: int, end_ns: int) -> tuple[float, float]:
    return (start_ns - step.start_ns) / 1e9, (end_ns - step.start_ns) / 1e9


def _event(step: Step, event: Event) -> models.TraceEvent:
    told = event.attributes
    samples = told.get("dataplane.samples")
    return models.TraceEvent(
        name=event.name,
        time_s=(event.time_ns - step.start_ns) / 1e9,
        process=_label(step, event.process),
        span_id=event.span_id,
        partition=_text(told, "dataplane.partition"),
        task=_text(told, "dataplane.task"),
        samples=samples if isinstance(samples, int) and samples > 0 else len(event.sample_ids),
        examples=list(event.sample_ids[:_EXAMPLES]),
    )


def _label(step: Step, process: Process) -> str:
    return step.labels.get(process, process.label)


def _text(told: Mapping[str, Any], name: str) -> str:
    value = told.get(name)
    return value if isinstance(value, str) else ""


def _external(settings: Settings, trace_id: str) -> list[models.ExternalLink]:
    found = []
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
        found.append(models.ExternalLink(name=name, url=url))
    return found


_Place = tuple[str, ...]
_Sums = dict[_Place, tuple[int, float]]


def _places(step: Step) -> _Sums:
    """Count and seconds of the spans at each place: the names from the root down to them."""
    found: defaultdict[_Place, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    waiting: list[tuple[Span, _Place]] = [(span, ()) for span in reversed(step.tree.tops)]
    while waiting:
        span, above = waiting.pop()
        # Below this depth places are as good as alone, and each would be as long as the way to it.
        place = (*above, span.name)[:_DEEPEST]
        count, seconds = found[place]
        found[place] = count + 1, seconds + span.seconds
        waiting += [(child, place) for child in reversed(step.children(span.span_id))]
    return found


_DEEPEST = 30


def _on_path(step: Step) -> _Sums:
    found: defaultdict[_Place, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for segment in critical_path(step):
        count, seconds = found[(segment.span.name,)]
        found[(segment.span.name,)] = count + 1, seconds + segment.seconds
    return found


def _compared(a: _Sums, b: _Sums) -> list[models.ComparedRow]:
    """Parents first; what only B has comes behind its siblings of A."""
    children: defaultdict[_Place, dict[_Place, None]] = defaultdict(dict)
    for place in [*a, *b]:
        children[place[:-1]].setdefault(place)
    found = []
    waiting = list(reversed(children[()]))
    while waiting:
        place = waiting.pop()
        a_count, a_s = a.get(place, (0, 0.0))
        b_count, b_s = b.get(place, (0, 0.0))
        found.append(
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
        waiting += reversed(children.get(place, {}))
    return found
