"""Lives of samples, searches for them, waits, and staleness."""

from __future__ import annotations

from typing import Literal

from dataplane_admin.answers.models.base import Model, Text
from dataplane_admin.answers.models.partitions import Sample


class SampleHit(Model):
    """A sample that was found."""

    sample_id: Text
    partition: Text
    run_id: Text
    """Empty if no event told."""
    weight_version: int | None
    """Of the weights it was generated with."""
    first_ns: int | None
    """Its first event; None if it is only known live."""
    last_ns: int | None
    """Its last event."""
    live: bool
    """Whether it was found in the live data plane; a search by id that the history answered does
    not ask."""


class SampleHits(Model):
    """Samples by the beginning of their id, or by a tag."""

    samples: list[SampleHit]
    next: str | None
    """The cursor of the next page; None if this is the last."""
    notes: list[Text]
    """Sentences about what could not be searched."""


class Hop(Model):
    """One thing that happened to a sample."""

    time_ns: int
    """By the clock of its process."""
    seconds: float
    """Since the sample's first hop."""
    name: Text
    """The event: ``put``, ``claimed``, ``read``, ``trained``, ``acknowledged``, ``cleared``, ..."""
    process: Text
    partition: Text
    task: Text
    """Of a claim, a settlement or training; else empty."""
    stage: Text
    """The step's stage during which it happened; empty if not known."""
    fields: list[Text]
    nbytes: float | None
    """The sample's even share of the batch."""
    batch: int
    """Samples of the whole batch."""
    weight_version: int | None
    run_id: Text
    step: int | None
    trace_id: Text
    """Of its trace; empty if there is none."""
    span_id: Text
    detail: Text
    """What else the event tells: the reason of a drop, the wait of a claim."""
    whole_partition: bool
    """The whole partition was cleared, not this sample by name."""


class SampleLife(Model):
    """One sample from its put to its clear."""

    sample_id: Text
    partition: Text | None
    """The partition that was asked for; None if it was left open."""
    hops: list[Hop]
    """In the order of the times told; empty if no event names it."""
    live: Sample | None
    """As the live data plane has it now; None if it has not, or was not asked."""
    notes: list[Text]
    """Sentences about what could not be looked up."""


class Lack(Model):
    """Samples that lack a field."""

    count: int
    examples: list[Text]
    """Ids of some, in the order of first puts."""


class Wait(Model):
    """One reason why a run stands still."""

    kind: Literal["wait", "backlog", "claim"]
    """``wait``: a claim or call without an answer. ``backlog``: a task has not claimed what has
    long been there. ``claim``: a claim that nobody has settled for long."""
    sentence: Text
    """All of it in one sentence with numbers."""
    task: Text
    """Empty for a call."""
    process: Text
    """Who waits, or holds; empty if not known."""
    partition: Text
    """Empty if the wait is about none."""
    run_id: Text
    step: int | None
    since_ns: int
    seconds: float
    silent_s: float | None
    """Seconds since its process was last heard of, if that is so long that it is taken to be gone;
    else None. Such waits come behind all others."""
    asked: int
    """Samples asked for; 0 if not told."""
    ready: int
    there: int
    lacks: dict[Text, Lack]
    """Field to the samples that lack it."""
    blocking: list[Text]
    """Ids of samples that are waited for, or that stand there."""
    claim: Text
    """The claim, of kind ``claim``; else empty."""


class Staleness(Model):
    """How old the weights were that training's samples were generated with."""

    run_id: Text
    """The run that was counted; empty if nothing has been trained."""
    steps: int
    """Over how many of its last steps, those that are left out included."""
    left_out: int
    """Of those, the oldest that were not counted: the newer ones hold samples enough."""
    counts: dict[int, int]
    """Versions between generation and training to samples."""
    mean: float | None
    """Versions; None if none are known."""
    unknown: int
    """Trained samples of which a version is not known."""
