"""Learning section of the run page and of the run comparison: a panel for each step metric.

The server renders the panels, so that nothing moves when ``curves.js`` draws the curves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataplane_admin import models
from dataplane_admin.pages import marks
from dataplane_admin.pages.links import Link, to
from dataplane_admin.service import AdminService
from dataplane_admin.store.read_curves import SAMPLES, TIME

_TITLES: Mapping[str, str] = {
    "rl.reward.mean": "Reward",
    "rl.reward.generated": "Reward, generated",
    "rl.reward.std": "Reward std",
    "rl.reward.component": "Reward components",
    "rl.validation.pass_rate": "Validation pass rate",
    "rl.validation.reward": "Validation reward",
    "rl.loss": "Loss",
    "rl.kl": "KL divergence",
    "rl.entropy": "Entropy",
    "rl.clip_fraction": "Clip fraction",
    "rl.grad_norm": "Gradient norm",
    "rl.learning_rate": "Learning rate",
    "rl.response.length": "Response length",
    "rl.response.truncated": "Truncated responses",
    "rl.logprob_gap.mean": "Log-probability gap",
    "rl.logprob_gap.p99": "Log-probability gap, p99",
    "rl.staleness.mean": "Staleness",
    "rl.staleness.max": "Staleness, maximum",
    "rl.samples_per_s": "Samples trained",
    "rl.tokens_per_s": "Tokens trained",
    "rl.generation.tokens_per_s": "Tokens generated",
}
"""Titles of the documented metrics, in the order of their panels."""

_SPARKS = ("rl.reward.mean", "rl.loss", "rl.kl", "rl.entropy", "rl.response.length")
_SPARK_POINTS = 60
_MAX_CURVES = 8
"""Maximum number of curves of a panel: the number of distinguishable colors."""


@dataclass(frozen=True)
class Line:
    """A curve of a panel, and its last value.

    ``label`` is the run in a comparison, else the attributes of the curve. ``ink`` is the index of
    its color; in a comparison, all curves of a run have the same one.
    """

    label: str
    value: str
    ink: int


@dataclass(frozen=True)
class Panel:
    """The panel of a metric; ``omitted`` counts the curves that are not drawn.

    ``attributes`` has the attributes that its curves share, as JSON; it is empty for a single run.
    """

    name: str
    title: str
    unit: str
    lines: Sequence[Line]
    omitted: int = 0
    attributes: str = ""


@dataclass(frozen=True)
class Learning:
    """Content of the section: documented metrics, and all others.

    ``points`` is the URL of the points of all curves.
    """

    points: Link
    panels: Sequence[Panel]
    others: Sequence[Panel]


@dataclass(frozen=True)
class Tile:
    """A metric on the overview: its value at its last step, and its trend."""

    title: str
    value: float
    step: int
    trend: marks.Trend


def learning(service: AdminService, run: str) -> Learning:
    """Return the section of a run."""
    by_name: dict[str, list[models.CurveFacts]] = {}
    for curve in service.store.curve_facts(run):
        by_name.setdefault(curve.name, []).append(curve)
    panels = [_panel(curves) for curves in by_name.values()]
    return _learning(to("/api/v1/runs/curves", run=run), panels)


def compared_learning(service: AdminService, runs: Sequence[str], axis: models.Axis) -> Learning:
    """Return the section of several runs, with a panel for each metric and set of attributes."""
    by_kind: dict[tuple[str, str], list[tuple[int, models.CurveFacts]]] = {}
    for ink, run in enumerate(runs):
        for curve in service.store.curve_facts(run):
            kind = curve.name, json.dumps(curve.attributes, ensure_ascii=False)
            by_kind.setdefault(kind, []).append((ink, curve))
    panels = [
        Panel(
            name=name,
            title=", ".join([_title(name), *_label(curves[0][1])]),
            unit=_unit(curves[0][1]),
            lines=[Line(runs[ink], _last(curve), ink) for ink, curve in curves],
            attributes=attributes,
        )
        for (name, attributes), curves in by_kind.items()
    ]
    return _learning(to("/api/v1/runs/curves", run=[*runs], axis=axis), panels)


def _learning(points: Link, panels: Sequence[Panel]) -> Learning:
    order = [*_TITLES]
    documented = [panel for panel in panels if panel.name in _TITLES]
    return Learning(
        points=points,
        panels=sorted(documented, key=lambda panel: order.index(panel.name)),
        others=[panel for panel in panels if panel.name not in (*_TITLES, TIME, SAMPLES)],
    )


def learning_tiles(service: AdminService, run: str) -> list[Tile]:
    """Return the main metrics of a run that have two points or more."""
    store = service.store
    tiles = []
    for name in _SPARKS:
        # The first curve has no attributes, if there is such a curve.
        curves = store.curves(run, names=[name], max_points=_SPARK_POINTS, limit=1)
        if not curves:
            continue
        [curve] = curves
        known = [value for value in curve.values if value is not None]
        trend = marks.trend(known, base=min(known, default=0.0))
        if trend is not None:
            value = math.nan if curve.last_value is None else curve.last_value
            tiles.append(Tile(_title(curve.name), value, curve.last_step, trend))
    return tiles


def number(value: float | None) -> str:
    """Return a rounded value; a dash if it is None, NaN if it is not finite."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _last(curve: models.CurveFacts) -> str:
    return number(math.nan if curve.last_value is None else curve.last_value)


def _panel(curves: Sequence[models.CurveFacts]) -> Panel:
    return Panel(
        name=curves[0].name,
        title=_title(curves[0].name),
        unit=_unit(curves[0]),
        lines=[
            Line(", ".join(_label(curve)), _last(curve), ink)
            for ink, curve in enumerate(curves[:_MAX_CURVES])
        ],
        omitted=len(curves[_MAX_CURVES:]),
    )


def _title(name: str) -> str:
    return _TITLES.get(name, name)


def _unit(curve: models.CurveFacts) -> str:
    return "" if curve.unit == "1" else curve.unit.replace("{", "").replace("}", "")


def _label(curve: models.CurveFacts) -> list[str]:
    return [str(value) for value in curve.attributes.values()]
