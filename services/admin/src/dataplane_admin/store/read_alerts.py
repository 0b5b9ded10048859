"""Queries for alerts, and for what their rules compare."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection, func, select

from dataplane_admin.models import Alert
from dataplane_admin.store.read_runs import NEWEST_RUN
from dataplane_admin.store.reader import Reader
from dataplane_admin.store.tables import (
    AlertModel,
    CurveModel,
    EventModel,
    NotificationModel,
    PlaceModel,
    RunModel,
    TraceModel,
)
from dataplane_admin.store.texts import storable

MAX_RUNS = 100
"""Maximum number of unfinished runs."""
MAX_RAISED = 1_000
"""Maximum number of raised alerts."""
_STEP_NS = (
    select(TraceModel.updated_ns)
    .where(
        TraceModel.run_id == RunModel.run_id,
        TraceModel.step.is_not(None),
        TraceModel.has_root,
    )
    .order_by(TraceModel.arrival.desc())
    .limit(1)
    .scalar_subquery()
)


@dataclass(frozen=True)
class UnfinishedRun:
    """A run without a reported end; times are nanoseconds since 1970, at which records arrived.

    Attributes:
        seen_ns: time of its last record.
        start_ns: time of its start or last resume. Without either, 0 if a step is stored, else the
            time of its first record by the sender's clock.
        step_ns: time of its last finished step, or of a newer point of a curve; 0 without either.
        reports_end: whether it reported its start, and so reports its end.
        curves: last step and time of the last change of its metrics, by name.
        last: values of its metrics at their last step, NaN if not finite. Keys are names, with any
            attributes in braces.
    """

    run_id: str
    seen_ns: int
    start_ns: int
    step_ns: int
    reports_end: bool
    curves: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)


def read_unfinished_runs(
    reader: Reader, *, since_ns: int, names: tuple[str, ...]
) -> list[UnfinishedRun]:
    """Return at most 100 unfinished runs seen since a time, the most recently seen first.

    ``names`` are the metrics to read.
    """
    query = (
        select(
            RunModel.run_id,
            RunModel.updated_ns,
            RunModel.first_ns,
            func.coalesce(_STEP_NS, 0),
            RunModel.state,
        )
        .where(RunModel.state.in_(("", "running")), RunModel.updated_ns >= since_ns)
        .order_by(*NEWEST_RUN)
        .limit(MAX_RUNS)
    )
    with reader.connect() as connection:
        rows = connection.execute(query).all()
        ids = [row[0] for row in rows]
        of_runs = CurveModel.run_id.in_(ids)
        started = _started(connection, ids)
        newest_points = connection.execute(
            select(CurveModel.run_id, func.max(CurveModel.updated_ns))
            .where(of_runs)
            .group_by(CurveModel.run_id)
        ).all()
        curves = connection.execute(
            select(
                CurveModel.run_id,
                CurveModel.name,
                CurveModel.attributes,
                CurveModel.last_step,
                CurveModel.updated_ns,
                CurveModel.last_value,
            )
            .where(of_runs, CurveModel.name.in_([storable(name) for name in names]))
            .order_by(CurveModel.id)
        ).all()
    newest = {run_id: time_ns for run_id, time_ns in newest_points}  # noqa: C416  # rows
    changed: dict[str, dict[str, tuple[int, int]]] = {run_id: {} for run_id in ids}
    last: dict[str, dict[str, float]] = {run_id: {} for run_id in ids}
    for run_id, name, attributes, last_step, updated_ns, value in curves:
        labels = json.loads(attributes)
        key = name if not labels else storable(f"{name}{{{', '.join(map(str, labels.values()))}}}")
        if key in last[run_id]:  # equal values of other attributes
            named = ", ".join(f"{label}={each}" for label, each in labels.items())
            key = storable(f"{name}{{{named}}}")
        changed[run_id][key] = last_step, updated_ns
        last[run_id][key] = math.nan if value is None else value
    unfinished = []
    for run_id, seen_ns, first_ns, trace_ns, state in rows:
        step_ns = max(trace_ns, newest.get(run_id, 0))
        unfinished.append(
            UnfinishedRun(
                run_id=run_id,
                seen_ns=seen_ns,
                start_ns=started.get(run_id, 0 if step_ns else first_ns),
                step_ns=step_ns,
                reports_end=state == "running",
                curves=changed[run_id],
                last=last[run_id],
            )
        )
    return unfinished


def _started(connection: Connection, run_ids: Sequence[str]) -> dict[str, int]:
    """Return when the last start or resume of each run arrived; omit runs without one."""
    arrivals = (
        select(PlaceModel.run_id, func.max(EventModel.received_ns).label("time_ns"))
        .join(EventModel, EventModel.place_id == PlaceModel.id)
        .where(
            PlaceModel.run_id.in_(run_ids),
            PlaceModel.partition == "",
            EventModel.name == "run_started",
        )
        .group_by(PlaceModel.run_id)
    )
    return {row.run_id: row.time_ns for row in connection.execute(arrivals)}


def read_failed_runs(reader: Reader, *, since_ns: int) -> dict[str, str]:
    """Return the errors of at most 100 failed runs seen since a time, by run."""
    query = (
        select(RunModel.run_id, RunModel.error)
        .where(RunModel.state == "failed", RunModel.updated_ns >= since_ns)
        .order_by(*NEWEST_RUN)
        .limit(MAX_RUNS)
    )
    return {row.run_id: row.error for row in reader.rows(query)}


def read_raised_alerts(reader: Reader) -> list[Alert]:
    """Return the raised alerts, the most severe first, then the newest."""
    query = (
        select(AlertModel.__table__)
        .where(AlertModel.cleared_ns.is_(None))
        .order_by(AlertModel.severity == "warning", AlertModel.raised_ns.desc(), AlertModel.id)
    )
    return [Alert.of(row) for row in reader.rows(query.limit(MAX_RAISED))]


def read_cleared_alerts(reader: Reader, limit: int) -> list[Alert]:
    """Return the latest cleared alerts, latest first."""
    query = (
        select(AlertModel.__table__)
        .where(AlertModel.cleared_ns.is_not(None))
        .order_by(AlertModel.cleared_ns.desc(), AlertModel.id.desc())
    )
    return [Alert.of(row) for row in reader.rows(query.limit(limit))]


def read_pending(reader: Reader) -> dict[str, tuple[int, str, int]]:
    """Return, by webhook, the number of notifications, and error and next attempt of the oldest."""
    oldest = (
        select(func.min(NotificationModel.id), func.count())
        .group_by(NotificationModel.webhook)
        .subquery()
    )
    first, count = oldest.c
    query = select(
        NotificationModel.webhook, count, NotificationModel.error, NotificationModel.next_ns
    ).join(oldest, NotificationModel.id == first)
    return {
        webhook: (number, error, next_ns) for webhook, number, error, next_ns in reader.rows(query)
    }
