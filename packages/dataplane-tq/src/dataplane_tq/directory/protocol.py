"""Requests of clients to the directory, and its answers: one struct each."""

from __future__ import annotations

from typing import Any  # Any: tags hold the caller's own primitives

import msgspec

from dataplane_core.boundary import LeaseAction
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest
from dataplane_core.schema import Form
from dataplane_tq.packed.layout import Block, FieldLayout, FieldParts


class Request(msgspec.Struct, frozen=True, tag=True):
    """Base of all requests."""


class BindActor(Request, frozen=True):
    """Bind an actor to the connection: once the connection closes, every request fails.

    Answer: None.
    """

    name: str


class Register(Request, frozen=True):
    """Declare a partition. Answer: None."""

    declaration: PartitionDeclaration


class BeginPut(Request, frozen=True):
    """Reserve capacity for a put. Answer: `PutAnswer`. The put belongs to the connection.

    With ``cells``, the put fails if a sample has none of its cells (see `match_cells`), or is
    cleared before the commit.

    Attributes:
        partition_id: target partition.
        sample_ids: samples to put.
        kinds: field to kind.
        layouts: layouts of the fields whose bytes the directory places; empty for other backends.
        node: the producer's node.
        token: lease under which the producer writes.
        timeout_s: maximum wait for free space, in seconds.
        forms: field to form, for fields that have one.
        cells: field to the int64 array of the samples' cells that the client knows.
    """

    partition_id: str
    sample_ids: list[str]
    kinds: dict[str, str]
    layouts: list[FieldLayout]
    node: str
    token: str | None
    timeout_s: float
    forms: dict[str, Form] = {}
    cells: dict[str, bytes] = {}


class Orphans(msgspec.Struct, frozen=True):
    """Samples to drop in TransferQueue, and the fields that all of them have there."""

    sample_ids: list[str]
    fields: list[str]


class PutAnswer(msgspec.Struct, frozen=True):
    """Memory that a put may write.

    Attributes:
        enums: field to its allowed values, for fields with a vocabulary.
        blocks: one or more blocks per layout; none for a field without rows.
        orphans: samples that an earlier put or clear left in TransferQueue; drop them first.
    """

    enums: dict[str, tuple[str, ...]]
    blocks: list[Block]
    orphans: list[Orphans]


class CheckPut(Request, frozen=True):
    """Fail if the connection's put could not be committed any more. Answer: None."""


class CommitPut(Request, frozen=True):
    """Make the connection's put visible.

    Answer: None; with ``acknowledge`` a list of `Consumption`, to report now.

    Attributes:
        tags: one dict per sample; None leaves their tags as they are.
        will_report: True if the client will report the rows to TransferQueue and then send
            `Reported`. Until then no client drops the rows in TransferQueue. In a store without a
            mirror, no other put of the rows is committed until then.
        origin: name of the put.
        acknowledge: also acknowledge the samples that the put's lease holds.
    """

    tags: list[dict[str, Any]] | None
    will_report: bool = False
    origin: str | None = None
    acknowledge: bool = False


