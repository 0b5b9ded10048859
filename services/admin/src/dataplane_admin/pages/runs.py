"""List of runs, and comparison of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import cast, get_args

from dataplane_admin import models
from dataplane_admin.pages import words
from dataplane_admin.pages.actions import checked
from dataplane_admin.pages.learning import Learning, compared_learning
from dataplane_admin.pages.links import Link, to
from dataplane_admin.pages.params import Params, check_choice
from dataplane_admin.service import AdminService

_MAX_RUNS = 200
_SORTS: dict[models.RunSort, str] = {
    "reward": "Last reward",
    "steps": "Steps",
    "duration": "Duration",
    "started": "Started",
}


@dataclass(frozen=True)
class Column:
    """A column to sort by; ``order`` is its ``aria-sort``, empty if another column sorts."""

    title: str
    url: Link
    order: str


@dataclass(frozen=True)
class ComparedRuns:
    """Content of a comparison.

    Attributes:
        axes: name and URL of each axis.
        without: URLs of the comparison, each without one of the runs.
        without_axis: runs that do not report the quantity of the axis.
        without_config: runs that report no configuration.
    """

    compared: models.RunComparison
    learning: Learning
    axis: models.Axis
    axes: Sequence[tuple[str, Link]]
    without: Sequence[Link]
    without_axis: list[str]
    without_config: list[str]


@dataclass(frozen=True)
class RunList:
    """Content of the list; ``query`` has filters and sort order, as in the URL."""

    listed: models.Runs
    query: dict[str, str]
    filtered: bool
    columns: Sequence[Column]
    states: Sequence[str]


def run_list(service: AdminService, params: Params) -> RunList:
    """Return the list of runs. Raises ServiceError if a parameter is invalid."""
    query = {name: params.text(name) for name in ("q", "state", "tag", "sort", "order")}
    states = get_args(models.RunState)
    for name, known in (
        ("state", states),
        ("sort", get_args(models.RunSort)),
        ("order", ("ascending",)),
    ):
        check_choice(name, query[name], known)
    sort = cast("models.RunSort", query["sort"] or "seen")
    ascending = query["order"] == "ascending"
    listed = service.runs(
        q=query["q"] or None,
        state=cast("models.RunState | None", query["state"] or None),
        tag=query["tag"] or None,
        sort=sort,
        ascending=ascending,
        limit=params.rows("runs", _MAX_RUNS),
    )
    return RunList(
        listed=listed,
        query=query,
        filtered=any(query[name] for name in ("q", "state", "tag")),
        columns=sort_columns(
            _SORTS.items(), sort, ascending, lambda **order: to("/runs", **{**query, **order})
        ),
        states=states,
    )


def compared_runs(service: AdminService, params: Params) -> ComparedRuns:
    """Return a comparison.

    Raises ServiceError if a parameter is invalid, or a run does not exist.
    """
    compared = service.compare_runs(params.texts("run"))
    runs = [run.run_id for run in compared.runs]
    known = get_args(models.Axis)
    check_choice("axis", params.text("axis"), known)
    axis = cast("models.Axis", params.text("axis") or "step")
    kept = {"smooth": params.text("smooth")}
    zoom = {name: params.text(name) for name in ("first", "last")}  # of this axis
    return ComparedRuns(
        compared=compared,
        learning=compared_learning(service, runs, axis),
        axis=axis,
        axes=[(name, to("/runs/compare", run=runs, axis=name, **kept)) for name in known],
        without=[
            to("/runs/compare", run=[run for run in runs if run != gone], axis=axis, **kept, **zoom)
            for gone in runs
        ],
        without_axis=service.compare_run_curves(runs, axis=axis, names=[]).without_axis,
        without_config=[run.run_id for run in compared.runs if not run.config],
    )


def tag_change(run_id: str, params: Params) -> models.TagRun:
    """Return the change of tags that a form requests. Raises Refused if a tag is invalid."""
    tags = [tag.strip() for tag in params.text("tags").split(",")]
    return checked(models.TagRun, run=run_id, tags=[tag for tag in tags if tag])


def sort_columns(
    titles: Iterable[tuple[str, str]], sort: str, ascending: bool, url: Callable[..., Link]
) -> list[Column]:
    """Return the columns by which a list can be sorted.

    A click on a column sorts in descending order, the next click in ascending order. ``url``
    returns the URL with the given ``sort`` and ``order``.
    """
    columns = []
    for name, title in titles:
        sorts = name == sort
        order = "ascending" if sorts and not ascending else ""
        shown = ("ascending" if ascending else "descending") if sorts else ""
        columns.append(Column(title, url(sort=name, order=order), shown))
    return columns


def seen_ago(run: models.Run, now_ns: int) -> str:
    """Return how long ago a run was last seen."""
    return words.ago((now_ns - run.seen_ns) / 1e9)
