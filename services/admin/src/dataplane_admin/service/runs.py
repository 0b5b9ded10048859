"""Lists of runs, their step durations, and comparisons of configurations and curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dataplane_admin import models
from dataplane_admin.service.errors import NotFound
from dataplane_admin.store import StepRow, Store
from dataplane_admin.store.read_curves import SAMPLES, TIME, is_validation
from observability.views import printable

MAX_COMPARED = 8
MAX_COUNTED = 10_000
"""Maximum number of steps; of a longer run, the newest are counted."""
MAX_CURVES = 200
"""Maximum number of curves of a run in an answer."""
_AXES = {"time": TIME, "samples": SAMPLES}
_MAX_AXIS_POINTS = 2_000


class _Places(NamedTuple):
    """Places on an axis of the first steps of buckets of ``width`` steps."""

    steps: list[int]
    places: list[float]
    width: int


_KEYS: dict[models.RunSort, Callable[[models.Run], float | None]] = {
    "seen": lambda run: run.seen_ns,
    "started": lambda run: run.first_ns,
    "duration": lambda run: run.seconds,
    "steps": lambda run: run.steps,
    "reward": lambda run: run.reward,
}


def choose(
    runs: Sequence[models.Run],
    q: str | None,
    state: models.RunState | None,
    tag: str | None,
    sort: models.RunSort,
    *,
    ascending: bool,
    limit: int,
    stored: int,
) -> models.Runs:
    """Return the runs that match all filters, sorted; runs without a value to sort by come last.

    ``stored`` is the number of stored runs, which may be more than ``runs`` has.
    """
    wanted = (q or "").casefold()
    chosen = [
        run
        for run in runs
        if state in (None, run.state)
        and (tag is None or tag in run.tags)
        and any(wanted in text.casefold() for text in (run.run_id, run.error, *run.tags))
    ]
    known = [(number, run) for run in chosen if (number := _KEYS[sort](run)) is not None]
    known.sort(key=lambda pair: pair[0], reverse=not ascending)
    unknown = [run for run in chosen if _KEYS[sort](run) is None]
    return models.Runs(
        runs=[*(run for _, run in known), *unknown][:limit],
        matching=len(chosen),
        total=len(runs),
        omitted=max(0, stored - len(runs)),
        tags=sorted({tag for run in runs for tag in run.tags}),
    )


def run(store: Store, run_id: str, silent_after_s: float) -> models.RunDetail:
    """Return one run. Raises NotFound if it is not stored."""
    known = store.run(run_id, silent_after_s=silent_after_s)
    if known is None:
        raise NotFound(f"run '{printable(run_id)}' does not exist")
    return known


def compare(runs: Sequence[models.RunDetail]) -> models.RunComparison:
    """Return the differences of the runs' configurations."""
    known = [run.config for run in runs if run.config]
    keys = sorted({key for config in known for key in config})
    differences = [
        models.ConfigDifference(key=key, values=[run.config.get(key) for run in runs])
        for key in keys
        if len({config.get(key) for config in known}) > 1
    ]
    return models.RunComparison(
        runs=list(runs), differences=differences, equal=len(keys) - len(differences)
    )


def compare_curves(
    store: Store,
    runs: Sequence[models.RunDetail],
    axis: models.Axis,
    names: Sequence[str] | None,
    first: float | None,
    last: float | None,
    max_points: int,
) -> models.ComparedCurves:
    """Return curves of runs over an axis, each down-sampled to about ``max_points`` points.

    Args:
        first: smallest place on the axis; None for the smallest known.
        last: largest place on the axis; None for the largest known.
        max_points: number of points of a curve above which it is down-sampled.
    """
    without_axis: list[str] = []
    curves: list[models.ComparedCurve] = []
    for index, run in enumerate(runs):
        places = None
        limits = (first, last)
        if axis != "step":
            places = _places(store, run, axis)
            if places is None:
                without_axis.append(run.run_id)
                continue
            limits = _steps_between(places, first, last)
        for curve in store.curves(
            run.run_id,
            names=names,
            first_step=None if limits[0] is None else max(0, math.floor(limits[0])),
            last_step=None if limits[1] is None else math.ceil(limits[1]),
            max_points=max_points,
            limit=MAX_CURVES,
        ):
            x: list[float] = list(map(float, curve.steps))
            if places is not None:
                curve, x = _placed(curve, places)
            curves.append(models.ComparedCurve.of(curve, run=index, x=x))
    return models.ComparedCurves(
        axis=axis,
        runs=[run.run_id for run in runs],
        without_axis=without_axis,
        curves=curves,
    )


def _placed(curve: models.Curve, places: _Places) -> tuple[models.Curve, list[float]]:
    """Return the points of a curve whose places are known, and the places.

    A validation has the number of the next step: its place is that of the step before it, and the
    start of the run if there is none. Between two buckets, places are interpolated.
    """
    steps = np.asarray(curve.steps, float) - is_validation(curve.name)
    known = np.asarray(places.steps)
    if curve.width == places.width == 1:
        is_known = np.isin(steps, known)
    else:
        is_known = (steps + curve.width > known[0]) & (steps < known[-1] + places.width)
    x = np.interp(steps + _middle(curve), known + (places.width - 1) / 2, places.places)
    if curve.width == 1:
        is_known |= steps < 0
        x[steps < 0] = 0.0
    kept = np.flatnonzero(is_known).tolist()
    columns = {
        name: [column[at] for at in kept]
        for name in ("steps", "values", "low", "high")
        if (column := getattr(curve, name))
    }
    return curve.model_copy(update=columns), x[kept].tolist()


def _places(store: Store, run: models.RunDetail, axis: models.Axis) -> _Places | None:
    """Return the places of a run's steps on the axis; None if they are unknown."""
    curves = store.curves(
        run.run_id,
        names=[_AXES[axis]],
        first_step=None,
        last_step=None,
        max_points=_MAX_AXIS_POINTS,
        limit=1,
    )
    origin = run.first_ns / 1e9 if axis == "time" else 0.0
    known = [
        (step, value - origin)
        for curve in curves
        for step, value in zip(curve.steps, curve.values, strict=True)
        if value is not None
    ]
    if not known:
        return None
    return _Places([step for step, _ in known], [place for _, place in known], curves[0].width)


def _middle(curve: models.Curve) -> float:
    """Return the distance from the first step of a bucket to its middle."""
    return (curve.width - 1) / 2


def _steps_between(
    known: _Places, first: float | None, last: float | None
) -> tuple[float | None, float | None]:
    """Return the first and last step between two places, extended by one known step at each end.

    After a resume, places do not always grow with the steps.
    """
    steps, places = known.steps, known.places
    inside = [
        at
        for at, (place, following) in enumerate(zip(places, [*places[1:], places[-1]], strict=True))
        if (first is None or first <= max(place, following))
        and (last is None or min(place, following) <= last)
    ]
    if not inside:
        return -1.0, -1.0
    low, high = inside[0], inside[-1] + 1
    # Without a further step, a validation may follow the last one.
    is_open = last is None or high >= len(steps)
    return None if first is None else steps[low], None if is_open else steps[high]


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
