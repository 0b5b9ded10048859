"""Table of the span names of a trace, sorted by a column. A click on a name marks its spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dataplane_admin import models
from dataplane_admin.pages.links import Link
from dataplane_admin.pages.params import check_choice
from dataplane_admin.pages.runs import Column, sort_columns

_SORTS: dict[str, tuple[str, Callable[[models.SpanGroup], float]]] = {
    "count": ("Spans", lambda row: row.count),
    "errors": ("Failed", lambda row: row.errors),
    "total": ("Total", lambda row: row.total_s),
    "self": ("Self", lambda row: row.self_s),
    "p50": ("p50", lambda row: row.p50_s or 0.0),
    "p95": ("p95", lambda row: row.p95_s or 0.0),
    "max": ("Max", lambda row: row.max_s or 0.0),
    "share": ("Share", lambda row: row.active_s),
}
DEFAULT_SORT = "self"


@dataclass(frozen=True)
class NameRow:
    """A row of the table; ``url`` marks its spans, or removes the marks if it is ``marked``."""

    group: models.SpanGroup
    tone: int
    share: float | None
    """Percent of the trace's duration."""
    url: Link
    marked: bool


@dataclass(frozen=True)
class NameTable:
    """The table of span names."""

    rows: Sequence[NameRow]
    columns: Sequence[Column]
    hidden: int
    """Number of names that are not shown."""


def name_table(
    trace: models.Trace,
    query: Mapping[str, str],
    tones: Mapping[str, int],
    url: Callable[..., Link],
    max_names: int,
) -> NameTable:
    """Return the table in the order of ``query``; ``url`` is `TracePage.url`.

    Raises Refused if the sort order is invalid.
    """
    sort, ascending = query["sort"] or DEFAULT_SORT, query["order"] == "ascending"
    check_choice("sort", sort, [*_SORTS])
    check_choice("order", query["order"], ["ascending"])
    rank = _SORTS[sort][1]
    groups = sorted(trace.names, key=rank, reverse=not ascending)
    rows = []
    for group in groups[:max_names]:
        marked = (query["name"], query["service"]) == (group.name, group.service)
        mark = {"name": "", "service": ""} if marked else None
        rows.append(
            NameRow(
                group,
                tones[group.service],
                100 * group.active_s / trace.seconds if trace.seconds else None,
                url(**(mark or {"name": group.name, "service": group.service})),
                marked,
            )
        )
    titles = [(name, title) for name, (title, _) in _SORTS.items()]
    columns = sort_columns(titles, sort, ascending, url)
    return NameTable(rows, columns, trace.names_omitted + max(0, len(groups) - max_names))
