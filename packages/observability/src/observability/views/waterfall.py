"""The waterfall of a step as lines: a tree of spans, each with a bar over the time of the step.

Beyond `MAX_LINES`, similar siblings share one line, which shows their number.
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

MAX_LINES = 60
"""Maximum number of spans that each have a separate line."""

STYLES = {
    "productive": "green",
    "overhead": "yellow",
    "wasted": "red",
    "idle": "bright_black",
    "": "default",
}
"""Bucket to rich style; spans that only group others have the empty bucket."""

_MARKS = {"productive": "█", "overhead": "▓", "wasted": "x", "idle": "░", "": "─"}
# Bounds the output for any trace.
_MAX_SHOWN = 4 * MAX_LINES


class Bar:
    """The bar of a waterfall line: intervals of a step, drawn over the available width."""

    def __init__(self, intervals: Iterable[Interval], step: Interval, bucket: str) -> None:
        self._intervals = union((start, max(end, start + 1)) for start, end in intervals)
        self._step = step
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
        """Return the bar in ``width`` characters; each interval has at least one."""
        start, end = self._step
        length = max(1, end - start)
        drawn = [" "] * width
        for first, last in self._intervals:
            # Integer arithmetic: a float cannot represent nanoseconds since 1970 exactly.
            left = min(max(0, (first - start) * width // length), width - 1)
            right = min(max(left + 1, -((start - last) * width // length)), width)
            drawn[left:right] = mark * (right - left)
        return "".join(drawn)


@dataclass(frozen=True)
class WaterfallLine:
    """One line of a waterfall, in printable text.

    Attributes:
        guide: indentation with the lines of the tree.
        name: the span's name, with the number of spans if the line represents several.
        process: label of the process, or the number of processes.
        offset_seconds: seconds from the start of the step; negative if a clock was behind.
        seconds: duration, summed over the spans; None if not reported.
        bar: bar of the spans' times.
        critical: whether a span is on the critical path.
        failed: whether a span has the outcome error.
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
    """Return the lines of a step's waterfall.

    Up to `MAX_LINES` spans have a line each. Beyond that, siblings of the same name and process
    share a line; if those are still too many, siblings of the same name.

    Returns:
        The lines, and a sentence about merged and omitted lines; empty if there are none.
    """
    count = len(step.spans)
    rows: list[_Row] = []
    for alike in _ALIKE:
        rows = _rows(step, alike)
        if len(rows) <= MAX_LINES:
            break
    critical = {segment.span.span_id for segment in path}
    lines = [_line(step, row, critical) for row in rows[:_MAX_SHOWN]]
    notes = []
    if len(rows) < count:
        notes.append(
            f"{count} spans in {len(rows)} lines: similar siblings share a line, "
            "\N{MULTIPLICATION SIGN}n is their number, and the duration is their sum"
        )
    if len(rows) > _MAX_SHOWN:
        notes.append(f"the last {len(rows) - _MAX_SHOWN} lines are omitted")
    return lines, "; ".join(notes)


def legend() -> Text:
    """Return the legend of the bars' characters and colors."""
    text = Text("* critical path")
    for bucket, mark in _MARKS.items():
        text.append("   ").append(mark * 2, style=STYLES[bucket])
        text.append(f" {bucket or 'no bucket'}")
    return text


_Key = tuple[object, ...]
_Row = tuple[Sequence[Span], str]
"""The spans of one line, and its guide."""


# Keys of spans that share a line, from the finest to the coarsest.
_ALIKE: tuple[Callable[[Span], _Key], ...] = (
    lambda span: (span.span_id,),
    lambda span: (span.name, span.process, attributes.bucket(span)),
    lambda span: (span.name, attributes.bucket(span)),
)


def _rows(step: Step, alike: Callable[[Span], _Key]) -> list[_Row]:
    """Return the tree from top to bottom, with siblings of the same key merged."""
    rows: list[_Row] = []
    waiting = [(spans, "", "") for spans in reversed(_grouped(step.tree.tops, alike))]
    while waiting:
        spans, guide, below = waiting.pop()
        rows.append((spans, guide))
        children = _grouped(
            [child for span in spans for child in step.children(span.span_id)], alike
        )
        for place, group in reversed([*enumerate(children, 1)]):
            last = place == len(children)
            waiting.append(
                (group, below + ("└ " if last else "├ "), below + ("  " if last else "│ "))
            )
    return rows


def _grouped(spans: Sequence[Span], alike: Callable[[Span], _Key]) -> list[tuple[Span, ...]]:
    groups: dict[_Key, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        groups.setdefault(alike(span), []).append(span)
    return [tuple(group) for group in groups.values()]


def _line(step: Step, row: _Row, critical: set[str]) -> WaterfallLine:
    spans, guide = row
    first = spans[0]
    timed = [span.seconds for span in spans if span.is_timed]
    seconds = sum(timed) if timed else None
    many = f" \N{MULTIPLICATION SIGN}{len(spans)}" if len(spans) > 1 else ""
    processes = Counter(span.process for span in spans)
    label = step.labels[first.process] if len(processes) == 1 else f"{len(processes)} processes"
    intervals = [(span.start_ns, span.end_ns) for span in spans]
    return WaterfallLine(
        guide=guide,
        name=f"{printable(first.name)}{many}",
        process=label,
        offset_seconds=(first.start_ns - step.start_ns) / 1e9,
        seconds=seconds,
        bar=Bar(intervals, (step.start_ns, step.end_ns), attributes.bucket(first) or ""),
        critical=any(span.span_id in critical for span in spans),
        failed=any(span.outcome == "error" for span in spans),
    )
