"""The figures of a step as tables of printable text, for the terminal and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from observability.views import attributes
from observability.views.critical_path import Segment
from observability.views.figures import bytes_by_stage, longest_segments, slowest, waste
from observability.views.printable import printable
from observability.views.processes import bucket_seconds, process_times
from observability.views.quantities import duration, percent, size
from observability.views.steps import Step


@dataclass(frozen=True)
class Column:
    """A column of a table; columns of numbers are right-aligned."""

    name: str
    is_numeric: bool = False


@dataclass(frozen=True)
class Table:
    """A table of printable text.

    Attributes:
        title: heading of the table.
        columns: columns from left to right.
        rows: rows from top to bottom, with a cell per column.
        notes: sentences below the table.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def tables_of(step: Step, path: Sequence[Segment]) -> list[Table]:
    """Return the tables of a step, without empty ones.

    Args:
        step: the step.
        path: its critical path.
    """
    tables = [_processes(step), _path(step, path), _bytes(step), _buckets(step), _slowest(step)]
    return [table for table in tables if table.rows]


def _processes(step: Step) -> Table:
    times = process_times(step)
    # Only asynchronous runs have such time, and the table should fit 80 columns.
    has_others = any(time.busy_elsewhere for time in times)
    others = ["other traces", "of step"] if has_others else []
    return Table(
        "Processes",
        _columns("process", "busy", "of step", *others, "bubble", "of step"),
        [
            _row(
                time.label,
                *_duration_and_share(time.busy_seconds, time.step_seconds),
                *_duration_and_share(time.elsewhere_seconds, time.step_seconds)[: len(others)],
                *_duration_and_share(time.bubble_seconds, time.step_seconds),
            )
            for time in times
        ],
    )


def _duration_and_share(seconds: float | None, total: float) -> tuple[str, str]:
    return ("n/a", "n/a") if seconds is None else (duration(seconds), percent(seconds, total))


def _path(step: Step, path: Sequence[Segment]) -> Table:
    longest, others = longest_segments(path)
    rows = [
        _row(
            segment.span.name,
            step.labels[segment.span.process],
            duration((segment.start_ns - step.start_ns) / 1e9),
            duration(segment.seconds),
            percent(segment.seconds, step.seconds),
        )
        for segment in longest
    ]
    if others:
        seconds = sum(segment.seconds for segment in others)
        label = f"{len(others)} shorter segments"
        rows.append(_row(label, "", "", duration(seconds), percent(seconds, step.seconds)))
    return Table("Critical path", _columns("span", "process", "start", "duration", "of step"), rows)


def _bytes(step: Step) -> Table:
    return Table(
        "Bytes by stage",
        _columns("stage", "put", "get"),
        [_row(stage.stage, size(stage.put), size(stage.get)) for stage in bytes_by_stage(step)],
    )


def _buckets(step: Step) -> Table:
    seconds = bucket_seconds(step)
    total = sum(seconds.values())
    wasted = waste(step)
    return Table(
        "Process-seconds by bucket",
        _columns("bucket", "duration", "share"),
        [
            _row(bucket, duration(seconds[bucket]), percent(seconds[bucket], total))
            for bucket in seconds
        ],
        (
            f"dropped: {wasted.dropped} of {wasted.put} samples, {percent(wasted.share, 1)}, "
            f"worth {duration(wasted.seconds)} of productive rollout",
            _staleness(step),
        ),
    )


def _staleness(step: Step) -> str:
    staleness = step.staleness
    if staleness is None:
        return "staleness: unknown"
    unknown = f" ({staleness.unknown} more unknown)" if staleness.unknown else ""
    return (
        f"staleness: {staleness.minimum} to {staleness.maximum} versions, "
        f"mean {staleness.mean:.2f}, of {staleness.samples} samples{unknown}"
    )


def _slowest(step: Step) -> Table:
    rows = []
    for span in slowest(step):
        n_bytes = attributes.integer(span.attributes, "dataplane.bytes")
        rows.append(
            _row(
                span.name,
                step.labels[span.process],
                duration(span.reported_seconds),
                attributes.bucket(span) or "",
                "" if n_bytes is None else size(n_bytes),
            )
        )
    columns = _columns("span", "process", "duration", "bucket", "size")
    return Table("Slowest operations", columns, rows)


def _columns(*names: str) -> list[Column]:
    """Return columns; all but spans, processes, stages and buckets are numeric."""
    texts = {"span", "process", "stage", "bucket"}
    return [Column(name, is_numeric=name not in texts) for name in names]


def _row(*cells: str) -> list[str]:
    return [printable(cell) for cell in cells]
