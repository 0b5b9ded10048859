"""Pace of runs: after which time a run, or a blocked task of it, is late."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dataplane_admin import models
from dataplane_admin.store import Store, TraceFilter

_STEPS = 10
_LATE = 3
"""Multiple of the longest recent step after which a run is late.

A run is late if no step finished, or a task was blocked, for longer than both that multiple and
`_MIN_LATE_S`."""
_MIN_LATE_S = 60.0


@dataclass(frozen=True)
class Pace:
    """Pace of the last steps of a run.

    Attributes:
        newest: the step that finished last, else the step that reported last; None without steps.
        late_after_s: seconds after which the run, or a blocked task of it, is late.
        since_s: seconds since the newest step finished; 0 without steps.
    """

    newest: models.TraceFacts | None
    late_after_s: float
    since_s: float

    @property
    def is_moving(self) -> bool:
        """True if a step finished recently, or if the run has no step yet."""
        return self.since_s <= self.late_after_s


def paces(store: Store, runs: Iterable[str], now_ns: int, stuck_after_s: float) -> dict[str, Pace]:
    """Return the pace of each run.

    Args:
        runs: run ids; empty for telemetry without a run.
        stuck_after_s: seconds before which nothing is late, however short the steps are.
    """
    min_late_s = max(_MIN_LATE_S, stuck_after_s)
    by_run = {}
    for run in dict.fromkeys(runs):
        # A run may have traces of single calls besides its steps, or only such traces.
        steps = store.steps(run, _STEPS) or store.traces(TraceFilter(run_id=run), None, _STEPS)[0]
        # The duration of an unfinished step is unknown.
        finished = [step for step in steps if step.has_root] or steps
        # Use this service's clock: a sender's clock may be a day ahead.
        newest = max(finished, key=lambda step: step.received_ns, default=None)
        longest_s = max((step.seconds for step in finished), default=0.0)
        since_s = 0.0 if newest is None else (now_ns - newest.received_ns) / 1e9
        by_run[run] = Pace(newest, max(min_late_s, _LATE * longest_s), since_s)
    return by_run
