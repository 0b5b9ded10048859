"""Sample matrix of a partition: a column for each window of consecutive samples.

All cells of a shade are one SVG path, which keeps the page small. A column is one unit wide; a
vertical unit is one pixel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dataplane_admin import models
from dataplane_admin.pages import words
from dataplane_admin.pages.links import to

SHADES = 8
# Height of a field's row, of a task's row, and between them, in pixels.
_FIELD, _TASK, _GAP = 22, 44, 4
_TASK_STATES = ("unclaimed", "assigned", "leased", "acknowledged")
# States in a column of a task, from the bottom up.
_PILED = ("acknowledged", "leased", "assigned", "unclaimed")


@dataclass(frozen=True)
class HeatRow:
    """A row of the matrix: a field or a task.

    ``share`` is the percent of samples that have the field, or that the task acknowledged.
    """

    name: str
    is_task: bool
    share: str


@dataclass(frozen=True)
class HeatWindow:
    """A column of the matrix, linked to its samples."""

    place: int
    start: int
    count: int
    url: str
    words: str
    chosen: bool


@dataclass(frozen=True)
class HeatMap:
    """A drawn matrix; ``paths`` has CSS class and outline of each path."""

    rows: Sequence[HeatRow]
    paths: Sequence[tuple[str, str]]
    windows: Sequence[HeatWindow]
    height: int
    total: int
    scanned: int


def heat_map(matrix: models.Matrix, *, chosen: int | None) -> HeatMap:
    """Draw a matrix; the window that holds sample index ``chosen`` is highlighted."""
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
    """Add one rectangle for each run of neighbors of one kind."""
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
    """Stack the states of a task in each column; equal neighbors share one rectangle."""
    begin = 0
    for place in range(1, len(shares) + 1):
        if place < len(shares) and shares[place] == shares[begin]:
            continue
        bottom = top + height
        share_of = dict(zip(_TASK_STATES, shares[begin], strict=True))
        for state in _PILED:
            tall = height * share_of[state]
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
        acknowledged = sum(window.tasks[place][3] * window.count for window in matrix.windows)
        yield HeatRow(name, True, f"{_percent(acknowledged, total)} acknowledged")


def _words(matrix: models.Matrix, window: models.Window) -> str:
    last = window.start + window.count - 1
    lacking = [
        f"{name} {_percent(share, 1)}"
        for name, share in zip(matrix.fields, window.written, strict=True)
        if share < 1
    ]
    fields = (
        f"written: {', '.join(lacking)}, other fields 100 %" if lacking else "all fields written"
    )
    if len(lacking) == len(matrix.fields):
        fields = f"written: {', '.join(lacking)}"
    tasks = []
    for name, shares in zip(matrix.tasks, window.tasks, strict=True):
        parts = [
            f"{_percent(share, 1)} {state}"
            for state, share in zip(_TASK_STATES, shares, strict=True)
            if share > 0
        ]
        tasks.append(f"{name} {', '.join(parts)}")
    place = f"Samples {words.count(window.start)} to {words.count(last)}"
    if window.count == 1:
        place = f"Sample {words.count(window.start)}"
    return "; ".join([f"{place}: {fields}", *tasks])


def _percent(part: float, total: float) -> str:
    """Return an integer percentage; 0 only for nothing and 100 only for everything."""
    if not total or part <= 0:
        return "0 %"
    if part >= total * (1 - 1e-9):
        return "100 %"
    return f"{min(99, max(1, round(100 * part / total)))} %"
