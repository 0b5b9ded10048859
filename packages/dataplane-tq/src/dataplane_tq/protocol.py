"""What clients ask of the directory, and what it answers: one struct each."""

from __future__ import annotations

from typing import Any, Literal  # Any: tags hold the caller's own primitives

import msgspec

from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest, SampleState
from dataplane_core.schema import Form
from dataplane_tq.packed.catalogue import Block
from dataplane_tq.packed.layout import FieldLayout

HowToSettle = Literal["acknowledge", "release", "renew"]


class Tie(msgspec.Struct, frozen=True, tag=True):
    """The connection is an actor's, and ends with it: every request fails from then on.

    Answer: None.
    """

    name: str


class Register(msgspec.Struct, frozen=True, tag=True):
    """Declare a partition. Answer: None."""

    declaration: PartitionDeclaration


class BeginPut(msgspec.Struct, frozen=True, tag=True):
    """Reserve room for a put. Answer: `PutAnswer`. The put belongs to the connection.

    Attributes:
        partition_id: where to.
        sample_ids: the samples.
        kinds: field to kind.
        layouts: of the fields whose bytes the directory places; empty for other backends.
        node: the producer's node.
        token: the lease under which it writes.
        timeout_s: how long to wait for room.
        forms: field to form, for those that have one.
    """

    partition_id: str
    sample_ids: list[str]
    kinds: dict[str, str]
    layouts: list[FieldLayout]
    node: str
    token: str | None
    timeout_s: float
    forms: dict[str, Form] = {}


class Leftover(msgspec.Struct, frozen=True):
    """Samples to drop from TransferQueue, and the fields that all of them have there."""

    sample_ids: list[str]
    fields: list[str]


class PutAnswer(msgspec.Struct, frozen=True):
    """Where to write.

    Attributes:
        enums: the vocabularies that the put's values must keep to.
        blocks: one or more per layout.
        leftovers: samples that an earlier put or clear left in TransferQueue, to be dropped first.
    """

    enums: dict[str, tuple[str, ...]]
    blocks: list[Block]
    leftovers: list[Leftover]


class CheckPut(msgspec.Struct, frozen=True, tag=True):
    """Fail if the connection's put could not be committed any more. Answer: None."""


class CommitPut(msgspec.Struct, frozen=True, tag=True):
    """Make the connection's put visible. Answer: None.

    Attributes:
        tags: one dict per sample; None keeps what they have.
        entering: TransferQueue is told of the rows from now on, until `Entered`. Until then nobody
            drops them there.
        origin: names the put.
    """

    tags: list[dict[str, Any]] | None
    entering: bool = False
    origin: str | None = None


class Entered(msgspec.Struct, frozen=True, tag=True):
    """TransferQueue knows the connection's put. Answer: list of `Consumption`, to be told now."""


class Consumption(msgspec.Struct, frozen=True, array_like=True):
    """Samples that a task consumed."""

    task_name: str
    sample_ids: list[str]


class Read(msgspec.Struct, frozen=True, tag=True):
    """Find and pin rows. Answer: `ReadAnswer`. The pins belong to the connection."""

    partition_id: str
    sample_ids: list[str]
    fields: list[str]
    origins: bool = False


class FieldParts(msgspec.Struct, frozen=True, array_like=True):
    """Where the asked rows of one field lie.

    Attributes:
        blocks: the blocks that hold them.
        source: int32 array, for each row its block; empty if there is one block.
        rows: int64 array, for each row its number in the block; empty for all in their order.
    """

    blocks: list[Block]
    source: bytes
    rows: bytes


class ReadAnswer(msgspec.Struct, frozen=True):
    """Kinds of the asked fields and, for placed fields, where they lie, in the order asked.

    ``origins`` is what `ReadOrigins` would answer, if that was asked for; ``forms`` has the asked
    fields that have a form.
    """

    kinds: list[str]
    parts: list[FieldParts]
    origins: dict[str, int] = {}
    forms: dict[str, Form] = {}


class Unpin(msgspec.Struct, frozen=True, tag=True):
    """End the connection's read. No answer."""


class Claim(msgspec.Struct, frozen=True, tag=True):
    """Claim, waiting up to ``timeout_s`` for a whole batch. Answer: `ClaimAnswer`."""

    partition_id: str
    wanted: ClaimRequest
    timeout_s: float


class ClaimAnswer(msgspec.Struct, frozen=True):
    """The claimed samples.

    Attributes:
        sample_ids: the samples.
        tags: theirs, None if none has any.
        token: of the lease; None for a final claim.
        entered: of a final claim, the samples that TransferQueue knows; who tells it of the others
            tells it of their consumption too.
    """

    sample_ids: list[str]
    tags: list[dict[str, Any]] | None
    token: str | None
    entered: list[str]


