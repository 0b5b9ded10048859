"""The waterfall of a step as lines: a tree of spans, each with a bar over the time of the step.

If there are more than `MAX_LINES` spans, similar siblings share a line, which shows their number.
"""

from __future__ import annotations

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
"""Maximum number of spans for which each span has its own line."""

STYLES = {
    "productive": "green",
    "overhead": "yellow",
    "wasted": "red",
    "idle": "bright_black",
    "": "default",
}
"""Style of rich by bucket. The empty bucket stands for spans without a bucket."""

_MARKS = {"productive": "█", "overhead": "▓", "wasted": "x", "idle": "░", "": "─"}
"""Character of bars by bucket."""

_MAX_SHOWN = 4 * MAX_LINES
"""Maximum number of lines after siblings are merged; later lines are omitted."""


class Bar:
    """The bar of a waterfall line: intervals of a step, drawn in the available width.

    Args:
        intervals: intervals in nanoseconds since 1970.
        step: interval of the step, which takes the full width.
        bucket: bucket of the spans.
    """

    def __init__(self, intervals: Iterable[Interval], step: Interval, bucket: str) -> None:
        # `union` drops empty intervals, so make those of spans without a duration 1 ns long.
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
        step_start, step_end = self._step
        length = max(1, step_end - step_start)
        characters = [" "] * width
        for start, end in self._intervals:
            # The operands are nanoseconds since the start of the step. Integer division has no
            # rounding errors. The left end is rounded down, the right end up: -(-a // b) is a / b
            # rounded up.
            left = min(max(0, (start - step_start) * width // length), width - 1)
            right = min(max(left + 1, -((step_start - end) * width // length)), width)
            characters[left:right] = mark * (right - left)
        return "".join(characters)


@dataclass(frozen=True)
class WaterfallLine:
    """One line of a waterfall: a span, or several similar siblings. Its text is printable.

    Attributes:
        guide: indentation, with characters that draw the tree.
        name: name of the spans, with their number if there are several.
        process: label of the process; if there are several, their number.
        offset_seconds: seconds from the start of the step to that of the first span; negative if
            the span begins before the step, because a clock is behind.
        seconds: sum of the durations; None if none was reported.
        bar: bar of the spans' times.
        critical: whether at least one span is on the critical path.
        failed: whether at least one span has the outcome error.
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

    With up to `MAX_LINES` spans, each has a line. With more, siblings with the same name, process
    and bucket share a line. If there are still more lines, siblings with the same name and bucket
    share one.

    Args:
        step: the step.
        path: its critical path.

    Returns:
        The lines, and a note about shared and omitted lines, empty if there are none.
    """
    count = len(step.spans)
    rows: list[_Row] = []
    for group_key in _GROUP_KEYS:
        rows = _rows(step, group_key)
        if len(rows) <= MAX_LINES:
            break
    critical_ids = {segment.span.span_id for segment in path}
    lines = [_line(step, row, critical_ids) for row in rows[:_MAX_SHOWN]]
    notes = []
    if len(rows) < count:
        notes.append(
            f"{count} spans in {len(rows)} lines: similar siblings share a line, "
            "\N{MULTIPLICATION SIGN}n is their number, and their durations are summed"
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

# Functions that return the same key for siblings that share a line, the finest grouping first.
_GROUP_KEYS: tuple[Callable[[Span], _Key], ...] = (
    lambda span: (span.span_id,),
    lambda span: (span.name, span.process, attributes.bucket(span)),
    lambda span: (span.name, attributes.bucket(span)),
)


def _rows(step: Step, group_key: Callable[[Span], _Key]) -> list[_Row]:
    """Return the rows of the tree from top to bottom; siblings with the same key share a row."""
    rows: list[_Row] = []
    # A stack of groups, the next one on top: its spans, its guide, the guide of lines below it.
    # Omitted lines have no guide: in a deep tree, guides take far more memory than the spans.
    pending = [(spans, "", "") for spans in reversed(_grouped(step.tree.tops, group_key))]
    while pending:
        spans, guide, guide_below = pending.pop()
        rows.append((spans, guide))
        if len(rows) >= _MAX_SHOWN:
            guide_below = ""
        children = _grouped(
            [child for span in spans for child in step.children(span.span_id)], group_key
        )
        for number, group in reversed([*enumerate(children, 1)]):
            is_last = number == len(children)
            pending.append(
                (
                    group,
                    guide_below + ("└ " if is_last else "├ "),
                    guide_below + ("  " if is_last else "│ "),
                )
            )
    return rows


def _grouped(spans: Sequence[Span], group_key: Callable[[Span], _Key]) -> list[tuple[Span, ...]]:
    """Return the spans in groups of the same key, ordered by start of the first span."""
    groups: dict[_Key, list[Span]] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        groups.setdefault(group_key(span), []).append(span)
    return [tuple(group) for group in groups.values()]


def _line(step: Step, row: _Row, critical_ids: set[str]) -> WaterfallLine:
    spans, guide = row
    first = spans[0]
    durations = [span.seconds for span in spans if span.is_timed]
    seconds = sum(durations) if durations else None
    multiple = f" \N{MULTIPLICATION SIGN}{len(spans)}" if len(spans) > 1 else ""
    processes = {span.process for span in spans}
    label = step.labels[first.process] if len(processes) == 1 else f"{len(processes)} processes"
    intervals = [(span.start_ns, span.end_ns) for span in spans]
    return WaterfallLine(
        guide=guide,
        name=f"{printable(first.name)}{multiple}",
        process=label,
        offset_seconds=(first.start_ns - step.start_ns) / 1e9,
        seconds=seconds,
        bar=Bar(intervals, (step.start_ns, step.end_ns), attributes.bucket(first) or ""),
        critical=any(span.span_id in critical_ids for span in spans),
        failed=any(span.outcome == "error" for span in spans),
    )
