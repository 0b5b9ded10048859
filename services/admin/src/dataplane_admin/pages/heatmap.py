"""The samples of a partition by field and task, as paths over columns of windows.

One path for each shade, whatever the number of windows, keeps the page small. A column is one unit
wide, a unit down is a pixel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataplane_admin.answers import models
from dataplane_admin.pages import words
from dataplane_admin.pages.links import to

SHADES = 8
_FIELD = 22
_TASK = 44
_GAP = 4
_TASK_STATES = ("unclaimed", "assigned", "leased", "settled")
# From the bottom up.
_PILED = ("settled", "leased", "assigned", "unclaimed")


@dataclass(frozen=True)
class HeatRow:
    """A row: a field or a task.

    Attributes:
        share: of all samples, how many have the field, or are settled by the task.
    """

    name: str
    is_task: bool
    share: str


@dataclass(frozen=True)
class HeatWindow:
    """A column, which leads to its samples."""

    place: int
    start: int
    count: int
    url: str
    words: str
    chosen: bool


@dataclass(frozen=True)
class HeatMap:
    """A drawn matrix.

    Attributes:
        paths: class of a path, and its outline.
        height: of all rows, in pixels.
    """

    rows: Sequence[HeatRow]
    paths: Sequence[tuple[str, str]]
    windows: Sequence[HeatWindow]
    height: int
    total: int
    scanned: int


def heat_map(matrix: models.Matrix, *, chosen: int | None) -> HeatMap:
    """A matrix, drawn; ``chosen`` is the place of the first sample of the window that is open."""
    windows = matrix.windows
    outlines: dict[str, list[str]] = defaultdict(list)
    top = 0
    for place in range(len(matrix.fields)):
        shades = [_shade(window.written[place]) for window in windows]
        _rectangles(outlines, shades, top, _FIELD - _GAP)
        top += _FIELD
    for place in range(len(matrix.tasks)):
        _piles(outlines, [window.tasks[place] for window in windows], top, _TASK - _GAP)
        top += _TASK
    return HeatMap(
        rows=[*_field_rows(matrix), *_task_rows(matrix)],
        paths=[(kind, "".join(pieces)) for kind, pieces in outlines.items()],
        windows=[
            HeatWindow(
                place=place,
                start=window.start,
                count=window.count,
                url=to("/partition", id=matrix.partition, start=window.start, count=window.count),
                words=_words(matrix, window),
                chosen=chosen is not None and window.start <= chosen < window.start + window.count,
            )
            for place, window in enumerate(windows)
        ],
        height=top,
        total=matrix.total,
        scanned=matrix.scanned,
    )


def _shade(share: float) -> str:
    if share <= 0:
        return "cell-empty"
    return f"cell c{SHADES if share >= 1 else 1 + int(share * (SHADES - 1))}"


def _rectangles(
    outlines: dict[str, list[str]], kinds: Sequence[str], top: float, height: float
) -> None:
    """Neighbours of one kind become one rectangle."""
    begin = 0
    for place in range(1, len(kinds) + 1):
        if place == len(kinds) or kinds[place] != kinds[begin]:
            outlines[kinds[begin]].append(
                f"M{begin} {top:g}h{place - begin}v{height:g}h{begin - place}z"
            )
            begin = place


def _piles(
    outlines: dict[str, list[str]], shares: Sequence[Sequence[float]], top: float, height: float
) -> None:
    """Of each column the states of a task on top of each other; equal neighbours are one."""
    begin = 0
    for place in range(1, len(shares) + 1):
        if place < len(shares) and shares[place] == shares[begin]:
            continue
        bottom = top + height
        told = dict(zip(_TASK_STATES, shares[begin], strict=True))
        for state in _PILED:
            tall = height * told[state]
            if tall > 0:
                bottom -= tall
                outlines[f"pile-{state}"].append(
                    f"M{begin} {bottom:.2f}h{place - begin}v{tall:.2f}h{begin - place}z"
                )
        begin = place


def _field_rows(matrix: models.Matrix) -> Iterable[HeatRow]:
    total = sum(window.count for window in matrix.windows)
    for place, name in enumerate(matrix.fields):
        written = sum(window.written[place] * window.count for window in matrix.windows)
        yield HeatRow(name, False, _percent(written, total))


def _task_rows(matrix: models.Matrix) -> Iterable[HeatRow]:
    total = sum(window.count for window in matrix.windows)
    for place, name in enumerate(matrix.tasks):
        settled = sum(window.tasks[place][3] * window.count for window in matrix.windows)
        yield HeatRow(name, True, f"{_percent(settled, total)} settled")


def _words(matrix: models.Matrix, window: models.Window) -> str:
    last = window.start + window.count - 1
    lacking = [
        f"{name} {_percent(share, 1)}"
        for name, share in zip(matrix.fields, window.written, strict=True)
        if share < 1
    ]
    fields = (
        f"written: {', '.join(lacking)}; other fields all" if lacking else "every field written"
    )
    if len(lacking) == len(matrix.fields):
        fields = f"written: {', '.join(lacking)}"
    tasks = []
    for name, shares in zip(matrix.tasks, window.tasks, strict=True):
        told = [
            f"{_percent(share, 1)} {state}"
            for state, share in zip(_TASK_STATES, shares, strict=True)
            if share > 0
        ]
        tasks.append(f"{name} {', '.join(told)}")
    place = f"Samples {words.count(window.start)} to {words.count(last)}"
    if window.count == 1:
        place = f"Sample {words.count(window.start)}"
    return "; ".join([f"{place}: {fields}", *tasks])


def _percent(part: float, whole: float) -> str:
    """Whole percents, but never 0 of something nor 100 of what is not all."""
    if not whole or part <= 0:
        return "0 %"
    if part >= whole * (1 - 1e-9):
        return "100 %"
    return f"{min(99, max(1, round(100 * part / whole)))} %"
