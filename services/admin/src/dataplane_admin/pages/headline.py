"""Headline of the overview: whether the run is making progress.

In every step some processes are blocked on others. So whether a task is blocked for too long
depends on the step duration of its run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dataplane_admin import models
from dataplane_admin.pages import words
from dataplane_admin.service import AdminService
from dataplane_admin.service.pace import Pace
from dataplane_admin.store.apply_runs import ENDED
from dataplane_admin.store.read_curves import NewestPoint

_RUNS = 5
_MAX_ERROR = 120


def runs_to_judge(
    service: AdminService,
    run: str | None,
    waits: Sequence[models.Wait],
    facts: Sequence[models.TraceFacts],
) -> list[str]:
    """Return the runs whose pace the headline needs.

    The runs with a blocked task are among them. The others are ``run`` or, if it is None, the
    runs of ``facts`` and the newest runs.
    """
    blocked_runs = [item.run_id for item in waits if item.kind == "wait"]
    if run is not None:
        return [run, *blocked_runs]
    newest = [item.run_id for item in service.runs().runs[:_RUNS]]
    return [*blocked_runs, *(item.run_id for item in facts), *newest]


def newest_pace(paces: Mapping[str, Pace]) -> Pace | None:
    """Return the pace of the run that finished a step last, None without steps.

    Runs that still finish steps precede those that do not.
    """
    known = [pace for pace in paces.values() if pace.newest]
    # A finished run of quick steps may be newer than a moving run of slow steps.
    moving = [pace for pace in known if pace.is_moving]
    return min(moving or known, key=lambda pace: pace.since_s, default=None)


def headline(
    status: models.Status,
    waits: Sequence[models.Wait],
    silent: Sequence[models.Wait],
    partitions: Sequence[models.Partition],
    paces: Mapping[str, Pace],
    point: NewestPoint | None,
    run: models.Run | None,
) -> tuple[str, str]:
    """Return the state, see `Overview`, and the headline.

    Args:
        paces: pace of each run of `runs_to_judge`.
        point: newest step of a run without traces that the headline names; else None.
        run: the run of ``point``, else of `newest_pace`; None if unknown.
    """
    newest = newest_pace(paces)
    if status.live.attached and status.live.error:
        return "stuck", "The data plane does not answer its clients"
    fault = next((wait for wait in waits if wait.kind == "fault"), None)
    if fault is not None:
        return "stuck", f"The data plane has not answered for {words.ago(fault.seconds)}"
    if waits:
        longest = words.ago(max(wait.seconds for wait in waits))
        tasks = "1 task blocked" if len(waits) == 1 else f"{len(waits)} tasks blocked, longest"
        if any(_is_late(wait, paces) for wait in waits):
            return "stuck", f"{tasks} for {longest}"
        if newest is None or not newest.is_moving:
            return "moving", f"{tasks} for {longest}"
    last = ""
    if point is not None:
        is_moving = run is None or run.state == "running"
        since_s = (status.now_ns - point.updated_ns) / 1e9
        last = progress = f"step {point.step} reported {words.ago(since_s)} ago"
    elif newest is not None and newest.newest is not None:
        step, is_moving = newest.newest, newest.is_moving
        what = f"step {step.step}" if step.step is not None else "the newest trace"
        last = f"{what} finished {words.ago(newest.since_s)} ago"
        progress = f"{what} finished in {words.duration(step.seconds)}"
    if last:
        if run is not None and run.state in ENDED:
            reason = f": {run.error[:_MAX_ERROR]}" if run.error else ""
            return "quiet", f"Run {run.state}{reason}; {last}"
        if not is_moving:
            state = "Blocked processes are silent" if silent else "No task is blocked"
            return "quiet", f"{state}; {last}"
        return "moving", f"Running: {progress}"
    if silent:
        return "quiet", "Blocked processes are silent"
    if partitions:
        return "moving", "No task is blocked"
    if status.live.attached:
        return "quiet", "Data plane empty; no task is blocked"
    return "empty", "No telemetry yet"


def _is_late(wait: models.Wait, paces: Mapping[str, Pace]) -> bool:
    """Return whether a task is blocked for longer than usual for its run."""
    if wait.kind == "wait":
        pace = paces[wait.run_id]
        return wait.seconds > pace.late_after_s or not pace.is_moving
    # The data plane knows no runs: compare with the slowest moving run.
    moving = [pace.late_after_s for pace in paces.values() if pace.is_moving]
    return wait.seconds > max(moving, default=0.0)
