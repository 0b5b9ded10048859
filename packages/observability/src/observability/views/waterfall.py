"""The waterfall of a step as lines: a tree of spans, each with a bar over the time of the step.

Where there would be too many lines, equal siblings become one, and the lines say so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

from observability.records import Span
from observability.views import attributes
from observability.views.critical_path import Segment
from observability.views.intervals import Interval, union
from observability.views.printable import printable
from observability.views.steps import Step

MOST_LINES = 60
"""Up to so many spans each have a line of their own."""

STYLES = {
    "productive": "green",
    "overhead": "yellow",
    "wasted": "red",
    "idle": "bright_black",
    "": "default",
}
"""Bucket to rich style; the empty one is of spans that only group others."""

_MARKS = {"productive": "█", "overhead": "▓", "wasted": "x", "idle": "░", "": "─"}
# However deep and odd a trace is, it does not flood the terminal.
_AT_MOST = 4 * MOST_LINES


class Bar:
    """Stretches of time, drawn over the width that there is."""

    def __init__(self, stretches: Iterable[Interval], whole: Interval, bucket: str) -> None:
        self._stretches = union((start, max(end, start + 1)) for start, end in stretches)
        self._whole = whole
        self._bucket = bucket if bucket in _MARKS else ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(
            self.cells(options.max_width, _MARKS[self._bucket]),
            style=STYLES[self._bucket],
            no_wrap=True,
            end="",
        )

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(4, options.max_width)

    def cells(self, width: int, mark: str) -> str:
        """The bar in ``width`` characters; what is too short for one still has one."""
        start, end = self._whole
        length = max(1, end - start)
        drawn = [" "] * width
        for first, last in self._stretches:
            # Integers, because nanoseconds since 1970 are more than a float can tell apart.
            left = min(max(0, (first - start) * width // length), width - 1)
            right = min(max(left + 1, -((start - last) * width // length)), width)
            drawn[left:right] = mark * (right - left)
        return "".join(drawn)


@dataclass(frozen=True)
class WaterfallLine:
    """One line of a waterfall; texts are printable.

    Attributes:
        guide: the indentation with the lines of the tree.
        name: the span's name, with the number of spans where it stands for several.
        process: label, or how many processes.
        offset_seconds: from the begin of the step; negative if a clock was behind.
        seconds: how long it took, several together; None if that was not reported.
        bar: when it took place.
        critical: part of it is on the critical path.
        failed: a span of it has the outcome error.
    """

    guide: str
    name: str
    process: str
    offset_seconds: float
    seconds: float | None
    bar: Bar
    critical: bool
    failed: bool


def lines_of(step: Step, path: Iterable[Segment]) -> tuple[list[WaterfallLine], str]:
    """The lines of a step's waterfall.

    Up to `MOST_LINES` spans have a line each. Of more, equal siblings share a line: those of one
    name and process, and if that is not enough, those of one name.

    Returns:
        The lines, and a sentence about what they leave out; empty if they leave nothing out.
    """
    count = len(step.spans)
    rows: list[_Row] = []
    for alike in (_by_itself, _by_name_and_process, _by_name):
        rows = _rows(step, alike)
        if len(rows) <= MOST_LINES:
            break
    critical = {segment.span.span_id for segment in path}
    lines = [_line(step, row, critical) for row in rows[:_AT_MOST]]
    notes = []
    if len(rows) < count:
        notes.append(
            f"{count} spans in {len(rows)} lines: equal siblings share one, "
            "\N{MULTIPLICATION SIGN}n says how many, took is their sum"
        )
    if len(rows) > _AT_MOST:
        notes.append(f"the last {len(rows) - _AT_MOST} lines are left out")
    return lines, "; ".join(notes)


def legend() -> Text:
    """What the characters and colours of the bars mean."""
    text = Text("* critical path")
    for bucket, mark in _MARKS.items():
        text.append("   ").append(mark * 2, style=STYLES[bucket])
        text.append(f" {bucket or 'groups others'}")
    return text


_Key = tuple[object, ...]


@dataclass(frozen=True)
class _Row:
    spans: tuple[Span, ...]
    guide: str


def _by_itself(span: Span) -> _Key:
    return (span.span_id,)


def _by_name_and_process(span: Span) -> _Key:
    return (span.name, span.process, attributes.bucket(span))


def _by_name(span: Span) -> _Key:
    return (span.name, attributes.bucket(span))


def _rows(step: Step, alike: Callable[[Span], _Key]) -> list[_Row]:
    """The tree from top to bottom, spans of one key under one parent together."""
    found = []
    waiting = [(spans, "", "") for spans in reversed(_grouped(step.tree.tops, alike))]
    while waiting:
        spans, guide, below = waiting.pop()
        found.append(_Row(spans, guide))
        children = _grouped(
            [child for span in spans for child in step.children(span.span_id)], alike
        )
        for place, group in reversed([*enumerate(children, 1)]):
            last = place == len(children)
            waiting.append(
                (group, below + ("└ " if last else "├ "), below + ("  " if last else "│ "))
            )
    return found


def _grouped(spans: Sequence[Span], alike: Callable[[Span], _Key]) -> list[tuple[Span, ...]]:
    groups: dict[_Key, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        groups.setdefault(alike(span), []).append(span)
    return [tuple(group) for group in groups.values()]


def _line(step: Step, row: _Row, critical: set[str]) -> WaterfallLine:
    first = row.spans[0]
    timed = [span.seconds for span in row.spans if span.is_timed]
    seconds = sum(timed) if timed else None
    many = f" \N{MULTIPLICATION SIGN}{len(row.spans)}" if len(row.spans) > 1 else ""
    processes = Counter(span.process for span in row.spans)
    label = step.labels[first.process] if len(processes) == 1 else f"{len(processes)} processes"
    stretches = [(span.start_ns, span.end_ns) for span in row.spans]
    return WaterfallLine(
        guide=row.guide,
        name=f"{printable(first.name)}{many}",
        process=label,
        offset_seconds=(first.start_ns - step.start_ns) / 1e9,
        seconds=seconds,
        bar=Bar(stretches, (step.start_ns, step.end_ns), attributes.bucket(first) or ""),
        critical=any(span.span_id in critical for span in row.spans),
        failed=any(span.outcome == "error" for span in row.spans),
    )
