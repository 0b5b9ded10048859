"""The figures of a step as tables of printable text, the same for terminal and page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from observability.views import attributes
from observability.views.critical_path import Segment
from observability.views.figures import bytes_by_stage, condensed, slowest, waste
from observability.views.printable import printable
from observability.views.processes import bucket_seconds, process_times
from observability.views.quantities import duration, percent, size
from observability.views.steps import Step


@dataclass(frozen=True)
class Column:
    """A column; numbers stand to the right."""

    name: str
    number: bool = False


@dataclass(frozen=True)
class Table:
    """A table of printable text.

    Attributes:
        title: what it shows.
        columns: from left to right.
        rows: a cell per column.
        notes: sentences below it.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def tables_of(step: Step, path: Sequence[Segment]) -> list[Table]:
    """Every table of a step; those without a row are left out."""
    tables = [_processes(step), _path(step, path), _bytes(step), _buckets(step), _slowest(step)]
    return [table for table in tables if table.rows]


def _processes(step: Step) -> Table:
    return Table(
        "Processes",
        _columns("process", "busy s", "busy", "bubble s", "bubble"),
        [
            _row(
                one.label,
                *_seconds_and_share(one.busy_seconds, one.step_seconds),
                *_seconds_and_share(one.bubble_seconds, one.step_seconds),
            )
            for one in process_times(step)
        ],
    )


def _seconds_and_share(seconds: float | None, whole: float) -> tuple[str, str]:
    return ("n/a", "n/a") if seconds is None else (f"{seconds:.3f}", percent(seconds, whole))


def _path(step: Step, path: Sequence[Segment]) -> Table:
    shown, rest = condensed(path)
    rows = [
        _row(
            one.span.name,
            step.labels[one.span.process],
            duration((one.start_ns - step.start_ns) / 1e9),
            f"{one.seconds:.3f}",
            percent(one.seconds, step.seconds),
        )
        for one in shown
    ]
    if rest:
        seconds = sum(one.seconds for one in rest)
        told = f"{len(rest)} shorter ones together"
        rows.append(_row(told, "", "", f"{seconds:.3f}", percent(seconds, step.seconds)))
    return Table("Critical path", _columns("span", "process", "at", "seconds", "of step"), rows)


def _bytes(step: Step) -> Table:
    return Table(
        "Bytes through the data plane",
        _columns("stage", "put", "get"),
        [_row(one.stage, size(one.put), size(one.get)) for one in bytes_by_stage(step)],
    )


def _buckets(step: Step) -> Table:
    seconds = bucket_seconds(step)
    total = sum(seconds.values())
    lost = waste(step)
    return Table(
        "Process-seconds",
        _columns("bucket", "seconds", "share"),
        [
            _row(bucket, f"{seconds[bucket]:.3f}", percent(seconds[bucket], total))
            for bucket in seconds
        ],
        (
            f"dropped: {lost.dropped} of {lost.put} samples, {percent(lost.share, 1)}, "
            f"worth {duration(lost.seconds)} of productive rollout",
            _staleness(step),
        ),
    )


def _staleness(step: Step) -> str:
    stale = step.staleness
    if stale is None:
        return "staleness: not known"
    unknown = f" ({stale.unknown} more are not known)" if stale.unknown else ""
    return (
        f"staleness: {stale.least} to {stale.most} versions, mean {stale.mean:.2f}, "
        f"of {stale.samples} samples{unknown}"
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
    columns = _columns("span", "process", "took", "bucket", "bytes")
    return Table("Slowest operations", columns, rows)


def _columns(*names: str) -> list[Column]:
    """Columns, of which those that name something are not numbers."""
    named = {"span", "process", "stage", "bucket"}
    return [Column(name, name not in named) for name in names]


def _row(*cells: str) -> list[str]:
    return [printable(cell) for cell in cells]
