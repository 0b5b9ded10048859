"""Queries for runs."""

from __future__ import annotations

import json
import time
from typing import Any  # Any: rows

from sqlalchemy import and_, case, func, or_, select

from dataplane_admin.models import Run, RunDetail
from dataplane_admin.store.read_curves import TIME
from dataplane_admin.store.reader import Reader
from dataplane_admin.store.tables import CurveModel, RunModel, TraceModel
from dataplane_admin.store.texts import storable
from observability.views.steps import ROOT

REWARD = "rl.reward.mean"

# Ordered by this service's clock: a sender's clock may be a day ahead.
NEWEST_RUN = (RunModel.updated_ns.desc(), RunModel.last_ns.desc(), RunModel.run_id)
MAX_RUNS = 1_000

_IS_REWARD = and_(CurveModel.name == REWARD, CurveModel.attributes == "{}")
_CURVES = (
    select(
        CurveModel.run_id,
        func.max(CurveModel.points).label("points"),
        func.max(case((_IS_REWARD, CurveModel.last_value))).label("reward"),
    )
    # A validation after the last step has a time, but is no step.
    .where(CurveModel.name != TIME)
    .group_by(CurveModel.run_id)
    .subquery()
)
IS_RETAINED = or_(
    RunModel.resumed_from.is_(None),
    TraceModel.step < RunModel.resumed_from,
    TraceModel.end_ns == 0,
    TraceModel.end_ns >= RunModel.started_ns,
)
"""Condition of the traces whose steps the last resume of their run does not discard.

A step that the resumed run repeats may begin before the start is reported, or join the trace of an
earlier attempt. So the end of the trace counts."""
# Counts steps as `read_run_steps` does, and unfinished ones as well.
_NAMED = case((TraceModel.name == ROOT, TraceModel.step))
_TRACED = (
    select(
        func.coalesce(
            func.nullif(func.count(_NAMED.distinct()), 0), func.count(TraceModel.step.distinct())
        )
    )
    .where(TraceModel.run_id == RunModel.run_id, IS_RETAINED)
    .scalar_subquery()
)
_RUNS = select(
    *(column for column in RunModel.__table__.columns if column.name != "config"),
    _TRACED.label("traced"),
    func.coalesce(_CURVES.c.points, 0).label("points"),
    _CURVES.c.reward,
).outerjoin(_CURVES, _CURVES.c.run_id == RunModel.run_id)


def read_runs(reader: Reader, *, silent_after_s: float = 300.0) -> list[Run]:
    """Return at most 1,000 runs, those with the newest records first.

    A run without a reported end is silent ``silent_after_s`` seconds after its last record.
    """
    rows = reader.rows(_RUNS.order_by(*NEWEST_RUN).limit(MAX_RUNS))
    return [Run.of(row, **_facts(row, silent_after_s)) for row in rows]


def read_last_seen(reader: Reader) -> int:
    """Return the time of the newest record of any run, nanoseconds since 1970; 0 without one."""
    [row] = reader.rows(select(func.max(RunModel.updated_ns).label("last_ns")))
    return row.last_ns or 0


def count_runs(reader: Reader) -> int:
    """Return the number of stored runs."""
    return int(reader.rows(select(func.count()).select_from(RunModel))[0][0])


def read_run(reader: Reader, run_id: str, *, silent_after_s: float = 300.0) -> RunDetail | None:
    """Return one run as `read_runs` does, with its configuration; None if it is not stored."""
    wanted = _RUNS.add_columns(RunModel.config).where(RunModel.run_id == storable(run_id))
    rows = reader.rows(wanted)
    if not rows:
        return None
    config = json.loads(rows[0].config)
    return RunDetail.of(rows[0], **_facts(rows[0], silent_after_s), config=config)


def _facts(row: Any, silent_after_s: float) -> dict[str, Any]:
    """Return what a `Run` has besides the columns."""
    state = row.state or "running"
    if state == "running" and time.time_ns() - row.updated_ns > silent_after_s * 1e9:
        state = "silent"
    return {
        "state": state,
        "seen_ns": row.updated_ns,
        "seconds": max(0, row.last_ns - row.first_ns) / 1e9,
        "steps": max(row.traced, row.points),
        "tags": json.loads(row.tags),
    }
