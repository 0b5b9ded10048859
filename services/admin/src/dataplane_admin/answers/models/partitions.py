"""The live data plane: partitions, storage, claims, samples and their matrix."""

from __future__ import annotations

from dataplane_admin.answers.models.base import Model, Text, Values
from dataplane_admin.answers.models.status import LiveStatus


class Claim(Model):
    """A leased claim: samples that one process holds for one task."""

    claim: Text
    """Names the lease; it is not the lease's token, and gives no right to it."""
    task: Text
    """The task that claimed."""
    owner: Text
    """Who claimed: ``host:pid`` of the process; empty if it did not tell."""
    samples: int
    """Samples it still holds."""
    age_s: float
    """Seconds since the claim."""
    expires_in_s: float | None
    """Seconds until the lease runs out, below 0 if it has; None if it never does."""


class PartitionField(Model):
    """One field of a partition."""

    name: Text
    kind: Text | None
    """What its values are; None until one is written."""
    declared: bool
    """Whether the partition was registered with it."""
    written: int
    """Samples that have it, of those that are there."""
    nbytes: int | None
    """Bytes that the store holds of it; None where the store cannot tell."""


class PartitionTask(Model):
    """One task of a partition. ``unclaimed + assigned + leased + settled`` is what is there."""

    name: Text
    unclaimed: int
    """Samples that it can still claim, complete or not."""
    assigned: int
    """Samples that were drawn for data-parallel ranks that have not asked for them yet."""
    leased: int
    """Samples that it has claimed and not acknowledged."""
    settled: int
    """Samples that never return to it: acknowledged, or claimed where there are no leases."""
    leases: int
    """Claims that hold the leased samples."""
    needs: list[Text] | None
    """The fields that its newest claim asked for; None if no event told."""
    ready: int | None
    """Unclaimed samples that have all of ``needs``, as of the partition's last scan; None while
    ``needs`` or the scan is missing."""
    oldest_unclaimed_s: float | None
    """Age of the oldest sample that it has not claimed; None if there is none."""
    oldest_claim: Claim | None
    """Its oldest claim that is neither settled nor released."""
    claimed_per_s: float | None
    """Samples it claimed a second, over the time of ``trend``; None until two polls are there."""
    settled_per_s: float | None
    """Samples it settled a second."""
    backlog_per_s: float | None
    """By how many a second ``unclaimed`` grows; below 0 while the task catches up."""
    backlog: list[int]
    """``unclaimed`` at each moment of the partition's ``polled_ns``."""


class Partition(Model):
    """One partition of the live data plane."""

    id: Text
    declared: int
    """Samples that it was registered for."""
    put: int
    """Samples put since then."""
    present: int
    """Samples that are there now."""
    outstanding: int
    """Declared samples that are still to be put."""
    reserved: int
    """Samples of puts that are under way."""
    cleared: int
    """Samples that were put and are gone."""
    group_size: int | None
    """Samples per prompt that are claimed together; None if they are not."""
    nbytes: int | None
    """Bytes that the store holds of it; None where it cannot tell."""
    revision: int
    """Grows with every change of the partition."""
    fields: list[PartitionField]
    tasks: list[PartitionTask]
    enums: dict[Text, list[Text]]
    """Fields with a fixed vocabulary."""
    put_per_s: float | None
    """Samples put a second over the time of the trend; None until two polls are there."""
    polled_ns: list[int]
    """When the partition was read, oldest first: at most the last 120 times."""
    put_trend: list[int]
    """``put`` at each of those moments."""


class Unit(Model):
    """One storage unit of the live data plane, in bytes."""

    name: Text
    node: Text
    capacity: int
    used: int
    free: int


class Partitions(Model):
    """All partitions, as of one moment."""

    partitions: list[Partition]
    storage: list[Unit]
    """Empty if the backend tells of none."""
    totals: dict[Text, int]
    """What happened in the store since it was made: ``samples_put``, ``leases_expired``, ..."""
    live: LiveStatus


class Window(Model):
    """A stretch of consecutive samples of a partition."""

    start: int
    """Place of its first sample, in the order of first puts."""
    count: int
    """Samples in it."""
    written: list[float]
    """Of each of the matrix's fields the share of samples that have it, 0 to 1."""
    tasks: list[list[float]]
    """Of each of the matrix's tasks the shares of samples that are unclaimed, assigned to a rank,
    leased and settled; they add up to 1."""


class Matrix(Model):
    """The samples of a partition by field and task, aggregated."""

    partition: Text
    total: int
    """Samples that were there when it was scanned."""
    scanned: int
    """Of those, how many the windows cover; fewer only beyond a million."""
    at_ns: int | None
    """When it was scanned; None if it has not been yet. It then has no windows."""
    fields: list[Text]
    tasks: list[Text]
    windows: list[Window]


class Sample(Model):
    """One sample as the live data plane has it."""

    sample_id: Text
    partition: Text
    fields: list[Text]
    """The fields that are written."""
    tags: Values
    tasks: dict[Text, Text]
    """Task to ``unclaimed``, ``assigned``, ``leased`` or ``settled``."""
    claims: dict[Text, Text]
    """Task to the claim that holds it."""
    origins: dict[Text, Text]
    """Field to the put that wrote it, a traceparent for example."""
    age_s: float | None
    """Seconds since its first put; None where the store does not tell."""


class SamplePage(Model):
    """Consecutive samples of a partition, in the order of first puts."""

    partition: Text
    start: int
    total: int
    """Samples in the partition."""
    samples: list[Sample]


class PartitionView(Model):
    """A partition and what is in it, as of one moment."""

    at_ns: int
    """When it was read."""
    spread_s: float
    """0 if every part is of one moment; else how long reading took while samples moved."""
    partition: Partition
    matrix: Matrix
    """Of a partition of more than 10,000 samples, as of its own ``at_ns``."""
    samples: SamplePage
    claims: list[Claim]
    """Under leases, oldest first, at most 1,000."""
    problem: Text
    """Why there are no samples and claims, and the rest is of the newest poll; else empty."""
