"""How long the steps of a run took, from its beginning to now."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from dataplane_admin.answers import models
from dataplane_admin.store import StepRow, Store

MOST_COUNTED = 10_000
"""Steps; of a longer run the newest."""


def run_steps(store: Store, run_id: str, *ranges: int) -> list[models.RunSteps]:
    """The steps of a run, as they are now, for each of ``ranges`` in at most so many ranges."""
    rows, older = store.run_steps(run_id, MOST_COUNTED)
    return [
        models.RunSteps(run_id=run_id, steps=len(rows), older=older, ranges=_cut(rows, most))
        for most in ranges
    ]


def _cut(rows: Sequence[StepRow], most: int) -> list[models.StepRange]:
    count = min(most, len(rows))
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
        most_s=slowest.seconds,
        failed=sum(row.errors > 0 for row in rows),
        typical=middle.trace_id,
        slowest=slowest.trace_id,
    )