class Settle(msgspec.Struct, frozen=True, tag=True):
    """Acknowledge, release or renew a lease. Answer: if acknowledged, ``entered`` as a claim's."""

    partition_id: str
    token: str
    sample_ids: list[str]
    how: HowToSettle


class Consumed(msgspec.Struct, frozen=True, tag=True):
    """Whether tasks have claimed every sample. Answer: bool."""

    partition_id: str
    task_names: list[str]


class Count(msgspec.Struct, frozen=True, tag=True):
    """Where every sample stands. Answer: `TaskCounts`."""

    partition_id: str
    task_name: str
    required_fields: list[str]


class ReadOrigins(msgspec.Struct, frozen=True, tag=True):
    """Which puts wrote fields. Answer: dict of `DataPlaneClient.read_origins`."""

    partition_id: str
    sample_ids: list[str]
    fields: list[str]


class Clear(msgspec.Struct, frozen=True, tag=True):
    """Drop samples, or with None the partition. Answer: `ClearAnswer`.

    Attributes:
        partition_id: theirs.
        sample_ids: the samples.
        force: also those that are leased.
        timeout_s: how long to wait for their readers.
        withdrawn: they count as never put.
    """

    partition_id: str
    sample_ids: list[str] | None
    force: bool
    timeout_s: float
    withdrawn: bool = False


class ClearAnswer(msgspec.Struct, frozen=True):
    """What to do in TransferQueue, and to report by `Dropped`.

    Attributes:
        dropped: number of samples that were there.
        leftovers: samples whose rows are to be dropped there.
        more: whether there are others, to be asked for by `NextLeftovers`.
    """

    dropped: int
    leftovers: list[Leftover]
    more: bool = False


class NextLeftovers(msgspec.Struct, frozen=True, tag=True):
    """Those of the last `ClearAnswer` are gone from TransferQueue. Answer: the next one.

    Its ``dropped`` is 0.
    """


class Dropped(msgspec.Struct, frozen=True, tag=True):
    """The connection's leftovers are gone from TransferQueue. Answer: None."""


class ListPartitions(msgspec.Struct, frozen=True, tag=True):
    """Every partition in numbers. Answer: list of `PartitionSummary`."""


class ListSamples(msgspec.Struct, frozen=True, tag=True):
    """A page of samples. Answer: list of `SampleState`."""

    partition_id: str
    start: int
    limit: int


class ReadSample(msgspec.Struct, frozen=True, tag=True):
    """One sample. Answer: `MaybeSample`."""

    partition_id: str
    sample_id: str


MaybeSample: Any = SampleState | None
"""Any: a union is no type to mypy, but one to msgspec."""


class FindSamples(msgspec.Struct, frozen=True, tag=True):
    """One step of a search by tag, from place ``start`` on. Answer: `FoundSamples`."""

    partition_id: str
    tag: str
    value: str | int | float | bool | None
    start: int
    limit: int


class FoundSamples(msgspec.Struct, frozen=True, array_like=True):
    """What a step found, and the place where to go on; None at the end."""

    samples: list[SampleState]
    after: int | None


class ListClaims(msgspec.Struct, frozen=True, tag=True):
    """The claims under leases. Answer: list of `ClaimSummary`."""

    partition_id: str


class ListShares(msgspec.Struct, frozen=True, tag=True):
    """What waits for data-parallel ranks. Answer: list of `ShareSummary`."""

    partition_id: str


class ScanStates(msgspec.Struct, frozen=True, tag=True):
    """A page of samples in bytes. Answer: `StatePage`."""

    partition_id: str
    start: int
    limit: int


class ResetConsumption(msgspec.Struct, frozen=True, tag=True):
    """Make consumed samples claimable again. Answer: how many."""

    partition_id: str
    task_name: str
    sample_ids: list[str]


class EndClaim(msgspec.Struct, frozen=True, tag=True):
    """End a claim as if its lease had expired. Answer: how many samples it held."""

    partition_id: str
    claim: str
    expired_only: bool


class ListStorage(msgspec.Struct, frozen=True, tag=True):
    """Bytes of each storage unit of ours. Answer: list of `StorageSummary`."""


class ReadTotals(msgspec.Struct, frozen=True, tag=True):
    """What happened since the directory started. Answer: dict of `DataPlaneClient.read_totals`."""


Request = (
    Tie
    | Register
    | BeginPut
    | CheckPut
    | CommitPut
    | Entered
    | Read
    | Unpin
    | Claim
    | Settle
    | Consumed
    | Count
    | ReadOrigins
    | Clear
    | NextLeftovers
    | Dropped
    | ListPartitions
    | ListSamples
    | ReadSample
    | FindSamples
    | ListClaims
    | ListShares
    | ScanStates
    | ResetConsumption
    | EndClaim
    | ListStorage
    | ReadTotals
)
