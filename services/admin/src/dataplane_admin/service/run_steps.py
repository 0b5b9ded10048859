"""Step durations over a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dataplane_admin import models
from dataplane_admin.store import StepRow, Store

MAX_COUNTED = 10_000
"""Maximum number of steps; of a longer run, the newest are counted."""


def run_steps(store: Store, run_id: str, *max_ranges: int) -> list[models.RunSteps]:
    """Return the steps of a run, divided into ranges once for each maximum number of ranges."""
    rows, older = store.run_steps(run_id, MAX_COUNTED)
    return [
        models.RunSteps(run_id=run_id, steps=len(rows), older=older, ranges=_cut(rows, maximum))
        for maximum in max_ranges
    ]


def _cut(rows: Sequence[StepRow], maximum: int) -> list[models.StepRange]:
    count = min(maximum, len(rows))
    cuts = [place * len(rows) // count for place in range(count + 1)] if count else [0]
    return [_range(rows[begin:end]) for begin, end in pairwise(cuts)]


def _range(rows: Sequence[StepRow]) -> models.StepRange:
    by_length = sorted(rows, key=lambda row: row.seconds)
    middle, slowest = by_length[(len(rows) - 1) // 2], by_length[-1]
    return models.StepRange(
        first_step=min(row.step for row in rows),
        last_step=max(row.step for row in rows),
        steps=len(rows),
        start_ns=rows[0].start_ns or None,
        median_s=middle.seconds,
        max_s=slowest.seconds,
        failed=sum(row.errors > 0 for row in rows),
        median_trace=middle.trace_id,
        slowest_trace=slowest.trace_id,
    )
