"""Queries for traces with their log records, and for the steps of runs."""

from __future__ import annotations

from itertools import accumulate, islice
from typing import Any  # Any: rows

from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from sqlalchemy import Select, exists, func, or_, select, union_all

from dataplane_admin.models import TraceFacts
from dataplane_admin.store.apply_logs import is_full
from dataplane_admin.store.chunk import digests_in
from dataplane_admin.store.compressed import expand_all
from dataplane_admin.store.read_runs import IS_RETAINED, NEWEST_RUN
from dataplane_admin.store.reader import EVENT_COLUMNS, Reader, trace_bytes
from dataplane_admin.store.rows import StepRow, TraceCursor, TraceFilter
from dataplane_admin.store.tables import EventModel, LinkModel, LogModel, RunModel, TraceModel
from dataplane_admin.store.texts import one_line, storable, texts_in
from observability.records import Records, Span
from observability.views.steps import ROOT

# Columns that `TraceFacts` has, under the names of its fields.
_COLUMNS = (
    *(column for column in TraceModel.__table__.columns if column.name in TraceFacts.model_fields),
    TraceModel.updated_ns.label("received_ns"),
)
_ENDED = (TraceModel.step.is_not(None), TraceModel.has_root)
# Number of newest traces of a run that are searched for steps.
_MAX_LATEST = 1000
_AT_ONCE = 50
_MAX_NEAR = 500
"""Number of traces before and after a trace, by arrival, that may overlap with it."""
_MAX_CONCURRENT_SPANS = 4_000


def read_run_with_steps(reader: Reader) -> str | None:
    """Return the newest run with a finished step."""
    finished = exists().where(TraceModel.run_id == RunModel.run_id, *_ENDED)
    query = select(RunModel.run_id).where(finished).order_by(*NEWEST_RUN).limit(1)
    with reader.connect() as connection:
        return connection.scalar(query)


def read_run_steps(reader: Reader, run_id: str, limit: int) -> tuple[list[StepRow], bool]:
    """Return the newest finished steps of a run in order of arrival, and whether older ones exist.

    Of a repeated step, the last repetition counts; steps that the last resume discards do not. If
    the run has traces named `ROOT`, only these are steps: others, such as a validation, may have a
    step's number too.
    """
    ended = (TraceModel.run_id == storable(run_id), *_ENDED)
    named = exists().where(*ended, TraceModel.name == ROOT)
    place = func.row_number().over(partition_by=TraceModel.step, order_by=TraceModel.arrival.desc())
    finished = (
        select(
            TraceModel.step,
            TraceModel.trace_id,
            TraceModel.start_ns,
            TraceModel.end_ns,
            TraceModel.errors,
            TraceModel.arrival,
            place.label("place"),
        )
        .outerjoin(RunModel, RunModel.run_id == TraceModel.run_id)
        .where(*ended, IS_RETAINED, or_(TraceModel.name == ROOT, ~named))
        .subquery()
    )
    query = (
        select(*finished.c)
        .where(finished.c.place == 1)
        .order_by(finished.c.arrival.desc())
        .limit(limit + 1)
    )
    rows = [
        StepRow(step, trace_id.hex(), start_ns, max(0, end_ns - start_ns) / 1e9, errors)
        for step, trace_id, start_ns, end_ns, errors, *_ in reader.rows(query)
    ]
    return rows[:limit][::-1], len(rows) > limit


def read_traces(
    reader: Reader,
    chosen: TraceFilter = TraceFilter(),  # noqa: B008  # frozen
    after: TraceCursor | None = None,
    limit: int = 50,
) -> tuple[list[TraceFacts], TraceCursor | None]:
    """Return a page of traces, newest first, and the cursor of the next page."""
    query = _filtered(select(*_COLUMNS, TraceModel.arrival), chosen)
    if after is not None:
        query = query.where(TraceModel.arrival < after[0])
    query = query.order_by(TraceModel.arrival.desc())
    rows, last = reader.page(query, limit, lambda row: (row.arrival,))
    return [_facts(row) for row in rows], last


def read_steps(reader: Reader, run_id: str | None, limit: int = 10) -> list[TraceFacts]:
    """Return the newest step traces among the newest 1,000 traces of a run, or of all runs.

    As in `read_run_steps`, other finished traces are no steps if the run has traces named `ROOT`.
    """
    traces = select(*_COLUMNS)
    if run_id is not None:
        traces = traces.where(TraceModel.run_id == storable(run_id))
    newest = (
        traces.order_by(TraceModel.arrival.desc())
        .limit(_MAX_LATEST)
        .execution_options(yield_per=_AT_ONCE)
    )
    with reader.connect() as connection, connection.execute(newest) as rows:
        # More than ``limit``, so that validations cannot fill the list.
        chosen = list(islice((row for row in rows if row.step is not None), 2 * limit))
    named = {row.run_id for row in chosen if row.has_root and row.name == ROOT}
    steps = (
        row for row in chosen if row.name == ROOT or not row.has_root or row.run_id not in named
    )
    return [_facts(row) for row in islice(steps, limit)]


def read_trace(reader: Reader, trace_id: str) -> TraceFacts | None:
    """Return one trace, None if it is not stored or the id is invalid."""
    wanted = trace_bytes(trace_id)
    if wanted is None:
        return None
    rows = reader.rows(select(*_COLUMNS).where(TraceModel.trace_id == wanted))
    return _facts(rows[0]) if rows else None


