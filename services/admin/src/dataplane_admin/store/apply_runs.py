"""Runs: known from the first thing that tells of them."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import select

from dataplane_admin.store.models import RunModel
from dataplane_admin.store.work import Work, in_groups


def apply_runs(work: Work, spans: Iterable[tuple[str, int, int]]) -> None:
    """Widen each run by what was reported of it: its name, and times in nanoseconds since 1970,
    which are 0 if no time was reported."""
    told: dict[str, tuple[int, int]] = {}
    for run_id, first_ns, last_ns in spans:
        if run_id:
            times = first_ns or work.now_ns, last_ns or work.now_ns
            before = told.get(run_id, times)
            told[run_id] = min(before[0], times[0]), max(before[1], times[1])
    if not told:
        return
    there = {
        row.run_id: (row.first_ns, row.last_ns)
        for some in in_groups(told)
        for row in work.connection.execute(
            select(RunModel.run_id, RunModel.first_ns, RunModel.last_ns).where(
                RunModel.run_id.in_(some)
            )
        )
    }
    rows = [
        {
            "run_id": run_id,
            "first_ns": min(first_ns, there.get(run_id, (first_ns,))[0]),
            "last_ns": max(last_ns, there.get(run_id, (0, last_ns))[1]),
            "updated_ns": work.now_ns,
        }
        for run_id, (first_ns, last_ns) in told.items()
    ]
    work.change(RunModel, "run_id", [row for row in rows if row["run_id"] in there])
    work.add(RunModel, [row for row in rows if row["run_id"] not in there])
