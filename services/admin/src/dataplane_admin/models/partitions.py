"""The live data plane: partitions, storage, claims, samples and their matrix."""

from __future__ import annotations

from dataplane_admin.models.base import Model, Text, Values
from dataplane_admin.models.status import LiveStatus


class Claim(Model):
    """A leased claim: samples that one process holds for one task."""

    claim: Text
    """Name of the claim; it is not the lease's token."""
    task: Text
    """The task that claimed."""
    owner: Text
    """The claiming process as ``host:pid``; empty if unknown."""
    samples: int
    """Samples it still holds."""
    age_s: float
    """Seconds since the claim."""
    expires_in_s: float | None
    """Seconds until the lease expires, below 0 if it has expired; None if it never expires."""


class Generator(Model):
    """A generator of an asynchronous run, and what it holds of the partition."""

    name: Text
    owner: Text
    """Process of the generator, as the ``owner`` of claims; empty if unknown."""
    joined_ns: int | None
    """Time at which it started to claim prompts; None if not reported."""
    left_ns: int | None
    """Time at which it left; None while it takes part."""
    reason: Text
    """Reason for leaving: ``finished``, or what was wrong; empty while it takes part."""
    claims: int
    """Claims that it holds."""
    samples: int
    """Samples of these claims."""
    oldest_claim_s: float | None
    """Age of the oldest of these claims; None without any."""


class PartitionField(Model):
    """One field of a partition."""

    name: Text
    kind: Text | None
    """Type of its values; None until one is written."""
    declared: bool
    """True if the partition was registered with it."""
    written: int
    """Present samples that have it."""
    nbytes: int | None
    """Bytes in the data plane; None if unknown."""


class PartitionTask(Model):
    """One task of a partition.

    ``unclaimed + assigned + leased + acknowledged`` is the number of samples present.
    """

    name: Text
    unclaimed: int
    """Samples that it can still claim, ready or not."""
    assigned: int
    """Samples assigned to data-parallel ranks that have not claimed them yet."""
    leased: int
    """Samples that it has claimed and not acknowledged."""
    acknowledged: int
    """Samples that are not redelivered to it: acknowledged, or claimed without leases."""
    leases: int
    """Claims that hold the leased samples."""
    needs: list[Text] | None
    """Fields requested by its newest claim; None if unknown."""
    ready: int | None
    """Unclaimed samples with all of ``needs``, as of the partition's last scan; None if unknown."""
    oldest_unclaimed_s: float | None
    """Age of the oldest sample that it has not claimed; None if there is none."""
    oldest_claim: Claim | None
    """Oldest claim of the task that is neither acknowledged nor released."""
    claimed_per_s: float | None
    """Samples it claimed per second over the last polls; None before the second poll."""
    acknowledged_per_s: float | None
    """Samples it acknowledged per second."""
    backlog_per_s: float | None
    """Growth of ``unclaimed`` per second; below 0 while the task catches up."""
    backlog: list[int]
    """``unclaimed`` at each time of the partition's ``polled_ns``."""


class Partition(Model):
    """One partition of the live data plane."""

    id: Text
    declared: int
    """Samples declared at registration."""
    put: int
    """Samples put since registration."""
    present: int
    """Samples present now."""
    not_put: int
    """Declared samples that are not written yet."""
    reserved: int
    """Samples of puts in flight."""
    cleared: int
    """Samples that were written and cleared."""
    group_size: int | None
    """Samples per prompt that are claimed together; None without groups."""
    nbytes: int | None
    """Bytes in the data plane; None if unknown."""
    revision: int
    """Number that grows with every change of the partition."""
    fields: list[PartitionField]
    tasks: list[PartitionTask]
    enums: dict[Text, list[Text]]
    """Fields with a fixed vocabulary."""
    put_per_s: float | None
    """Samples written per second over the last polls; None before the second poll."""
    polled_ns: list[int]
    """Times of at most the last 120 polls, oldest first."""
    put_trend: list[int]
    """``put`` at each of those times."""


class TaskHistory(Model):
    """One task's numbers at the times of its partition's history."""

    name: Text
    unclaimed: list[int]
    claimed: list[int]
    """Leased and acknowledged samples together."""
    acknowledged: list[int]


class PartitionHistory(Model):
    """One partition's numbers over the last hour, or since the service attached."""

    partition: Text
    times_ns: list[int]
    """Times of the polls, about 30 seconds apart, oldest first."""
    put: list[int]
    """Samples put, at each of those times."""
    tasks: list[TaskHistory]


class Unit(Model):
    """One storage unit of the live data plane."""

    name: Text
    node: Text
    capacity: int | None
    """Bytes that it can hold; None if they are not limited."""
    used: int
    """Bytes that it holds; if it does not count them, the memory of its process."""
    free: int | None
    """Bytes that can still be used; None if they are not limited."""
    samples: int | None = None
    """Samples that it holds; None if it does not count them."""
    max_samples: int | None = None
    """Limit of ``samples``; None if there is none."""


class Partitions(Model):
    """All partitions, as of one moment."""

    partitions: list[Partition]
    storage: list[Unit]
    """Storage units, as last read; empty if the backend reports none."""
    storage_error: Text | None = None
    """Reason why the storage units cannot be read; None if they can."""
    totals: dict[Text, int]
    """Counters since the store was created: ``samples_put``, ``leases_expired``, ..."""
    live: LiveStatus


class Window(Model):
    """A stretch of consecutive samples of a partition."""

    start: int
    """Index of its first sample, in the order of first puts."""
    count: int
    """Samples in it."""
    written: list[float]
    """Share of samples with each field of the matrix, 0 to 1."""
    tasks: list[list[float]]
    """Shares of unclaimed, assigned, leased and acknowledged samples for each task of the matrix;
    they add up to 1."""


class Matrix(Model):
    """The samples of a partition by field and task, aggregated."""

    partition: Text
    total: int
    """Samples present at the scan."""
    scanned: int
    """Samples covered by the windows; fewer than ``total`` only beyond a million."""
    at_ns: int | None
    """Time of the scan; None without a scan, and then ``windows`` is empty."""
    fields: list[Text]
    tasks: list[Text]
    windows: list[Window]


class Sample(Model):
    """One sample as the live data plane has it."""

    sample_id: Text
    partition: Text
    fields: list[Text]
    """Written fields."""
    tags: Values
    tasks: dict[Text, Text]
    """Task to ``unclaimed``, ``assigned``, ``leased`` or ``acknowledged``."""
    claims: dict[Text, Text]
    """Task to the claim that holds it."""
    origins: dict[Text, Text]
    """Field to the origin of the put that wrote it, for example a traceparent."""
    age_s: float | None
    """Seconds since its first put; None if unknown."""


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
    """Time of the read."""
    spread_s: float
    """Duration of the read in seconds; 0 if every part is from one snapshot."""
    partition: Partition
    matrix: Matrix
    """The matrix. Above 10,000 samples it is from the newest scan, whose time is its ``at_ns``."""
    samples: SamplePage
    claims: list[Claim]
    """Leased claims, oldest first, at most 1,000."""
    generators: list[Generator]
    """Generators of the run that last registered the partition; those that take part come first."""
    problem: Text
    """Reason that the data plane could not be read; empty if it was read. With a reason, samples
    and claims are missing, and the rest is from the newest poll."""
