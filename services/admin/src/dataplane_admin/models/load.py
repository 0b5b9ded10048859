"""Load of engines and nodes over time."""

from __future__ import annotations

from typing import Literal

from dataplane_admin.models.base import Model, Text


class LoadSeries(Model):
    """One metric of an engine or node."""

    metric: str
    """``running``, ``waiting``, ``kv_cache``, ``generation_tokens``, ``prompt_tokens``,
    ``prefix_hits`` or ``preemptions`` of an engine; ``cpu``, ``memory``, ``gpu`` or ``gpu_memory``
    of a node."""
    unit: str
    """``1`` is a share from 0 to 1."""
    device: Text
    """The GPU; empty if the metric has none."""
    times_s: list[float]
    """Times of the values, in seconds since the start of the period."""
    values: list[float | None]
    """Values at these times. The value of a counter is a rate or share over an interval; its time
    is the middle of that interval. None where a counter restarted, or the source was silent."""


class LoadSubject(Model):
    """An engine or a node."""

    kind: Literal["engine", "node"]
    name: Text
    run_id: Text
    """Id of the run; empty if the subject reports none."""
    series: list[LoadSeries]


class Load(Model):
    """Load of engines and nodes in a period."""

    start_ns: int
    end_ns: int
    subjects: list[LoadSubject]
    """Engines first, each kind by name."""
    omitted: dict[str, int]
    """Number of engines and of nodes beyond the maximum, by kind."""
