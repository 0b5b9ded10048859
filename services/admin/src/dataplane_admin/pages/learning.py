"""Learning section of the run page: the metrics of a run's steps, one panel each.

The server names the panels, so that nothing moves when ``curves.js`` fetches and draws the curves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataplane_admin import models
from dataplane_admin.pages import marks
from dataplane_admin.service import AdminService

_TITLES: Mapping[str, str] = {
    "rl.reward.mean": "Reward",
    "rl.reward.std": "Reward spread",
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

REWARD = "rl.reward.mean"
_SPARK_POINTS = 60
_MAX_CURVES = 8
"""Maximum number of curves of a panel, by the colors that can be distinguished."""


@dataclass(frozen=True)
class Line:
    """A curve of a panel: its attributes as text, empty without any, and its last value."""

    label: str
    value: str


@dataclass(frozen=True)
class Panel:
    """A metric; ``omitted`` counts the curves that are not drawn."""

    name: str
    title: str
    unit: str
    lines: Sequence[Line]
    omitted: int


@dataclass(frozen=True)
class Learning:
    """Content of the section: documented metrics, and all others."""

    run_id: str
    panels: Sequence[Panel]
    others: Sequence[Panel]


def learning(service: AdminService, run: str) -> Learning:
    """Return the section of a run."""
    by_name: dict[str, list[models.CurveFacts]] = {}
    for curve in service.curve_facts(run):
        by_name.setdefault(curve.name, []).append(curve)
    return Learning(
        run_id=run,
        panels=[_panel(by_name[name], title) for name, title in _TITLES.items() if name in by_name],
        others=[_panel(curves, name) for name, curves in by_name.items() if name not in _TITLES],
    )


def reward_trend(service: AdminService, run: str) -> marks.Trend | None:
    """Return the reward of a run over its steps, None for fewer than two points."""
    curves = service.run_curves(run=run, names=[REWARD], max_points=_SPARK_POINTS).curves
    values = [value for curve in curves[:1] for value in curve.values if value is not None]
    return marks.trend(values, base=min(values, default=0.0))


def number(value: float | None) -> str:
    """Return a value with four significant digits; a dash if it is not finite."""
    if value is None or not math.isfinite(value):
        return "-"
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _panel(curves: Sequence[models.CurveFacts], title: str) -> Panel:
    unit = curves[0].unit
    return Panel(
        name=curves[0].name,
        title=title,
        unit="" if unit == "1" else unit.replace("{", "").replace("}", ""),
        lines=[
            Line(
                ", ".join(str(value) for value in curve.attributes.values()),
                number(curve.last_value),
            )
            for curve in curves[:_MAX_CURVES]
        ],
        omitted=len(curves[_MAX_CURVES:]),
    )
