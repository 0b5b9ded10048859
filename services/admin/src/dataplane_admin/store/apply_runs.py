"""Storage of runs, created by the first record that names them, with their state and tags."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple  # Any: values of rows

from sqlalchemy import select, update

from dataplane_admin.store.batch import LifecycleEvent
from dataplane_admin.store.tables import RunModel
from dataplane_admin.store.texts import storable
from dataplane_admin.store.work import WANTED, Work, in_groups

_TIMES = select(RunModel.run_id, RunModel.first_ns, RunModel.last_ns).where(
    RunModel.run_id.in_(WANTED)
)


class Resume(NamedTuple):
    """A start of a run that repeats the steps from ``first_step`` on."""

    run_id: str
    first_step: int
    time_ns: int


def apply_runs(work: Work, times: Iterable[tuple[str, int, int]]) -> None:
    """Extend the time range of each run.

    ``times`` has run ids with first and last time in nanoseconds since 1970; 0 if not reported.
    """
    reported: dict[str, tuple[int, int]] = {}
    for run_id, first_ns, last_ns in times:
        if run_id:
            known = first_ns or work.now_ns, last_ns or work.now_ns
            before = reported.get(run_id, known)
            reported[run_id] = min(before[0], known[0]), max(before[1], known[1])
    if not reported:
        return
    stored = {row.run_id: (row.first_ns, row.last_ns) for row in work.rows(_TIMES, reported)}
    rows = [
        {
            "run_id": run_id,
            "first_ns": min(first_ns, stored.get(run_id, (first_ns,))[0]),
            "last_ns": max(last_ns, stored.get(run_id, (0, last_ns))[1]),
            "updated_ns": work.now_ns,
        }
        for run_id, (first_ns, last_ns) in reported.items()
    ]
    work.save(RunModel, "run_id", rows, stored)


def mark_seen(work: Work, run_ids: Iterable[str]) -> None:
    """Record that stored runs reported something.

    While a step lasts, metrics may be all that its processes report.
    """
    for group in in_groups({storable(run_id) for run_id in run_ids if run_id}):
        seen = update(RunModel).where(RunModel.run_id.in_(group))
        work.connection.execute(seen.values(updated_ns=work.now_ns))


def apply_run_changes(work: Work, events: Iterable[LifecycleEvent]) -> list[Resume]:
    """Apply new starts and ends of stored runs, each unless a later one is known.

    Returns:
        The resumes among them.
    """
    resumes = []
    changes = [(event, event.run) for event in events if event.run is not None]
    for event, change in sorted(changes, key=lambda pair: pair[0].time_ns):
        of_run = RunModel.run_id == storable(event.run_id)
        stored = work.connection.execute(
            select(RunModel.state_ns, RunModel.started_ns).where(of_run)
        ).first()
        values: dict[str, Any] = {}
        if stored is not None and event.time_ns >= stored.state_ns:
            values |= {"state": change.state, "state_ns": event.time_ns}
            values["error"] = storable(change.error)
        if stored is not None and change.state == "running" and event.time_ns >= stored.started_ns:
            values |= {"started_ns": event.time_ns, "resumed_from": change.resumed_from}
            if change.config is not None:
                values["config"] = json.dumps(change.config)
            if change.resumed_from is not None:
                resumes.append(Resume(event.run_id, change.resumed_from, event.time_ns))
        if values:
            work.connection.execute(update(RunModel).where(of_run).values(values))
    return resumes


def apply_tags(work: Work, tags: Iterable[tuple[str, tuple[str, ...]]]) -> None:
    """Replace the tags of stored runs."""
    for run_id, of_run in tags:
        chosen = update(RunModel).where(RunModel.run_id == storable(run_id))
        work.connection.execute(chosen.values(tags=json.dumps(of_run)))
