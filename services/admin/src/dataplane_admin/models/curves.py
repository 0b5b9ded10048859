"""Curves: metrics of a run over its steps."""

from __future__ import annotations

from dataplane_admin.models.base import Model, Text, Values


class CurveFacts(Model):
    """Summary of a curve: a metric of a run over its steps, for one set of attributes."""

    name: Text
    unit: Text
    attributes: Values
    """Attributes of its points, without ``rl.run_id`` and ``rl.step``."""
    points: int
    """Number of steps with a point; of a repeated step only the last point counts."""
    first_step: int
    last_step: int
    last_value: float | None
    """Value at ``last_step``; None if it is not finite."""


class Curve(CurveFacts):
    """A metric of a run over its steps; the lists have one item per bucket."""

    width: int
    """Number of steps of a bucket."""
    steps: list[int]
    """First step of each bucket."""
    values: list[float | None]
    """Mean of the bucket's finite values; None without any."""
    low: list[float | None]
    """Smallest value; empty if ``width`` is 1. ``high`` likewise."""
    high: list[float | None]