class SavedBlock(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Rows of one block, as a checkpoint has them.

    Attributes:
        cell: cell of the block.
        layout: layout of the rows.
        sample_ids: sample of each row.
    """

    cell: int
    layout: FieldLayout
    sample_ids: list[str]

    def __post_init__(self) -> None:
        if not 0 < self.layout.rows == len(self.sample_ids):
            raise ValueError(
                f"block {self.cell} of field {self.layout.name!r}: {self.layout.rows} rows for "
                f"{len(self.sample_ids)} samples"
            )


class BeginRestore(Request, frozen=True):
    """Reserve capacity for saved blocks, without waiting for it. Answer: `RestoreAnswer`.

    The partition is registered if it is missing. The restore belongs to the connection.
    """

    partition_id: str
    blocks: list[SavedBlock]
    node: str


class RestoreAnswer(msgspec.Struct, frozen=True):
    """Memory that a restore may write: one or more blocks for each block of the request."""

    blocks: list[list[Block]]


class CommitRestore(Request, frozen=True):
    """Make the connection's restore visible. Answer: None."""


class Reported(Request, frozen=True):
    """Report that TransferQueue has the put. Answer: list of `Consumption`, to report now."""


class Consumption(msgspec.Struct, frozen=True, array_like=True):
    """Samples to report to TransferQueue as consumed by a task."""

    task_name: str
    sample_ids: list[str]


class Read(Request, frozen=True):
    """Find and pin rows. Answer: `ReadAnswer`. The pins belong to the connection."""

    partition_id: str
    sample_ids: list[str]
    fields: list[str]
    origins: bool = False


class ReadAnswer(msgspec.Struct, frozen=True):
    """Kinds and locations of the requested fields, in the order of the request.

    Attributes:
        kinds: kind of each field.
        parts: location of each field, if the directory places the bytes; else empty.
        origins: the answer to `ReadOrigins`, if requested.
        forms: field to form, for fields that have one.
    """

    kinds: list[str]
    parts: list[FieldParts]
    origins: dict[str, int] = {}
    forms: dict[str, Form] = {}


class Unpin(Request, frozen=True):
    """End the connection's read, or its report in a store without a mirror. No answer."""


class Claim(Request, frozen=True):
    """Claim a batch, waiting up to ``timeout_s`` until it is complete. Answer: `ClaimAnswer`."""

    partition_id: str
    wanted: ClaimRequest
    timeout_s: float


class ClaimAnswer(msgspec.Struct, frozen=True):
    """Claimed samples.

    Attributes:
        sample_ids: ids of the samples.
        tags: tags of the samples; None if none has any.
        token: token of the lease; None for a claim without a lease.
        mirrored_ids: for a claim without a lease, those of its samples that TransferQueue
            has. The client that reports the other samples reports their consumption too.
    """

    sample_ids: list[str]
    tags: list[dict[str, Any]] | None
    token: str | None
    mirrored_ids: list[str]


class UpdateLease(Request, frozen=True):
    """Acknowledge, release or renew a lease. Answer: list of sample ids.

    For an acknowledgment the list is like `ClaimAnswer.mirrored_ids`; otherwise it is empty.

    ``task_name`` must be the claim's task; None skips that check.
    """

    partition_id: str
    token: str
    sample_ids: list[str]
    action: LeaseAction
    task_name: str | None = None


class Consumed(Request, frozen=True):
    """Check that the tasks have acknowledged every sample. Answer: bool."""

    partition_id: str
    task_names: list[str]


class Count(Request, frozen=True):
    """Count a task's samples by state. Answer: `TaskCounts`."""

    partition_id: str
    task_name: str
    required_fields: list[str]


class ReadOrigins(Request, frozen=True):
    """List the puts that wrote fields. Answer: dict of `DataPlaneClient.read_origins`."""

    partition_id: str
    sample_ids: list[str]
    fields: list[str]


class Clear(Request, frozen=True):
    """Drop samples, or the partition. Answer: `ClearAnswer`.

    With ``cells``, the clear fails if an existing sample has none of its cells: see `match_cells`.
    A clear on a connection that has pinned the samples ends their pins at once, so
    no other sample can have their ids.

    Attributes:
        partition_id: partition of the samples.
        sample_ids: samples to drop; None drops the partition.
        force: also drop leased samples.
        timeout_s: maximum wait for their readers, in seconds.
        withdrawn: count the samples as never put.
        cells: field to the int64 array of the samples' cells that the client knows.
    """

    partition_id: str
    sample_ids: list[str] | None
    force: bool
    timeout_s: float
    withdrawn: bool = False
    cells: dict[str, bytes] = {}


class ClearAnswer(msgspec.Struct, frozen=True):
    """Rows to drop in TransferQueue before the client sends `Dropped`.

    Attributes:
        dropped: number of samples that were cleared.
        orphans: samples whose rows to drop.
        more: whether to request another page by `NextOrphans`.
    """

    dropped: int
    orphans: list[Orphans]
    more: bool = False


class NextOrphans(Request, frozen=True):
    """Request the next page of orphans, after the previous page was dropped in TransferQueue.

    Answer: `ClearAnswer`, with ``dropped`` 0.
    """


class Dropped(Request, frozen=True):
    """Report that the connection's orphans are dropped in TransferQueue. Answer: None."""


class ListPartitions(Request, frozen=True):
    """List all partitions. Answer: list of `PartitionSummary`."""


class ListSamples(Request, frozen=True):
    """List a page of samples. Answer: list of `SampleState`."""

    partition_id: str
    start: int
    limit: int


class ReadSample(Request, frozen=True):
    """Read one sample. Answer: `SampleState`, or None."""

    partition_id: str
    sample_id: str


class FindSamples(Request, frozen=True):
    """Search one step by tag, from position ``start`` on.

    Answer: list of `SampleState`, and the position of the next step; None at the end.
    """

    partition_id: str
    tag: str
    value: str | int | float | bool | None
    start: int
    limit: int


class ListClaims(Request, frozen=True):
    """List the leased claims. Answer: list of `ClaimSummary`."""

    partition_id: str


class ListAssignments(Request, frozen=True):
    """List the samples assigned to data-parallel ranks. Answer: list of `AssignmentSummary`."""

    partition_id: str


class ScanStates(Request, frozen=True):
    """Read the states of a page of samples as bytes. Answer: `StatePage`."""

    partition_id: str
    start: int
    limit: int


class ResetConsumption(Request, frozen=True):
    """Make acknowledged samples claimable again. Answer: their number."""

    partition_id: str
    task_name: str
    sample_ids: list[str]


class EndClaim(Request, frozen=True):
    """End a claim as if its lease had expired. Answer: the number of samples it held."""

    partition_id: str
    claim: str
    expired_only: bool


class ListStorage(Request, frozen=True):
    """List the packed backend's units with their bytes. Answer: list of `StorageSummary`."""


class ReadTotals(Request, frozen=True):
    """Read totals since the directory's start. Answer: dict of `DataPlaneInspector.read_totals`."""
