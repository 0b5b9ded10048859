"""Load of engines and nodes in a period: shares and rates from stored points."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median

from dataplane_admin import models
from dataplane_admin.load_metrics import METRICS
from dataplane_admin.store import LoadRows, Store

MAX_SUBJECTS = 64
"""Maximum number of engines, and of nodes."""
_MARGIN_S = 60
"""Seconds before and after the period that are also read: a value holds until the next one."""
_MIN_SILENT_S = 30.0
_SILENT = 4
"""A source is silent after this many median intervals without a point, but not before
`_MIN_SILENT_S` seconds."""

_Point = tuple[int, float, float]


def load(
    store: Store, start_ns: int, end_ns: int, *, run: str | None, max_points: int
) -> models.Load:
    """Return the load in a period, and up to a minute around it."""
    rows = store.load(
        start_ns // 10**9 - _MARGIN_S,
        end_ns // 10**9 + _MARGIN_S,
        run_id=run,
        max_points=max_points,
    )
    order = list(METRICS)
    grouped: dict[tuple[str, str, str], list[LoadRows]] = {}
    for row in sorted(rows, key=lambda row: (order.index(row.metric), len(row.device), row.device)):
        grouped.setdefault((row.kind, row.subject, row.run_id), []).append(row)
    kinds = {kind: sorted(key for key in grouped if key[0] == kind) for kind in ("engine", "node")}
    subjects = [
        models.LoadSubject.model_validate(
            {
                "kind": kind,
                "name": name,
                "run_id": run_id,
                "series": [_series(row, start_ns) for row in grouped[kind, name, run_id]],
            }
        )
        for keys in kinds.values()
        for kind, name, run_id in keys[:MAX_SUBJECTS]
    ]
    return models.Load(
        start_ns=start_ns,
        end_ns=end_ns,
        subjects=subjects,
        omitted={kind: len(keys[MAX_SUBJECTS:]) for kind, keys in kinds.items()},
    )


def _series(row: LoadRows, start_ns: int) -> models.LoadSeries:
    points = list(_values(row, _silence_s(row.points)))
    return models.LoadSeries(
        metric=row.metric,
        unit=METRICS[row.metric].unit,
        device=row.device,
        times_s=[second - start_ns / 1e9 for second, _ in points],
        values=[value for _, value in points],
    )


def _silence_s(points: Sequence[_Point]) -> float:
    """Return the gap between points, in seconds, above which the source counts as silent."""
    distances = [after[0] - before[0] for before, after in pairwise(points)]
    return max(_MIN_SILENT_S, _SILENT * median(distances)) if distances else _MIN_SILENT_S


def _values(row: LoadRows, silence_s: float) -> Iterator[tuple[float, float | None]]:
    is_ratio = METRICS[row.metric].is_ratio
    before: _Point | None = None
    for second, value, total in row.points:
        if before is not None and second - before[0] > silence_s:
            yield before[0] + silence_s / 2, None
            before = None
        if not row.is_counter:
            yield second, _share(value, total) if is_ratio else value
        elif before is not None:
            growth, elapsed = value - before[1], float(second - before[0])
            middle = second - elapsed / 2
            if growth < 0:  # the counter has restarted
                yield middle, None
            else:
                denominator = total - before[2] if is_ratio else elapsed
                yield middle, _share(growth, denominator) if is_ratio else growth / denominator
        before = second, value, total


def _share(value: float, total: float) -> float | None:
    """Return a share from 0 to 1; None if the total is unknown."""
    return min(1.0, value / total) if total > 0 else None
