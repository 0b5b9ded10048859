"""Questions about runs and traces."""

from __future__ import annotations

from itertools import islice
from typing import Any  # Any: rows

from sqlalchemy import Select, exists, func, select

from dataplane_admin.store.models import EventModel, LinkModel, RunModel, TraceModel
from dataplane_admin.store.reader import EVENT_COLUMNS, Reader, trace_bytes
from dataplane_admin.store.rows import Cursor, RunRow, StepRow, TraceFilter, TraceRow
from dataplane_admin.store.texts import storable
from observability.records import Records
from observability.views.steps import ROOT

_COLUMNS = (
    TraceModel.trace_id,
    TraceModel.run_id,
    TraceModel.step,
    TraceModel.name,
    TraceModel.start_ns,
    TraceModel.end_ns,
    TraceModel.has_root,
    TraceModel.spans,
    TraceModel.errors,
    TraceModel.processes,
    TraceModel.rejected,
    TraceModel.updated_ns,
)
_ENDED = (TraceModel.step.is_not(None), TraceModel.has_root)
# By the clock of this service: those of senders may be a day ahead.
_NEWEST_RUN = (RunModel.updated_ns.desc(), RunModel.last_ns.desc(), RunModel.run_id)
_MOST_RUNS = 1000
# Traces of a run among which its newest steps are looked for.
_MOST_BESIDE = 1000
_AT_ONCE = 50


def read_runs(reader: Reader) -> list[RunRow]:
    """Of `Store.runs`."""
    steps = (
        select(func.count(TraceModel.step.distinct()))
        .where(TraceModel.run_id == RunModel.run_id)
        .scalar_subquery()
    )
    query = (
        select(RunModel.run_id, RunModel.first_ns, RunModel.last_ns, steps)
        .order_by(*_NEWEST_RUN)
        .limit(_MOST_RUNS)
    )
    with reader.connect() as connection:
        return [RunRow(*row) for row in connection.execute(query)]


def read_run_with_steps(reader: Reader) -> str | None:
    """Of `Store.run_with_steps`."""
    ended = exists().where(TraceModel.run_id == RunModel.run_id, *_ENDED)
    query = select(RunModel.run_id).where(ended).order_by(*_NEWEST_RUN).limit(1)
    with reader.connect() as connection:
        return connection.scalar(query)


def read_run_steps(reader: Reader, run_id: str, limit: int) -> tuple[list[StepRow], bool]:
    """Of `Store.run_steps`."""
    # Beside its step a trace of its own may tell the number: that of a validation.
    of_one_step = (
        (TraceModel.name == ROOT).desc(),
        TraceModel.arrival.desc(),
    )
    place = func.row_number().over(partition_by=TraceModel.step, order_by=of_one_step)
    ended = (
        select(
            TraceModel.step,
            TraceModel.trace_id,
            TraceModel.start_ns,
            TraceModel.end_ns,
            TraceModel.errors,
            TraceModel.arrival,
            place.label("place"),
        )
        .where(TraceModel.run_id == storable(run_id), *_ENDED)
        .subquery()
    )
    query = (
        select(*ended.c).where(ended.c.place == 1).order_by(ended.c.arrival.desc()).limit(limit + 1)
    )
    with reader.connect() as connection:
        rows = [
            StepRow(step, trace_id.hex(), start_ns, max(0, end_ns - start_ns) / 1e9, errors)
            for step, trace_id, start_ns, end_ns, errors, *_ in connection.execute(query)
        ]
    return rows[:limit][::-1], len(rows) > limit


def read_traces(
    reader: Reader, chosen: TraceFilter, before: Cursor | None, limit: int
) -> tuple[list[TraceRow], Cursor | None]:
    """Of `Store.traces`."""
    query = _filtered(select(*_COLUMNS, TraceModel.arrival), chosen)
    if before is not None:
        query = query.where(TraceModel.arrival < before.arrival)
    query = query.order_by(TraceModel.arrival.desc())
    with reader.connect() as connection:
        found = connection.execute(query.limit(limit + 1)).all()
    rows = [_row(row[:-1]) for row in found[:limit]]
    more = len(found) > limit and bool(rows)
    return rows, Cursor(found[limit - 1].arrival) if more else None


def read_steps(reader: Reader, run_id: str, limit: int) -> list[TraceRow]:
    """Of `Store.steps`."""
    newest = (
        select(*_COLUMNS)
        .where(TraceModel.run_id == storable(run_id))
        .order_by(TraceModel.arrival.desc())
        .limit(_MOST_BESIDE)
        .execution_options(yield_per=_AT_ONCE)
    )
    with reader.connect() as connection, connection.execute(newest) as rows:
        return [_row(row) for row in islice((row for row in rows if row.step is not None), limit)]


def read_trace(reader: Reader, trace_id: str) -> TraceRow | None:
    """Of `Store.trace`."""
    wanted = trace_bytes(trace_id)
    if wanted is None:
        return None
    with reader.connect() as connection:
        row = connection.execute(select(*_COLUMNS).where(TraceModel.trace_id == wanted)).first()
    return None if row is None else _row(row)


def read_trace_records(reader: Reader, trace_id: str, *, events: bool) -> Records:
    """Of `Store.trace_records`."""
    wanted = trace_bytes(trace_id)
    if wanted is None:
        return Records()
    named = select(*EVENT_COLUMNS).where(EventModel.trace_id == wanted).order_by(EventModel.id)
    with reader.connect() as connection:
        spans = reader.spans(connection, [wanted])
        return Records(spans, reader.events(connection, named) if events else [])


def read_linked(reader: Reader, trace_id: str) -> tuple[list[str], list[str]]:
    """Of `Store.linked`."""
    wanted = trace_bytes(trace_id)
    if wanted is None:
        return [], []
    to = select(LinkModel.linked_id).where(LinkModel.trace_id == wanted)
    back = select(LinkModel.trace_id).where(LinkModel.linked_id == wanted)
    with reader.connect() as connection:
        found = [sorted(one.hex() for one in connection.scalars(query)) for query in (to, back)]
    return found[0], found[1]


def _filtered(query: Select[*tuple[Any, ...]], chosen: TraceFilter) -> Select[*tuple[Any, ...]]:
    took_ns = TraceModel.end_ns - TraceModel.start_ns
    if chosen.run_id is not None:
        query = query.where(TraceModel.run_id == storable(chosen.run_id))
    if chosen.step is not None:
        query = query.where(TraceModel.step == chosen.step)
    if chosen.min_s is not None:
        query = query.where(took_ns >= int(chosen.min_s * 1e9))
    if chosen.max_s is not None:
        query = query.where(took_ns <= int(chosen.max_s * 1e9))
    if chosen.error is not None:
        query = query.where(TraceModel.errors > 0 if chosen.error else TraceModel.errors == 0)
    if chosen.name:
        query = query.where(TraceModel.name.icontains(storable(chosen.name), autoescape=True))
    return query


def _row(row: Any) -> TraceRow:
    return TraceRow(row[0].hex(), *row[1:])
