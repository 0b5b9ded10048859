"""Storage of runs, created by the first record that names them."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import select

from dataplane_admin.store.tables import RunModel
from dataplane_admin.store.work import WANTED, Work, in_groups

_TIMES = select(RunModel.run_id, RunModel.first_ns, RunModel.last_ns).where(
    RunModel.run_id.in_(WANTED)
)


def apply_runs(work: Work, spans: Iterable[tuple[str, int, int]]) -> None:
    """Extend the time range of each run.

    ``spans`` has run ids with first and last time in nanoseconds since 1970; 0 if not reported.
    """
    reported: dict[str, tuple[int, int]] = {}
    for run_id, first_ns, last_ns in spans:
        if run_id:
            times = first_ns or work.now_ns, last_ns or work.now_ns
            before = reported.get(run_id, times)
            reported[run_id] = min(before[0], times[0]), max(before[1], times[1])
    if not reported:
        return
    stored = {
        row.run_id: (row.first_ns, row.last_ns)
        for group in in_groups(reported)
        for row in work.connection.execute(_TIMES, {"wanted": group})
    }
    rows = [
        {
            "run_id": run_id,
            "first_ns": min(first_ns, stored.get(run_id, (first_ns,))[0]),
            "last_ns": max(last_ns, stored.get(run_id, (0, last_ns))[1]),
            "updated_ns": work.now_ns,
        }
        for run_id, (first_ns, last_ns) in reported.items()
    ]
    work.change(RunModel, "run_id", [row for row in rows if row["run_id"] in stored])
    work.add(RunModel, [row for row in rows if row["run_id"] not in stored])
