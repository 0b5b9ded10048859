"""Partition page: numbers, the sample matrix, and the samples of one window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dataplane_admin import models
from dataplane_admin.pages import marks, words
from dataplane_admin.pages.heatmap import HeatMap, heat_map
from dataplane_admin.pages.links import to
from dataplane_admin.pages.params import Params
from dataplane_admin.service import AdminService

_PAGE = 50
_FIRST_PAGE = 25
"""Samples listed if no window is chosen."""


@dataclass(frozen=True)
class PartitionPage:
    """Content of the partition page.

    Attributes:
        contents: the partition and its samples, from one snapshot.
        streams: result of `is_streaming`.
        blocked: the reasons why tasks are blocked, the longest first.
        cause: the first reason in one line.
        severity: ``critical`` if the first task is blocked for too long, else ``warning``.
        window_count: samples of the chosen window, None without one.
    """

    contents: models.PartitionView
    streams: bool
    live: models.LiveStatus
    blocked: Sequence[models.Wait]
    cause: str
    severity: str
    heat: HeatMap | None
    history: Sequence[Line]
    window_count: int | None
    before: str | None
    after: str | None


@dataclass(frozen=True)
class Line:
    """One number over the last hour."""

    name: str
    trend: marks.Trend
    seconds: float


def _lines(history: models.PartitionHistory) -> list[Line]:
    if len(history.times_ns) < 2:
        return []
    seconds = (history.times_ns[-1] - history.times_ns[0]) / 1e9
    numbers = [("samples put", history.put)]
    numbers += [(f"unclaimed by {task.name}", task.unclaimed) for task in history.tasks]
    drawn = [(name, marks.trend(values)) for name, values in numbers]
    return [Line(name, trend, seconds) for name, trend in drawn if trend is not None]


def _cause(wait: models.Wait) -> str:
    """Return why a task is blocked, short enough for one line."""
    if not wait.task or not wait.lacks:
        return wait.sentence
    lacks = [
        f"{words.count(lack.count)} of {words.plural(wait.present, 'sample')} lack {name}"
        for name, lack in wait.lacks.items()
    ]
    return f"task '{wait.task}': {words.listed(lacks, 2)}"


def is_streaming(facts: models.Partition) -> bool:
    """Return whether some samples were cleared and others are present, as in an asynchronous run.

    Then the declared number says nothing about the present samples.
    """
    return facts.put > facts.present > 0


def partition_page(
    service: AdminService,
    params: Params,
    *,
    stuck_after_s: float,
) -> PartitionPage:
    """Return the page of a partition, with the samples of the window in the URL.

    Nothing counts as stuck before ``stuck_after_s`` seconds. Raises ServiceError if the partition
    does not exist or cannot be read, or a parameter is invalid.
    """
    partition_id = params.required("id")
    start, count = params.integer("start"), params.integer("count")
    first = start or 0
    limit = max(1, min(count or _PAGE, _PAGE) if start is not None else _FIRST_PAGE)
    limit = params.rows("samples", limit)
    contents = service.partition_view(partition_id, start=first, limit=limit)
    shown = len(contents.samples.samples)
    before = after = None
    if first > 0:
        before = to("/partition", id=partition_id, start=max(0, first - limit), count=limit)
    if shown and first + shown < contents.samples.total:
        after = to("/partition", id=partition_id, start=first + shown, count=limit)
    blocked = [
        wait for wait in service.why() if wait.partition == partition_id and wait.silent_s is None
    ]
    return PartitionPage(
        contents=contents,
        streams=is_streaming(contents.partition),
        live=service.status().live,
        blocked=blocked,
        cause=_cause(blocked[0]) if blocked else "",
        severity="critical" if blocked and blocked[0].seconds >= stuck_after_s else "warning",
        history=_lines(service.partition_history(partition_id)),
        heat=heat_map(contents.matrix, chosen=start) if contents.matrix.windows else None,
        window_count=count,
        before=before,
        after=after,
    )
