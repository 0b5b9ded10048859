"""`DataPlaneInspector` and `DataPlaneActions`: looking into a store, and changing it by hand.

A client with ``capabilities.inspection`` is both. Looking changes nothing and holds the store
up for less than ten milliseconds at a time, in a partition of 100,000 samples. `Opaque`
is what a client is that cannot be looked into.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from dataplane_core.errors import UnsupportedError

if TYPE_CHECKING:
    from dataplane_core.client import TaskCounts
    from dataplane_core.ledger.inspect import (
        ClaimSummary,
        PartitionSummary,
        SampleState,
        ShareSummary,
        StatePage,
        StorageSummary,
    )


@runtime_checkable
class DataPlaneInspector(Protocol):
    """What a store holds and who holds it. Every method also raises what a dead store gives.

    Every client has these methods, so an ``isinstance`` says nothing about it: without
    ``capabilities.inspection`` they may raise `UnsupportedError`.
    """

    def list_partitions(self) -> list[PartitionSummary]:
        """Every partition in numbers; its cost does not grow with the samples."""

    def list_storage(self) -> list[StorageSummary]:
        """The storage units whose bytes the store accounts for; empty if its backend tells none."""

    def read_totals(self) -> dict[str, int]:
        """What happened in the store since it was made, by all its clients; for metrics exporters.

        Returns:
            Totals that never decrease: ``puts`` (made visible), ``puts_aborted``, ``samples_put``
            (new ones), ``claims`` (that got samples), ``samples_claimed``, ``leases_expired``,
            ``samples_redelivered`` (of those leases), ``samples_acknowledged``,
            ``samples_released``, ``clears``, ``samples_cleared``. A claim that `end_claim` ended
            counts as expired; what `reset_consumption` did is not counted. Withdrawing is a clear.
        """

    def count_samples(
        self, partition_id: str, task_name: str, required_fields: list[str]
    ) -> TaskCounts:
        """Where every sample stands for ``task_name``, counted in one moment.

        Raises:
            PartitionNotFoundError, UnknownTaskError: as `DataPlaneClient.claim_meta`.
        """

    def list_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> list[SampleState]:
        """``limit`` samples of a partition from place ``start`` on, in the order of first puts.

        A large page is put together from smaller ones, between which others go on; samples that are
        cleared meanwhile can make it leave others out.

        Raises:
            PartitionNotFoundError: the partition is not registered.
            InvalidRequestError: (a ValueError) ``limit`` is above 10,000, or one is negative.
        """

    def read_sample(self, partition_id: str, sample_id: str) -> SampleState | None:
        """One sample; None if it was never put, or cleared.

        Raises:
            PartitionNotFoundError: the partition is not registered.
        """

    def find_samples(
        self, partition_id: str, *, tag: str, value: object, limit: int = 100
    ) -> list[SampleState]:
        """The first ``limit`` samples whose ``tag`` equals ``value``, in the order of first puts.

        A large partition is searched step by step, between which others go on; what is put or
        cleared meanwhile may be missed.

        Raises:
            PartitionNotFoundError: the partition is not registered.
            InvalidRequestError: (a ValueError) ``limit`` is above 10,000, or ``value`` is nothing
                that a tag can be: str, int of 64 bits, float, bool or None.
        """

    def list_claims(self, partition_id: str) -> list[ClaimSummary]:
        """The claims under leases that were not settled yet, the oldest first, at most 1,000.

        Raises:
            PartitionNotFoundError: the partition is not registered.
        """

    def list_shares(self, partition_id: str) -> list[ShareSummary]:
        """What waits for data-parallel ranks that have not asked for it, at most 1,000 entries.

        One entry for each rank, of each task and the terms of the claims that drew.

        Raises:
            PartitionNotFoundError: the partition is not registered.
        """

    def scan_states(self, partition_id: str, *, start: int = 0, limit: int = 10_000) -> StatePage:
        """What `list_samples` says of fields and tasks, in one byte each, for many samples.

        Raises:
            PartitionNotFoundError: the partition is not registered.
            InvalidRequestError: (a ValueError) ``limit`` is above 10,000, or one is negative.
        """


class DataPlaneActions(Protocol):
    """What may change a store by hand."""

    def clear_samples(
        self, sample_ids: list[str] | None, partition_id: str, *, force: bool = False
    ) -> None:
        """As `DataPlaneClient.clear_samples`."""

    def reset_consumption(self, partition_id: str, task_name: str, sample_ids: list[str]) -> int:
        """Make samples that a task has consumed (claimed for good) claimable by it again.

        So are those that were drawn for a data-parallel rank that has not asked for them. Samples
        that the task has not consumed, and ids that are not known, are passed over. In a partition
        with groups, reset a group whole: a part of it waits as an incomplete group does.

        Returns:
            How many are claimable again.

        Raises:
            PartitionNotFoundError, UnknownTaskError: as `DataPlaneClient.claim_meta`.
            SamplesLeasedError: (RuntimeError) the task holds one under a lease; nothing was reset.
        """

    def end_claim(self, partition_id: str, claim: str, *, expired_only: bool = True) -> int:
        """End a claim as if its lease had expired: what it still holds can be claimed again.

        Its holder's late acknowledge, and puts in the claim's name, are refused.

        Args:
            partition_id: the claim's partition.
            claim: its name, of `DataPlaneInspector.list_claims`.
            expired_only: refuse a claim whose lease has not expired.

        Returns:
            How many samples it still held; 0 if there is no such claim, or no more.

        Raises:
            PartitionNotFoundError: the partition is not registered.
            SamplesLeasedError: (RuntimeError) its lease has not expired.
        """


class Opaque:
    """A store that cannot be looked into. Clients inherit this and override what they can tell."""

    def list_partitions(self) -> list[PartitionSummary]:
        """As `DataPlaneInspector.list_partitions`. Raises `UnsupportedError` if it cannot."""
        raise _opaque(self)

    def list_storage(self) -> list[StorageSummary]:
        """As `DataPlaneInspector.list_storage`. Raises `UnsupportedError` if it cannot."""
        raise _opaque(self)

    def read_totals(self) -> dict[str, int]:
        """As `DataPlaneInspector.read_totals`. Raises `UnsupportedError` if it cannot."""
        raise _opaque(self)

    def list_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> list[SampleState]:
        """As `DataPlaneInspector.list_samples`. Raises `UnsupportedError` if it cannot."""
        raise _opaque(self)

    def read_sample(self, partition_id: str, sample_id: str) -> SampleState | None:
        """As `DataPlaneInspector.read_sample`. Raises `UnsupportedError` if it cannot."""
        raise _opaque(self)

    def find_samples(
        self, partition_id: str, *, tag: str, value: object, limit: int = 100
    ) -> list[SampleState]:
        """As `DataPlaneInspector.find_samples`. Raises `UnsupportedError` if it cannot."""
        raise _opaque(self)

    def list_claims(self, partition_id: str) -> list[ClaimSummary]:
        """As `DataPlaneInspector.list_claims`. Raises `UnsupportedError` if it cannot."""
        raise _opaque(self)

    def list_shares(self, partition_id: str) -> list[ShareSummary]:
        """As `DataPlaneInspector.list_shares`. Raises `UnsupportedError` if it cannot."""
        raise _opaque(self)

    def scan_states(self, partition_id: str, *, start: int = 0, limit: int = 10_000) -> StatePage:
        """As `DataPlaneInspector.scan_states`. Raises `UnsupportedError` if it cannot."""
        raise _opaque(self)

    def reset_consumption(self, partition_id: str, task_name: str, sample_ids: list[str]) -> int:
        """As `DataPlaneActions.reset_consumption`. Raises `UnsupportedError` if it cannot."""
        raise _opaque(self)

    def end_claim(self, partition_id: str, claim: str, *, expired_only: bool = True) -> int:
        """As `DataPlaneActions.end_claim`. Raises `UnsupportedError` if it cannot."""
        raise _opaque(self)


def _opaque(client: Opaque) -> UnsupportedError:
    return UnsupportedError(
        f"{type(client).__name__} has no inspector; see capabilities.inspection"
    )
