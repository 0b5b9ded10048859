"""`DataPlaneClient`: the boundary between training code and a store.

The abstract methods are the published contract; their names, argument order and defaults do not
change. What goes beyond it comes as keyword-only arguments and as methods with a default
implementation, so that an adapter written for the contract alone stays valid.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar  # Any: tags hold the caller's own primitives

from dataplane_core.errors import (
    InvalidRequestError,
    MissingDataError,
    SamplesLeasedError,
    UnsupportedError,
)
from dataplane_core.inspector import Opaque

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from tensordict import TensorDict

    from dataplane_core.columns import Column
    from dataplane_core.ledger.selection import TagFilter
    from dataplane_core.meta import KVBatchMeta
    from dataplane_core.schema import Form

LEASE = "lease"
"""``extra_info`` key under which a claim carries the token of its lease."""


def lease_token(meta: KVBatchMeta) -> str:
    """The token of the lease under which ``meta`` was claimed.

    Raises:
        InvalidRequestError: (a ValueError) the claim carries none.
    """
    token = meta.extra_info.get(LEASE)
    if not isinstance(token, str):
        raise InvalidRequestError(
            f"claim of {len(meta.sample_ids)} samples of partition {meta.partition_id!r} carries "
            "no lease; set claim_lease_s in the data-plane config before claiming"
        )
    return token


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Which promises a client keeps. A promise that is not kept is False, never silently broken.

    Attributes:
        read_your_writes: after put_samples returned, every process reads those fields.
        no_torn_rows: a (sample, field) is visible to claims only after its bytes are readable.
        exclusive_claims: two claims of one task never share a sample.
        leases: with ``claim_lease_s`` set, an unsettled claim can be claimed again.
        conservation: `DataPlaneClient.count_samples` accounts for every sample ever put.
        safe_clear: clearing leased samples is refused unless forced.
        backpressure: a put past capacity waits, then raises `CapacityExceeded`.
        bounded_waits: every blocking call has a deadline and a typed error.
        survivable: a dead controller, unit or peer gives a typed error within seconds.
        group_claims: with ``grpo_group_size`` set, a claim takes groups whole.
        origins: `DataPlaneClient.read_origins` tells which puts wrote what.
        inspection: it is a `DataPlaneInspector` and has `DataPlaneActions`.
        withdrawal: a blocking claim waits for what is put in place of withdrawn samples.
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


@dataclass(frozen=True, kw_only=True)
class TaskCounts:
    """Where every sample ever put into a partition stands for one task.

    At every moment ``put == ready + not_ready + leased + acknowledged + cleared``.

    Attributes:
        put: samples put since the partition was registered, less those withdrawn.
        ready: could be claimed now.
        not_ready: present but lacking a required field.
        leased: claimed and not yet acknowledged, or drawn for a data-parallel rank that has not
            asked for it yet.
        acknowledged: settled and still present.
        cleared: dropped from the store, whatever they were before.
    """

    put: int
    ready: int
    not_ready: int
    leased: int
    acknowledged: int
    cleared: int


class DataPlaneClient(Opaque, ABC):
    """A store of samples by field, shared by the processes of a training job.

    Three groups of methods. Task-mediated: `register_partition`, `claim_meta`, `get_data`,
    `check_consumption_status`, for stages that wait for what an earlier stage produces. By key:
    `put_samples`, `get_samples`, `clear_samples`, for stages that know their ids. Lifecycle:
    `close`; a client is also a context manager. Looking into the store is described by
    `DataPlaneInspector`, changing it by hand by `DataPlaneActions`.

    A field of a sample becomes visible by being put; there is no separate "stage finished" call.
    Clients may be used from several threads.
    """

    capabilities: ClassVar[Capabilities] = Capabilities()

    @abstractmethod
    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        """Declare a partition; a second call under the same name replaces the declaration.

        Rows that are present stay, and so does what a task that is declared again has claimed;
        what was drawn for data-parallel ranks that have not asked for it can be drawn anew.

        Args:
            partition_id: name of the partition.
            fields: the fields that producers are expected to write. Others may be written too.
            num_samples: how many samples will be put. A blocking claim uses it to know when no
                more are to come.
            consumer_tasks: tasks that may claim, each with its own cursor.
            grpo_group_size: samples per prompt, for clients with ``capabilities.group_claims``.
            enums: for string columns with a fixed vocabulary, field name to allowed values; a put
                of another value is refused.

        Raises:
            InvalidRequestError: (a ValueError) on an empty name or a negative count.
        """

    @abstractmethod
    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
        *,
        dp_world: int | None = None,
        where: Sequence[TagFilter] = (),
        seed: int | None = None,
        wait_for_leased: bool = True,
    ) -> KVBatchMeta:
        """Claim up to ``batch_size`` samples of which all ``required_fields`` are there.

        A sample is handed to a task once; it stays readable until it is cleared. Blocking, the call
        waits for ``batch_size`` ready samples, or until the samples that the task has not claimed
        are all ready, none is still to be put (of the declared ``num_samples``) and they are fewer;
        then it returns that remainder, which may be empty. Not blocking, it returns what is ready.

        Under leases a sample that a claim of the task holds is neither ready nor consumed. A
        blocking claim that finds nothing ready waits as long as such a sample meets ``where``, and
        wakes when it is acknowledged or released, or when its lease expires. It returns no ids
        only when every declared sample is acknowledged. So a loop that claims until it gets
        nothing, and acknowledges each batch, processes every sample although a consumer crashed,
        if ``timeout_s`` exceeds ``claim_lease_s``.

        In a partition with ``grpo_group_size`` a group (one prompt's samples, by the tag ``group``
        or else by the id up to its last ``_g<number>``) is claimed whole: once all its samples are
        ready, or with those it has once nothing more can come.

        Args:
            partition_id: partition to claim from.
            task_name: the consumer task.
            required_fields: fields that must be there.
            batch_size: most samples to claim, at least 1.
            dp_rank: data-parallel rank of the caller. By itself it changes nothing.
            blocking: wait for a full batch.
            timeout_s: how long to wait, in seconds; longer than a lease where consumers may crash.
            dp_world: with ``dp_rank``, number of ranks. ``dp_world * batch_size`` samples are drawn
                at once and split into shares of even count and about even length (the tag
                ``input_lengths``); the caller gets its share, each other rank finds its own at its
                next claim with the same fields, filter and seed, named in any order; what exceeds
                the ``batch_size`` of that one waits on. A share that its rank does not ask for is
                not lost: with leases it can be drawn anew when the rank has neither claimed nor
                renewed a claim for the length of a lease; without, when a claim of another
                ``dp_world``, fields, filter or seed finds nothing else.
            where: conditions that a sample's tags must meet, all of them.
            seed: claim in an order that depends on the seed and the ids alone; None is the order
                of first puts.
            wait_for_leased: False returns no ids where nothing but leased samples would be waited
                for, for a consumer that prefetches while it holds claims. For clients with
                ``capabilities.leases``.

        Returns:
            A meta with ``task_name`` set, ``fields`` = ``required_fields`` and, if the tags hold
            ``input_lengths``, ``sequence_lengths``. With leases on, ``extra_info["lease"]`` holds
            the token that `acknowledge`, `renew` and `release` need.

        Raises:
            PartitionNotFoundError: (KeyError, ValueError) the partition is not registered.
            UnknownTaskError: (KeyError) the task is not declared; names those that are.
            InvalidRequestError: (a ValueError) ``batch_size`` is below 1 or not a multiple of the
                group's size, or ``dp_rank`` does not fit ``dp_world``.
            ClaimTimeoutError: (TimeoutError) says how many were ready, how many are missing,
                which fields they lack, how many are leased by which processes, the caller
                included, and when the first lease expires; nothing is claimed.
        """

    @abstractmethod
    def get_data(
        self,
        meta: KVBatchMeta,
        select_fields: list[str] | None = None,
        *,
        origins: dict[str, int] | None = None,
    ) -> TensorDict:
        """Fetch ``select_fields``, else ``meta.fields``, of the rows of ``meta``.

        ``origins`` as in `get_samples`.

        Raises:
            InvalidRequestError: (a ValueError) if neither names the fields.
            MissingDataError: as `get_samples`.
        """

    @abstractmethod
    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        """True iff the partition holds samples and each task has consumed every one of them.

        A final claim consumes its samples at once, a claim under a lease when it is acknowledged.
        False for a partition or a task that is not known.
        """

    @abstractmethod
    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        *,
        claim: KVBatchMeta | None = None,
        origin: str | None = None,
    ) -> KVBatchMeta:
        """Write fields, tags or both for ``sample_ids``, all or nothing.

        New ids are created, known ids gain or overwrite the given fields; giving tags replaces a
        sample's tags. Putting the same again leaves the same state. The store keeps its own copy.

        Args:
            sample_ids: distinct ids.
            partition_id: a registered partition.
            fields: batch of ``len(sample_ids)`` rows. Leaves are tensors (any dtype) or per-row
                Python values (NonTensorStack, object arrays). A jagged tensor holds a value per
                token, a nested one of strided layout rows of any shapes (images); the first such
                put of a field decides for all, see `get_columns`.
            tags: one dict of primitives per id: str, int of 64 bits, float, bool or None; scalars
                of numpy and torch become that. ``input_lengths`` is an int of at least 0.
            claim: the leased claim under which the caller computed what it writes. The put is
                refused if that lease has ended, or the claim gave one of the samples back, or
                another claim of the task holds or has settled one: they are someone else's by now.
            origin: names this put, a W3C traceparent for example; kept beside what it writes, for
                clients with ``capabilities.origins``.

        Returns:
            A meta of the ids, with ``fields`` = the names written (None if none) and the tags.

        Raises:
            PartitionNotFoundError: the partition is not registered.
            DuplicateSampleError: (ValueError) an id is given twice.
            InvalidRequestError: (ValueError) a count differs from the number of ids, or a tag holds
                something else; it names sample and tag.
            SchemaMismatchError: (ValueError, TypeError) a field changes its dtype or kind.
            CapacityExceeded: (TimeoutError) the store stayed full until the deadline.
            LeaseLostError: (RuntimeError) the lease of ``claim`` has ended, or one of the samples
                is not its own any more.
        """

    @abstractmethod
    def get_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        select_fields: list[str],
        *,
        origins: dict[str, int] | None = None,
    ) -> TensorDict:
        """Fetch ``select_fields`` of ``sample_ids``; no task's cursor moves.

        Args:
            sample_ids: ids, which may repeat.
            partition_id: their partition.
            select_fields: the fields to read.
            origins: gains what `read_origins` answers for them, which then costs no exchange of
                its own; for clients with ``capabilities.origins``.

        Returns:
            A TensorDict of batch size ``(len(sample_ids),)`` whose row i belongs to
            ``sample_ids[i]``. Rows of one shape come back as one dense tensor, rows of different
            lengths as one jagged tensor, Python values as a NonTensorStack. Without ids: empty.

        Raises:
            PartitionNotFoundError: the partition is not registered.
            MissingDataError: (KeyError, ValueError) an id is unknown or cleared, or a field is not
                written for a row; the answer is never shortened.
        """

    @abstractmethod
    def clear_samples(
        self, sample_ids: list[str] | None, partition_id: str, *, force: bool = False
    ) -> None:
        """Drop ``sample_ids`` (unknown ones are fine), or with None the partition as a whole.

        None also forgets the declaration, so that the next read is an error; it warns with a
        RuntimeWarning if there was nothing to drop. ``force`` also drops what is leased.

        Raises:
            SamplesLeasedError: (RuntimeError) a task holds one under a lease, and ``force`` is
                not set; nothing is dropped.
        """

    @abstractmethod
    def close(self) -> None:
        """Release what the client holds. Closing twice is fine."""

    @property
    def store_key(self) -> Hashable:
        """Equal for the clients of one store in this process, and for no others, so that what is
        told of a store is told once. The client itself, unless an adapter knows better."""
        return self

    def withdraw_samples(self, sample_ids: list[str], partition_id: str) -> None:
        """Take a put back that will be made again under other ids.

        The samples are dropped as by a forced `clear_samples`, unknown ids being fine, and count as
        never put: a blocking claim waits for what comes in their place. To a client without
        ``capabilities.withdrawal`` they are cleared samples like others, which were put.
        """
        from dataplane_core.boundary import check_clear

        ids, partition, _ = check_clear("withdraw_samples", sample_ids, partition_id)
        try:
            self.clear_samples(ids, partition)
        except SamplesLeasedError:
            self.clear_samples(ids, partition, force=True)

    def put_columns(
        self,
        sample_ids: list[str],
        partition_id: str,
        columns: Mapping[str, Column],
        tags: list[dict[str, Any]] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        ragged: Collection[str] = (),
        claim: KVBatchMeta | None = None,
        origin: str | None = None,
    ) -> KVBatchMeta:
        """`put_samples` of padded columns, without padding; clients may spare it a copy.

        Args:
            sample_ids: distinct ids.
            partition_id: a registered partition.
            columns: name to a tensor with a row per id, or a numpy object array (n,).
            tags: one dict of primitives per id.
            lengths: of each row along dim 1, at most the columns' width.
            ragged: the columns, tensors (n, width, ...), of which row i is stored up to
                ``lengths[i]``. They are per token from now on, see `get_columns`.
            claim: see `put_samples`.
            origin: see `put_samples`.

        Raises:
            InvalidRequestError: (a ValueError) columns or lengths do not fit.
            DataPlaneError: as `put_samples`.
        """
        from dataplane_core.boundary import check_put
        from dataplane_core.columns import check_columns, fields_of_columns

        put = check_put("put_columns", sample_ids, partition_id, tags, claim=claim, origin=origin)
        count = len(put.sample_ids)
        cuts, cut = check_columns(put.where, columns, count, lengths, ragged)
        fields = fields_of_columns(columns, count, cuts, cut)
        # An adapter written for the published contract does not know these.
        extra: dict[str, Any] = {} if claim is None else {"claim": claim}
        if origin is not None:
            extra["origin"] = origin
        return self.put_samples(put.sample_ids, put.partition_id, fields, put.tags, **extra)

    def get_columns(
        self,
        sample_ids: list[str],
        partition_id: str,
        select_fields: list[str],
        *,
        pad_values: Mapping[str, float] | None = None,
        width: int = 0,
        origins: dict[str, int] | None = None,
        forms: dict[str, Form] | None = None,
    ) -> dict[str, Column]:
        """`get_samples` as padded columns; clients may spare it a copy.

        Which fields are per token is known and not guessed from shapes: those that
        `dataplane_core.schema.TOKEN_ALIGNED_FIELDS` names, and those that were put ragged, with
        `put_columns` or as a jagged tensor, even if the rows read have one length.

        Args:
            sample_ids: ids, which may repeat.
            partition_id: their partition.
            select_fields: the fields to read.
            pad_values: field to its pad value; 0 if absent.
            width: tensors of two or more dims that are per token are right-padded along dim 1 to at
                least this. All others keep their shape; those whose rows differ in their first
                dimension are padded to the longest row.
            origins: see `get_samples`.
            forms: gains the `dataplane_core.schema.Form` of the fields that have one.

        Returns:
            Field, in the order asked, to a dense tensor (n, ...) or a numpy object array (n,), in
            memory of their own. A field that was put as a nested tensor of strided layout (images),
            or whose rows differ elsewhere than in their first dimension, is not padded: it is a
            nested tensor unless its rows have one shape. Without ids: empty.

        Raises:
            InvalidRequestError: (a ValueError) ``advantages`` or ``sample_mask`` was put dense with
                shape (n, 1), which may be per sample, and would be padded to ``width``.
            DataPlaneError: as `get_samples`.
        """
        from dataplane_core.boundary import check_read
        from dataplane_core.columns import (
            check_padding,
            columns_of_fields,
            count_rows,
        )
        from dataplane_core.rows import forms_of

        read = check_read("get_columns", sample_ids, partition_id, select_fields, origins=origins)
        pad_values, width = check_padding(read.where, pad_values, width)
        # As in `put_columns`.
        extra: dict[str, Any] = {} if origins is None else {"origins": origins}
        answer = self.get_samples(read.sample_ids, read.partition_id, read.fields, **extra)
        if not read.sample_ids:
            return {}
        kept = self._field_forms(read.partition_id)
        columns = columns_of_fields(answer, pad_values=pad_values, width=width, forms=kept)
        for name in read.fields:
            rows = count_rows(columns[name]) if name in columns else 0
            if rows != len(read.sample_ids):
                raise MissingDataError(
                    f"{read.where}: get_samples answered {rows} rows of field {name!r}; expected "
                    f"{len(read.sample_ids)}",
                    fields=[name],
                )
        if forms is not None:
            known = forms_of(answer) if kept is None else kept
            forms.update((name, known[name]) for name in columns if name in known)
        return {name: columns[name] for name in read.fields}

    def _field_forms(self, partition_id: str) -> Mapping[str, Form] | None:
        """The forms of a partition's fields, for `get_columns`; None if the store keeps none, so
        that it takes rows which come back jagged for ragged ones."""
        return None

    def acknowledge(self, meta: KVBatchMeta) -> None:
        """Acknowledge a leased claim, or a subset of it: its samples never return to the task.

        Raises:
            LeaseLostError: the lease expired or was ended for one of the samples.
            UnsupportedError: the client has no leases.
        """
        raise UnsupportedError(f"{type(self).__name__} has no leases; see capabilities.leases")

    def renew(self, meta: KVBatchMeta) -> None:
        """Start the lease of a claim anew. Raises as `acknowledge`."""
        raise UnsupportedError(f"{type(self).__name__} has no leases; see capabilities.leases")

    def release(self, meta: KVBatchMeta) -> None:
        """Give a leased claim back: its samples can be claimed again. Raises as `acknowledge`."""
        raise UnsupportedError(f"{type(self).__name__} has no leases; see capabilities.leases")

    def count_samples(
        self, partition_id: str, task_name: str, required_fields: list[str]
    ) -> TaskCounts:
        """Where every sample stands for ``task_name``, counted in one moment.

        Raises:
            PartitionNotFoundError, UnknownTaskError: as `claim_meta`.
            UnsupportedError: the client does not count; see ``capabilities.conservation``.
        """
        raise UnsupportedError(
            f"{type(self).__name__} does not count samples; see capabilities.conservation"
        )

    def read_origins(
        self, sample_ids: Sequence[str], partition_id: str, fields: Sequence[str]
    ) -> dict[str, int]:
        """Which puts wrote ``fields`` of ``sample_ids``.

        Returns:
            ``origin`` of a put to the number of samples of which it wrote at least one of the
            fields, the most first. What was put without an origin, and unknown ids and fields, are
            left out.

        Raises:
            PartitionNotFoundError: the partition is not registered.
            UnsupportedError: the client keeps none; see ``capabilities.origins``.
        """
        raise UnsupportedError(
            f"{type(self).__name__} keeps no origins of puts; see capabilities.origins"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