def read_trace_records(
    reader: Reader, trace_id: str, *, max_events: int = 0, span_id: str | None = None
) -> tuple[Records, int]:
    """Return the spans of a trace with its first events, and how many further events it has.

    ``span_id`` is the only span whose events to return and count; None for all spans.
    """
    wanted = trace_bytes(trace_id)
    if wanted is None:
        return Records(), 0
    chosen = [EventModel.trace_id == wanted]
    if span_id is not None:
        chosen.append(EventModel.span_id == _span_bytes(span_id))
    first = (
        select(*EVENT_COLUMNS)
        .where(*chosen)
        .order_by(EventModel.time_ns, EventModel.id)
        .limit(max_events)
    )
    with reader.connect() as connection:
        spans = reader.spans(connection, [wanted])
        events = reader.events(connection, first) if max_events else []
        total = len(events)
        if max_events and len(events) == max_events:
            total = connection.scalars(select(func.count(EventModel.id)).where(*chosen)).one()
        return Records(spans, events), total - len(events)


def read_concurrent_spans(reader: Reader, trace_id: str) -> tuple[list[Span], bool]:
    """Return the spans of the traces that overlap with a trace, and whether some are omitted.

    Only traces of the same run that share a process with the trace count, and only those whose
    arrival is near the trace's.
    """
    table, arrival = TraceModel, TraceModel.arrival
    columns = (table.run_id, table.start_ns, table.end_ns, table.process_digests, arrival)
    with reader.connect() as connection:
        trace = connection.execute(
            select(*columns).where(table.trace_id == trace_bytes(trace_id))
        ).first()
        if trace is None or not trace.run_id:
            return [], False
        of_run = select(table.trace_id, table.start_ns, table.end_ns).where(
            table.run_id == trace.run_id
        )
        overlapping = []
        for near in (
            of_run.where(arrival < trace.arrival).order_by(arrival.desc()),
            of_run.where(arrival > trace.arrival).order_by(arrival),
        ):
            each = near.limit(_MAX_NEAR).subquery().c
            times = (each.start_ns < trace.end_ns, each.end_ns > trace.start_ns)
            overlapping.append(select(each.trace_id).where(*times))
        # Digests can be large, so only those of overlapping traces are read.
        rows = connection.execute(
            select(table.trace_id, table.spans, table.process_digests, arrival).where(
                table.trace_id.in_(union_all(*overlapping))
            )
        )
        processes = digests_in(trace.process_digests)
        others = [row for row in rows if processes & digests_in(row.process_digests)]
        others.sort(key=lambda row: (row.spans, abs(row.arrival - trace.arrival)))
        totals = accumulate(row.spans for row in others)
        chosen = [
            row.trace_id
            for row, total in zip(others, totals, strict=True)
            if total <= _MAX_CONCURRENT_SPANS
        ]
        return reader.spans(connection, chosen), len(chosen) < len(others)


def _span_bytes(span_id: str) -> bytes:
    """Return the bytes of a span id, empty for an invalid one."""
    try:
        return bytes.fromhex(span_id)
    except ValueError:
        return b""


def read_linked(reader: Reader, trace_id: str) -> tuple[list[str], list[str]]:
    """Return the traces that a trace links to, and those that link to it."""
    wanted = trace_bytes(trace_id)
    if wanted is None:
        return [], []
    to = select(LinkModel.linked_id).where(LinkModel.trace_id == wanted)
    back = select(LinkModel.trace_id).where(LinkModel.linked_id == wanted)
    with reader.connect() as connection:
        linked = [
            sorted(trace_id_bytes.hex() for trace_id_bytes in connection.scalars(query))
            for query in (to, back)
        ]
    return linked[0], linked[1]


def read_logs(reader: Reader, trace_id: str) -> tuple[LogsData, bool]:
    """Return the log records of a trace, and whether the limit of stored ones is reached."""
    logs = LogsData()
    wanted = trace_bytes(trace_id)
    if wanted is None:
        return logs, False
    query = select(LogModel.record).where(LogModel.trace_id == wanted).order_by(LogModel.id)
    records = [row.record for row in reader.rows(query)]
    logs.ParseFromString(expand_all(records))
    return logs, is_full(len(records), sum(map(len, records)))


def _filtered(query: Select[*tuple[Any, ...]], chosen: TraceFilter) -> Select[*tuple[Any, ...]]:
    duration_ns = TraceModel.end_ns - TraceModel.start_ns
    if chosen.run_id is not None:
        query = query.where(TraceModel.run_id == storable(chosen.run_id))
    if chosen.step is not None:
        query = query.where(TraceModel.step == chosen.step)
    if chosen.min_s is not None:
        query = query.where(duration_ns >= int(chosen.min_s * 1e9))
    if chosen.max_s is not None:
        query = query.where(duration_ns <= int(chosen.max_s * 1e9))
    if chosen.error is not None:
        query = query.where(TraceModel.errors > 0 if chosen.error else TraceModel.errors == 0)
    if chosen.name:
        query = query.where(TraceModel.name.icontains(storable(chosen.name), autoescape=True))
    if chosen.service:
        line = f"\n{one_line(chosen.service)}\n"
        query = query.where(TraceModel.service_names.icontains(line, autoescape=True))
    return query


def _facts(row: Any) -> TraceFacts:
    # A time of 0 was not reported.
    return TraceFacts.of(
        row,
        trace_id=row.trace_id.hex(),
        start_ns=row.start_ns or None,
        end_ns=row.end_ns or None,
        service_names=tuple(texts_in(row.service_names)),
        seconds=max(0, row.end_ns - row.start_ns) / 1e9,
    )
