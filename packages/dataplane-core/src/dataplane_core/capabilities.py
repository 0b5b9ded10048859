"""The capabilities of a client, and the counts of a task's samples."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Promises that a client makes; False for each that it does not make.

    Attributes:
        read_your_writes: once a put has returned, every process can read its fields.
        no_torn_rows: a (sample, field) is visible to claims only after its bytes are readable.
        exclusive_claims: two claims of one task never share a sample.
        leases: with ``claim_lease_s``, samples whose lease expired can be claimed again.
        conservation: `DataPlaneInspector.count_samples` accounts for every sample ever put.
        safe_clear: clearing leased samples is refused unless forced.
        backpressure: a put past capacity waits, then raises `CapacityExceeded`.
        bounded_waits: every blocking call has a deadline and a typed error.
        survivable: a dead controller, unit or peer gives a typed error within seconds.
        group_claims: with ``grpo_group_size``, a claim takes complete groups, and incomplete ones
            only once no more samples can come.
        origins: `DataPlaneClient.read_origins` returns the puts that wrote a field.
        inspection: the client's ``inspector`` reads the store, and changes it for an operator.
        withdrawal: a blocking claim waits for replacements of withdrawn samples.
        named_claims: a claim of given ``sample_ids`` takes no other samples.
        claim_order: samples are claimed in the order that ``claim_order`` configures.
    """

    read_your_writes: bool = False
    no_torn_rows: bool = False
    exclusive_claims: bool = False
    bounded_waits: bool = False
    leases: bool = False
    conservation: bool = False
    safe_clear: bool = False
    backpressure: bool = False
    survivable: bool = False
    group_claims: bool = False
    origins: bool = False
    inspection: bool = False
    withdrawal: bool = False
    named_claims: bool = False
    claim_order: bool = False


@dataclass(frozen=True, kw_only=True)
class TaskCounts:
    """Number of a partition's samples in each state for one task.

    At every moment ``put == ready + not_ready + leased + acknowledged + cleared``.

    Attributes:
        put: samples present at the latest registration, plus those put since, minus withdrawn
            ones.
        ready: unclaimed, with all required fields, even if their group is incomplete.
        not_ready: unclaimed, and lacking a required field.
        leased: claimed and not yet acknowledged, or assigned to a data-parallel rank.
        acknowledged: acknowledged, or claimed without a lease, and still present.
        cleared: dropped from the store, in whatever state they were.
    """

    put: int
    ready: int
    not_ready: int
    leased: int
    acknowledged: int
    cleared: int
