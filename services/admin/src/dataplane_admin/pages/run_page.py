"""A run from its beginning to now: did its steps become slower, and which two to compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataplane_admin.answers import Answers, models
from dataplane_admin.pages import marks, words
from dataplane_admin.pages.links import to

_COLUMNS = 120
_ROWS = 10
_HEIGHT = 180
_CUT = 1.25
"""Times the slowest step of nearly all columns: one of ten minutes would flatten all the others."""
_NOTABLE = 0.1
_ENOUGH = 20
"""Steps from which on the last of `_ROWS` parts is compared with the first."""


@dataclass(frozen=True)
class Column:
    """A range in the picture.

    Attributes:
        x: percent.
        width: percent.
        middle: pixels of the typical step.
        top: pixels of the slowest, at most all of the height.
        cut: whether it is taller than the picture.
        words: for whoever points at it.
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
class Row:
    """A range in the table; ``compare`` leads to its typical step beside the first range's."""

    facts: models.StepRange
    numbers: str
    bar: marks.Stack
    compare: str | None


@dataclass(frozen=True)
class RunPage:
    """Everything on the page of a run.

    Attributes:
        sentence: what became of the steps.
        ticks: pixels from the top, and what is written there.
        cut: whether a column is taller than the picture.
    """

    steps: models.RunSteps
    sentence: str
    typical_s: float
    slowest: models.StepRange
    failed: int
    columns: Sequence[Column]
    ticks: Sequence[tuple[float, str]]
    cut: bool
    rows: Sequence[Row]
    height: int = _HEIGHT


def run_page(answers: Answers, run: str | None) -> RunPage | None:
    """The page of a run, or of the newest of which a step has ended; None if none has."""
    fine, coarse = answers.run_steps_cut(_COLUMNS, _ROWS, run=run)
    if not fine.ranges:
        return None
    medians = sorted(one.median_s for one in fine.ranges)
    slowest = sorted(fine.ranges, key=lambda one: one.most_s)
    nearly_all_s = slowest[(19 * (len(slowest) - 1)) // 20].most_s
    tallest_s = min(slowest[-1].most_s, _CUT * nearly_all_s) or 1.0
    columns = [
        _column(one, place, len(fine.ranges), tallest_s) for place, one in enumerate(fine.ranges)
    ]
    return RunPage(
        steps=fine,
        sentence=_sentence(coarse),
        typical_s=medians[(len(medians) - 1) // 2],
        slowest=slowest[-1],
        failed=sum(one.failed for one in fine.ranges),
        columns=columns,
        ticks=[
            (round(_HEIGHT * (1 - part), 2), words.duration(tallest_s * part))
            for part in (0.5, 1.0)
        ],
        cut=any(one.cut for one in columns),
        rows=_rows(coarse.ranges),
    )


def _column(one: models.StepRange, place: int, count: int, tallest_s: float) -> Column:
    told = f"{numbers(one)}: {words.duration(one.median_s)}"
    if one.steps > 1:
        told += f", the slowest {words.duration(one.most_s)}"
    if one.failed:
        told += f", {words.count(one.failed)} with failures"
    pitch = 100 / count
    return Column(
        url=to("/trace", id=one.slowest),
        x=round((place + 0.1) * pitch, 3),
        width=round(0.8 * pitch, 3),
        middle=round(_HEIGHT * min(1.0, one.median_s / tallest_s), 2),
        top=round(_HEIGHT * min(1.0, one.most_s / tallest_s), 2),
        cut=one.most_s > tallest_s,
        failed=one.failed > 0,
        words=told,
    )


def _rows(ranges: Sequence[models.StepRange]) -> list[Row]:
    longest = max(one.median_s for one in ranges)
    first = ranges[0].typical
    return [
        Row(
            facts=one,
            numbers=numbers(one),
            bar=marks.stack([("accent", one.median_s)], longest, ""),
            compare=None if one.typical == first else to("/compare", a=first, b=one.typical),
        )
        for one in ranges
    ]


def numbers(one: models.StepRange) -> str:
    """``step 7``, ``steps 40 to 79``."""
    if one.first_step == one.last_step:
        return f"step {one.first_step}"
    return f"steps {one.first_step} to {one.last_step}"


def _sentence(steps: models.RunSteps) -> str:
    first, last = steps.ranges[0], steps.ranges[-1]
    now = f"{words.duration(last.median_s)} in {numbers(last)}"
    if steps.steps < _ENOUGH or not first.median_s:
        return f"{words.plural(steps.steps, 'step')}: {now}"
    before = f"{words.duration(first.median_s)} in {numbers(first)}"
    change = last.median_s / first.median_s - 1
    if abs(change) < _NOTABLE:
        return f"Steps take as long as they did: {now}, {before}"
    way = "slower" if change > 0 else "faster"
    return f"Steps became {abs(100 * change):.0f} % {way}: {now}, {before}"
