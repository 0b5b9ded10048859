"""`StoreInspector`: inspection of a store, and changes by an operator.

A client with ``capabilities.inspection`` has it as the attribute ``inspector``. An inspection
changes nothing. In a partition of 100,000 samples it blocks the store for less than 10 ms at a
time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from dataplane_core.capabilities import TaskCounts
    from dataplane_core.ledger.inspect import (
        AssignmentSummary,
        ClaimSummary,
        PartitionSummary,
        SampleState,
        StatePage,
        StorageSummary,
    )


@runtime_checkable
class DataPlaneInspector(Protocol):
    """Methods that read a store's contents, claims and states.

    Each method may raise `UnavailableError`, or `UnsupportedError` if the store does not know the
    answer. Methods with a ``partition_id`` may raise `PartitionNotFoundError`.
    """

    def list_partitions(self) -> list[PartitionSummary]:
        """Return a summary of every partition; the cost does not grow with the samples."""

    def list_storage(self) -> list[StorageSummary]:
        """Return the storage units whose bytes the store knows; empty if there are none."""

    def read_totals(self) -> dict[str, int]:
        """Return the totals of all operations since the store was created, for metrics exporters.

        Returns:
            Totals that never decrease: ``puts`` (completed), ``puts_aborted``, ``samples_put``
            (new ones), ``claims`` (that got samples), ``samples_claimed``, ``leases_expired``,
            ``samples_expired`` (held by expired leases), ``samples_acknowledged``,
            ``samples_released``, ``clears``, ``samples_cleared``. A claim ended by `end_claim`
            counts as expired, a withdrawal as a clear; `reset_consumption` is not counted.
        """

    def count_samples(
        self, partition_id: str, task_name: str, required_fields: list[str]
    ) -> TaskCounts:
        """Return the number of samples in each state for ``task_name``, at one moment.

        Raises:
            UnknownTaskError: as `DataPlaneClient.claim_meta`.
        """

    def list_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> list[SampleState]:
        """Return up to ``limit`` samples from position ``start`` on, in the order of first puts.

        A large page is read in steps. Other calls run in between; if they clear samples, the page
        may skip other samples.

        Raises:
            InvalidRequestError: (a ValueError) ``limit`` is above 10,000, or a number is negative.
        """

    def read_sample(self, partition_id: str, sample_id: str) -> SampleState | None:
        """Return one sample; None if it was never put, or was cleared."""

    def find_samples(
        self, partition_id: str, *, tag: str, value: object, limit: int = 100
    ) -> list[SampleState]:
        """Return up to ``limit`` samples whose ``tag`` equals ``value``, in order of first puts.

        A large partition is searched in steps. Other calls run in between; samples that they put
        or clear may be missed.

        Raises:
            InvalidRequestError: (a ValueError) ``limit`` is above 10,000, or ``value`` is not a
                primitive that a tag can hold: str, int of 64 bits, float, bool or None.
        """

    def list_claims(self, partition_id: str) -> list[ClaimSummary]:
        """Return up to 1,000 leased claims that are not fully acknowledged, oldest first."""

    def list_assignments(self, partition_id: str) -> list[AssignmentSummary]:
        """Return up to 1,000 summaries of samples assigned to data-parallel ranks.

        Each summary covers one rank of one task, for claims with the same fields, filter and seed.
        """

    def scan_states(self, partition_id: str, *, start: int = 0, limit: int = 10_000) -> StatePage:
        """Return which fields many samples have, and their states for each task, as bytes.

        Raises:
            InvalidRequestError: (a ValueError) ``limit`` is above 10,000, or a number is negative.
        """


class DataPlaneActions(Protocol):
    """Methods with which an operator changes a store."""

    def clear_samples(
        self, sample_ids: list[str] | None, partition_id: str, *, force: bool = False
    ) -> None:
        """Drop samples; see `DataPlaneClient.clear_samples`."""

    def reset_consumption(self, partition_id: str, task_name: str, sample_ids: list[str]) -> int:
        """Make samples that a task has acknowledged claimable by it again.

        Samples assigned to a data-parallel rank become claimable too. Unclaimed samples and unknown
        ids are ignored. In a partition with groups, reset complete groups: claims skip a partly
        reset group, as they skip an incomplete one.

        Returns:
            The number of samples made claimable.

        Raises:
            PartitionNotFoundError, UnknownTaskError: as `DataPlaneClient.claim_meta`.
            SamplesLeasedError: (RuntimeError) the task holds a sample under a lease; nothing was
                reset.
        """

    def end_claim(self, partition_id: str, claim: str, *, expired_only: bool = True) -> int:
        """End a claim as if its lease had expired: its samples can be claimed again.

        Later acknowledgments by its holder, and puts under the claim, are refused.

        Args:
            partition_id: the claim's partition.
            claim: the claim's name, from `DataPlaneInspector.list_claims`.
            expired_only: refuse a claim whose lease has not expired.

        Returns:
            The number of samples that it still held; 0 if there is no such claim.

        Raises:
            PartitionNotFoundError: the partition is not registered.
            SamplesLeasedError: (RuntimeError) ``expired_only`` is set and the lease has not
                expired.
        """


@runtime_checkable
class StoreInspector(DataPlaneInspector, DataPlaneActions, Protocol):
    """Type of a client's ``inspector``; it works until the client is closed."""
