"""Storage of runs, created by the first record that names them, with their state and tags."""

from __future__ import annotations

import json
from collections.abc import Iterable
from operator import itemgetter
from typing import Any, NamedTuple  # Any: values of rows

from sqlalchemy import select, update

from dataplane_admin.store.batch import LifecycleEvent, RunChange
from dataplane_admin.store.tables import RunModel
from dataplane_admin.store.texts import excerpt, storable
from dataplane_admin.store.work import WANTED, Work, in_groups

ENDED = ("finished", "stopped", "failed")
"""States of a run that reported its end."""

_STATES = select(
    RunModel.run_id,
    RunModel.state,
    RunModel.state_ns,
    RunModel.started_ns,
    RunModel.resumed_from,
).where(RunModel.run_id.in_(WANTED))
_TIMES = select(RunModel.run_id, RunModel.first_ns, RunModel.last_ns).where(
    RunModel.run_id.in_(WANTED)
)


class Resumes(NamedTuple):
    """Starts of a run that repeat steps: the first repeated step and the time of each."""

    run_id: str
    starts: list[tuple[int, int]]


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


def apply_run_changes(work: Work, events: Iterable[LifecycleEvent]) -> list[Resumes]:
    """Apply new starts and ends of stored runs, each unless a later one is known.

    A start after the end of the run repeats all steps, unless it says from which step on. A start
    before the end may come from another process of the run, so it does not replace a resume.

    Returns:
        The resumes among them, by run.
    """
    changes: dict[str, list[tuple[int, RunChange]]] = {}
    for event in events:
        if event.run is not None:
            changes.setdefault(storable(event.run_id), []).append((event.time_ns, event.run))
    resumes = []
    for row in list(work.rows(_STATES, changes)):
        run_id = row.run_id
        values: dict[str, Any] = {
            "state": row.state,
            "state_ns": row.state_ns,
            "started_ns": row.started_ns,
            "resumed_from": row.resumed_from,
        }
        starts = []
        for time_ns, change in sorted(changes[run_id], key=itemgetter(0)):
            first_step = change.resumed_from
            if first_step is None and values["state"] in ENDED and time_ns > values["state_ns"]:
                first_step = 0
            joins = first_step is None and values["state"] not in ENDED
            if time_ns >= values["state_ns"]:
                values |= {"state": change.state, "state_ns": time_ns}
                values["error"] = excerpt(change.error)
            if change.state == "running" and time_ns >= values["started_ns"]:
                if not joins or values["resumed_from"] is None:
                    values |= {"started_ns": time_ns, "resumed_from": first_step}
                if change.config is not None:
                    values["config"] = json.dumps(change.config)
                if first_step is not None:
                    starts.append((first_step, time_ns))
        work.change(RunModel, "run_id", [{"run_id": run_id, **values}])
        if starts:
            resumes.append(Resumes(run_id, starts))
    return resumes


def apply_tags(work: Work, tags: Iterable[tuple[str, tuple[str, ...]]]) -> None:
    """Replace the tags of stored runs."""
    for run_id, of_run in tags:
        chosen = update(RunModel).where(RunModel.run_id == storable(run_id))
        work.connection.execute(chosen.values(tags=json.dumps(of_run)))
