"""Sample lifecycles, sample searches, waits, and staleness."""

from __future__ import annotations

from typing import Literal

from dataplane_admin.models.base import Model, Text
from dataplane_admin.models.partitions import Sample


class SampleHit(Model):
    """A sample that matches a search."""

    sample_id: Text
    partition: Text
    run_id: Text
    """Id of the run; empty if unknown."""
    weight_version: int | None
    """Version of the weights that generated it."""
    first_ns: int | None
    """Time of its first event; None if only the live data plane has it."""
    last_ns: int | None
    """Time of its last event."""
    live: bool
    """True if it was found in the live data plane. A search by id inspects the data plane
    only if no stored sample has exactly that id."""


class SampleHits(Model):
    """Samples by id prefix, or by a tag."""

    samples: list[SampleHit]
    next: str | None
    """The cursor of the next page; None if this is the last."""
    notes: list[Text]
    """Limits of the search, a sentence each."""


class Hop(Model):
    """One event of a sample."""

    time_ns: int
    """Time by the clock of its process, corrected within its trace."""
    seconds: float
    """Seconds since the sample's first event."""
    name: Text
    """The event: ``put``, ``claimed``, ``read``, ``trained``, ``acknowledged``, ``cleared``, ..."""
    process: Text
    partition: Text
    task: Text
    """Task that claimed, acknowledged, released or trained; else empty."""
    stage: Text
    """Stage of the step during which the event happened; empty if unknown."""
    fields: list[Text]
    nbytes: float | None
    """Bytes of the batch divided by its samples; None if unknown."""
    batch: int
    """Number of samples in the batch."""
    weight_version: int | None
    run_id: Text
    step: int | None
    trace_id: Text
    """Id of its trace; empty if there is none."""
    span_id: Text
    detail: Text
    """Details: the reason of a drop, the wait of a claim."""
    whole_partition: bool
    """True if the entire partition was cleared, not this sample by id."""


class SampleLife(Model):
    """The lifecycle of one sample in one run."""

    sample_id: Text
    run_id: Text
    """Id of the run; empty if its records name none."""
    other_runs: list[Text]
    """Other runs with this sample id, newest first, at most 100; empty text for no run."""
    partition: Text | None
    """The requested partition; None for all."""
    hops: list[Hop]
    """Events in the order in which they happened; empty without events."""
    live: Sample | None
    """State of the sample in the live data plane; None if it is not there, unknown, or of another
    run."""
    live_run_id: Text | None
    """Run whose sample with this id is in the live data plane; None if none is known."""
    notes: list[Text]
    """Limits of the search, a sentence each."""


class MissingField(Model):
    """Samples that lack a field."""

    count: int
    examples: list[Text]
    """Ids of some of them, in the order of first puts."""


class Wait(Model):
    """One reason why a run is blocked."""

    kind: Literal["wait", "backlog", "claim", "fault"]
    """``wait``: a blocked claim or call. ``backlog``: samples that a task has left unclaimed for a
    long time. ``claim``: a claim that has not been acknowledged for a long time. ``fault``: the
    data plane no longer answers its clients."""
    sentence: Text
    """One sentence with numbers."""
    task: Text
    """Name of the task; empty for a call or fault."""
    process: Text
    """The blocked process, or the holder of the claim; empty if unknown."""
    partition: Text
    """Id of the partition; empty if none."""
    run_id: Text
    step: int | None
    since_ns: int
    seconds: float
    """Duration so far; of a silent process, until it was last seen."""
    silent_s: float | None
    """Seconds since its process was last seen; None unless it is silent. Silent ones come last."""
    requested: int
    """Samples requested; 0 if unknown."""
    ready: int
    present: int
    lacks: dict[Text, MissingField]
    """Field to the samples that lack it."""
    blocking: list[Text]
    """Ids of blocking samples."""
    claim: Text
    """Name of the claim if the kind is ``claim``; else empty."""


class Staleness(Model):
    """Weight versions between generation and training."""

    run_id: Text
    """Id of the run; empty if there is none."""
    steps: int
    """Number of newest steps requested, omitted ones included."""
    steps_omitted: int
    """Number of oldest steps that are omitted because the newer ones have enough samples."""
    counts: dict[int, int]
    """Number of samples by versions between generation and training."""
    mean: float | None
    """Mean number of versions; None if no version is known."""
    unknown: int
    """Trained samples with an unknown version."""
