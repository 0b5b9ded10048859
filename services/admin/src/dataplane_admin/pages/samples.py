"""List of samples, the samples of a group, and the colored tokens of one sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast, get_args

from dataplane_admin import models
from dataplane_admin.pages.learning import number
from dataplane_admin.pages.links import Link, to, to_sample
from dataplane_admin.pages.params import Params, check_choice
from dataplane_admin.pages.runs import Column, sort_columns
from dataplane_admin.pages.shell import next_page
from dataplane_admin.service import AdminService, Refused
from dataplane_admin.service.samples import THRESHOLD

_FILTERS = (
    "run",
    "step",
    "group",
    "state",
    "tagged",
    "truncated",
    "text",
    "min_reward",
    "max_reward",
    "min_length",
    "max_length",
    "sort",
    "order",
)
_SORTS: dict[models.SampleSort, str] = {
    "step": "Step",
    "reward": "Reward",
    "advantage": "Advantage",
    "length": "Length, tokens",
}
_YES_NO = {"yes": True, "no": False}
COLORS = {
    "logprob": "Log-probability",
    "difference": "Difference",
    "mask": "Mask",
    "version": "Weight version",
}
_LEGENDS = {
    "logprob": (
        ("c0", "above -0.1 nats"),
        ("c1", "-0.1 to -1 nats"),
        ("c2", "-1 to -3 nats"),
        ("c3", "below -3 nats"),
    ),
    "difference": (
        ("c0", "below 0.05 nats"),
        ("c1", "0.05 to 0.2 nats"),
        ("c2", "0.2 to 0.5 nats"),
        ("c3", "above 0.5 nats"),
    ),
    "mask": (("v1", "trained on"), ("c0", "not trained on")),
}
_VERSION_COLORS = 6


@dataclass(frozen=True)
class SampleList:
    """Content of the list; ``query`` has the filters as in the URL."""

    samples: Sequence[models.SampleFacts]
    query: dict[str, str]
    filtered: bool
    columns: Sequence[Column]
    next_url: Link | None
    first_url: Link | None


@dataclass(frozen=True)
class TokenOnPage:
    """A token with the CSS class of its color; ``facts`` is its tooltip."""

    text: str
    color: str
    facts: str
    first: bool


@dataclass(frozen=True)
class ContentPage:
    """Content of the section with conversation and tokens."""

    content: models.SampleContent
    tokens: Sequence[TokenOnPage]
    color: str
    colors: Sequence[tuple[str, str, Link]]
    legend: Sequence[tuple[str, str]]
    first_token: str


def sample_list(service: AdminService, params: Params) -> SampleList:
    """Return the list of samples. Raises ServiceError if a parameter is invalid."""
    query = {name: params.text(name) for name in _FILTERS}
    for name, known in (
        ("truncated", ("yes", "no")),
        ("text", ("yes", "no")),
        ("sort", get_args(models.SampleSort)),
        ("order", ("ascending",)),
    ):
        check_choice(name, query[name], known)
    sort = cast("models.SampleSort", query["sort"] or "newest")
    ascending = query["order"] == "ascending"
    page = service.sample_facts(
        run=params.maybe("run"),
        step=params.integer("step"),
        group=params.maybe("group"),
        state=params.maybe("state"),
        tag=params.maybe("tagged"),
        truncated=_YES_NO.get(query["truncated"]),
        text=_YES_NO.get(query["text"]),
        min_reward=_signed(query, "min_reward"),
        max_reward=_signed(query, "max_reward"),
        min_length=params.integer("min_length"),
        max_length=params.integer("max_length"),
        sort=sort,
        ascending=ascending,
        cursor=params.maybe("cursor"),
        limit=params.rows("samples"),
    )
    return SampleList(
        samples=page.samples,
        query=query,
        filtered=any(query[name] for name in _FILTERS if name not in ("sort", "order")),
        columns=sort_columns(
            _SORTS.items(), sort, ascending, lambda **order: to("/samples", **{**query, **order})
        ),
        next_url=next_page("/samples", query, page.next),
        first_url=to("/samples", **query) if params.text("cursor") else None,
    )


def members(group: models.SampleGroup) -> list[tuple[str, models.SampleFacts, str | None]]:
    """Return short name, facts and last response of each sample of a group."""
    return [
        (
            sample.sample_id.removeprefix(group.group).lstrip("_-+/.:") or sample.sample_id,
            sample,
            text,
        )
        for sample, text in zip(group.samples, group.responses, strict=True)
    ]


def content_page(
    content: models.SampleContent, color: str, partition: str | None = None
) -> ContentPage:
    """Return the section of a sample with stored text.

    Args:
        color: one of `COLORS`; the first if empty.
        partition: partition to which the page limits the lifecycle; links keep it.

    Raises:
        Refused: the color is unknown.
    """
    check_choice("color", color, [*COLORS])
    color = color or "logprob"
    facts, divergence = content.facts, content.divergence
    to_page = partial(to_sample, facts.sample_id, facts.run_id, partition=partition)
    first = None if divergence is None else divergence.place
    versions = sorted({each.version for each in content.tokens if each.version is not None})
    named = {version: f"v{place % _VERSION_COLORS}" for place, version in enumerate(versions)}
    of_token: dict[str, Callable[[models.Token], str]] = {
        "logprob": lambda each: _level(each.generator, (0.1, 1.0, 3.0)),
        "difference": lambda each: _level(each.difference, (0.05, 0.2, THRESHOLD)),
        "mask": lambda each: "unknown" if each.mask is None else "v1" if each.mask else "c0",
        "version": lambda each: "unknown" if each.version is None else named[each.version],
    }
    classes = [of_token[color](each) for each in content.tokens]
    by_version = [(named[version], f"version {version}") for version in versions]
    unknown = [("unknown", "unknown")] if "unknown" in classes else []
    return ContentPage(
        content=content,
        tokens=[
            TokenOnPage(each.text, classes[place], _words(place, each), place == first)
            for place, each in enumerate(content.tokens)
        ],
        color=color,
        colors=[
            (
                name,
                title,
                Link(f"{to_page(color=name)}#tokens"),
            )
            for name, title in COLORS.items()
        ],
        legend=[*(by_version if color == "version" else _LEGENDS[color]), *unknown],
        first_token="" if first is None else content.tokens[first].text,
    )


def _level(value: float | None, bounds: Sequence[float]) -> str:
    """Return the CSS class of a size: ``c0`` is the smallest."""
    return "unknown" if value is None else f"c{sum(abs(value) > bound for bound in bounds)}"


def _words(place: int, token: models.Token) -> str:
    parts = [f"token {place}"]
    for name, value in (
        ("generator", token.generator),
        ("trainer", token.trainer),
        ("difference", token.difference),
    ):
        if value is not None:
            parts.append(f"{name} {number(value)}")
    if token.mask is not None:
        parts.append("trained on" if token.mask else "not trained on")
    if token.version is not None:
        parts.append(f"weight version {token.version}")
    return ", ".join(parts)


def _signed(query: dict[str, str], name: str) -> float | None:
    text = query[name].strip()
    try:
        value = float(text) if text else None
    except ValueError:
        value = float("nan")
    if value is not None and not abs(value) < 1e300:
        raise Refused(f"{name} is '{text[:40]}'; expected a number")
    return value
