"""Runs: their state, configuration, tags and curves, and comparisons of runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dataplane_admin.models.base import Model, Text, Values

RunState = Literal["running", "silent", "finished", "stopped", "failed"]
RunSort = Literal["seen", "started", "duration", "steps", "reward"]
Axis = Literal["step", "time", "samples"]

MAX_TAGS = 20
Tag = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\s,]([^,\n]*[^\s,])?$")]


class Run(Model):
    """One run of training."""

    run_id: Text
    state: RunState
    """``silent``: it reported no end, and nothing else for a while. ``stopped``: it ended on
    request before its last step."""
    first_ns: int
    """Time of its first record; ``last_ns`` is the time of its last record."""
    last_ns: int
    seen_ns: int
    """Time at which the service last received a record of it."""
    seconds: float
    """Duration from the first to the last record, pauses before a resume included."""
    steps: int
    reward: float | None
    """Mean reward of its newest step; None if unknown."""
    resumed_from: int | None
    """First step after its last start, if that was a resume."""
    error: Text
    """Class and message of the error that it failed with; empty without one."""
    tags: list[Text]


class RunDetail(Run):
    """One run with its configuration."""

    config: dict[Text, Text]
    """Value of each key, as reported at its last start; empty if not reported."""


class Runs(Model):
    """Runs among the 1,000 with the newest records."""

    runs: list[Run]
    matching: int
    """Number of runs that match the filters, also those beyond the limit."""
    total: int
    """Number of runs before filters."""
    omitted: int
    """Number of stored runs that are not among the 1,000."""
    tags: list[Text]
    """Tags of the runs before filters, sorted."""


class TagRun(Model):
    """Replace the tags of a run."""

    run: str = Field(min_length=1, max_length=4096)
    tags: list[Tag] = Field(max_length=MAX_TAGS)


class TaggedRun(Model):
    """Result of `TagRun`."""

    run_id: Text
    tags: list[Text]
    sentence: Text


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
    """Smallest value of each bucket; ``high`` has the largest. Both are empty if ``width`` is 1."""
    high: list[float | None]


class ConfigDifference(Model):
    """A key with different values in the compared runs."""

    key: Text
    values: list[Text | None]
    """Value of each run; None if it has no such key or reported no configuration."""


class RunComparison(Model):
    """Runs and the differences of their configurations."""

    runs: list[RunDetail]
    differences: list[ConfigDifference]
    """Keys that differ between runs that reported a configuration, sorted."""
    equal: int
    """Number of keys that do not differ."""


class ComparedCurve(Curve):
    """A curve of one of several runs."""

    run: int
    """Index of its run in `ComparedCurves.runs`."""
    x: list[float]
    """Place of each bucket on the axis: step, seconds since the start of the run, or samples."""


class ComparedCurves(Model):
    """Curves of several runs over one axis."""

    axis: Axis
    runs: list[Text]
    """Ids of the runs, as requested."""
    without_axis: list[Text]
    """Runs that do not report time or samples of their steps, and so have no curves here."""
    curves: list[ComparedCurve]
    """Curves in order of run, name and attributes."""
