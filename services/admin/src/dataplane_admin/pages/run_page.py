"""Run page: step durations over a run, and which steps to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from dataplane_admin import models
from dataplane_admin.pages import words
from dataplane_admin.pages.learning import number
from dataplane_admin.pages.links import to
from dataplane_admin.service import AdminService
from dataplane_admin.store.read_runs import REWARD
from observability.views.quantities import ticks

_COLUMNS = 120
_ROWS = 10
_HEIGHT = 180
_TICKS = 4
_CUT = 1.25
"""Columns are truncated above this multiple of the 95th percentile of their heights. Otherwise one
very slow step would flatten all others."""
_NOTABLE = 0.1
_ENOUGH = 20
"""Minimum number of steps for a comparison of the last range with the first."""


@dataclass(frozen=True)
class Column:
    """A step range in the chart.

    Attributes:
        x: left edge, in percent.
        middle: height of the median step in pixels.
        top: height of the slowest step in pixels, truncated to the chart.
        cut: whether it is truncated.
    """

    url: str
    x: float
    width: float
    middle: float
    top: float
    cut: bool
    failed: bool
    words: str


@dataclass(frozen=True)
class RunPage:
    """Content of the run page.

    Attributes:
        ticks: pixels from the top, and the label.
        cut: whether a column is truncated.
    """

    steps: models.RunSteps
    sentence: str
    median_s: float
    slowest: models.StepRange
    failed: int
    columns: Sequence[Column]
    ticks: Sequence[tuple[float, str]]
    cut: bool
    rows: Sequence[models.StepRange]
    height: int = _HEIGHT


def run_page(service: AdminService, run: str) -> RunPage | None:
    """Return the page of a run; None without a finished step."""
    fine, coarse = service.run_steps_by_ranges(_COLUMNS, _ROWS, run=run)
    if not fine.ranges:
        return None
    medians = sorted(steps.median_s for steps in fine.ranges)
    slowest = sorted(fine.ranges, key=lambda steps: steps.max_s)
    nearly_all_s = slowest[(19 * (len(slowest) - 1)) // 20].max_s
    tallest_s = min(slowest[-1].max_s, _CUT * nearly_all_s) or 1.0
    columns = [
        _column(steps, place, len(fine.ranges), tallest_s)
        for place, steps in enumerate(fine.ranges)
    ]
    return RunPage(
        steps=fine,
        sentence=_sentence(coarse, _rewards(service, coarse)),
        median_s=medians[(len(medians) - 1) // 2],
        slowest=slowest[-1],
        failed=sum(steps.failed for steps in fine.ranges),
        columns=columns,
        ticks=[
            (round(_HEIGHT * (1 - at_s / tallest_s), 2), label)
            for at_s, label in ticks(tallest_s, _TICKS)
        ],
        cut=any(steps.cut for steps in columns),
        rows=coarse.ranges,
    )


def _column(steps: models.StepRange, place: int, count: int, tallest_s: float) -> Column:
    text = f"{numbers(steps)}: {words.duration(steps.median_s)}"
    if steps.steps > 1:
        text += f", slowest {words.duration(steps.max_s)}"
    if steps.failed:
        text += f", {words.count(steps.failed)} failed"
    pitch = 100 / count
    return Column(
        url=to("/trace", id=steps.slowest_trace),
        x=round((place + 0.1) * pitch, 3),
        width=round(0.8 * pitch, 3),
        middle=round(_HEIGHT * min(1.0, steps.median_s / tallest_s), 2),
        top=round(_HEIGHT * min(1.0, steps.max_s / tallest_s), 2),
        cut=steps.max_s > tallest_s,
        failed=steps.failed > 0,
        words=text,
    )


def numbers(steps: models.StepRange) -> str:
    """Return ``step 7`` or ``steps 40 to 79``."""
    if steps.first_step == steps.last_step:
        return f"step {steps.first_step}"
    return f"steps {steps.first_step} to {steps.last_step}"


def _rewards(service: AdminService, steps: models.RunSteps) -> list[float]:
    """Return the mean rewards of the first and the last range; omit a range without rewards."""
    means = []
    for part in (steps.ranges[0], steps.ranges[-1]):
        curves = service.store.curves(
            steps.run_id,
            names=[REWARD],
            first_step=part.first_step,
            last_step=part.last_step,
            max_points=_COLUMNS,
            limit=1,
        )
        of_run = next((curve.values for curve in curves if not curve.attributes), [])
        values = [value for value in of_run if value is not None]
        means += [fmean(values)] if values else []
    return means


def _sentence(steps: models.RunSteps, rewards: Sequence[float]) -> str:
    first, last = steps.ranges[0], steps.ranges[-1]
    now = f"{words.duration(last.median_s)} in {numbers(last)}"
    if steps.steps < _ENOUGH or not first.median_s:
        return f"{words.plural(steps.steps, 'traced step')}; step duration {now}"
    before = f"{words.duration(first.median_s)} in {numbers(first)}"
    change = last.median_s / first.median_s - 1
    if abs(change) < _NOTABLE:
        durations = f"Step duration unchanged: {now}, {before}"
    else:
        direction = "slower" if change > 0 else "faster"
        durations = f"Steps are {abs(100 * change):.0f} % {direction}: {now}, {before}"
    if len(rewards) < 2 or number(rewards[0]) == number(rewards[1]):
        return durations
    moved = "rose" if rewards[1] > rewards[0] else "fell"
    reward = f"Mean reward {moved} from {number(rewards[0])} to {number(rewards[1])}"
    return f"{reward}; {durations[0].lower()}{durations[1:]}"
