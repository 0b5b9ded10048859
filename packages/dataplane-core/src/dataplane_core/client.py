"""`DataPlaneClient`: the interface between training code and a store.

The abstract methods are the published contract; their names, argument order and defaults do not
change. Additions are keyword-only arguments and `OptionalMethods`, so that an adapter written for
the contract alone stays valid.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar  # Any: tags hold the caller's own primitives

from dataplane_core.boundary import fields_to_read
from dataplane_core.capabilities import Capabilities
from dataplane_core.optional import OptionalMethods

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Self

    from tensordict import TensorDict

    from dataplane_core.ledger.selection import TagFilter
    from dataplane_core.meta import KVBatchMeta


class DataPlaneClient(OptionalMethods, ABC):
    """Client of a sample store that the processes of a training job share.

    A sample consists of named fields. The methods form three groups:

    - by task, for stages that consume what an earlier stage produces: `register_partition`,
      `claim_meta`, `get_data`, `check_consumption_status`;
    - by key, for stages that know their ids: `put_samples`, `get_samples`, `clear_samples`;
    - lifecycle: `close`. A client is also a context manager.

    The client's ``inspector``, a `StoreInspector`, inspects the store and makes an operator's
    changes.

    A put makes its fields visible; there is no separate "stage finished" call. Clients are
    thread-safe.
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
        """Declare a partition; a second call with the same name replaces the declaration.

        Present samples stay, and so do the claims of tasks that are declared again. Samples
        assigned to data-parallel ranks become claimable by every consumer.

        Args:
            partition_id: name of the partition.
            fields: the fields that producers are expected to write. Others may be written too.
            num_samples: how many samples will be put. A blocking claim uses it to know when no
                more will come.
            consumer_tasks: tasks that may claim, each with its own cursor.
            grpo_group_size: samples per prompt, for clients with ``capabilities.group_claims``.
            enums: field name to allowed values, for string columns with a fixed vocabulary; a put
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
        sample_ids: Sequence[str] | None = None,
    ) -> KVBatchMeta:
        """Claim up to ``batch_size`` samples that have all ``required_fields``.

        A task claims each sample once; the sample stays readable until it is cleared. A blocking
        call waits for ``batch_size`` ready samples. It returns fewer, possibly none, once all
        declared samples (``num_samples``) were put and all unclaimed samples are ready. A call that
        does not block returns the samples that are ready.

        With leases, a sample that the task holds is neither ready nor acknowledged. If no sample
        is ready and a leased one meets ``where``, a blocking claim waits. It wakes when the leased
        sample is acknowledged or released, or its lease expires. If a blocking claim without
        ``where`` returns nothing, every declared sample is acknowledged or cleared. So a loop that
        claims until it gets nothing, and acknowledges each batch, processes every sample even if a
        consumer crashes, provided that ``timeout_s`` exceeds ``claim_lease_s``.

        In a partition with ``grpo_group_size``, the samples of one prompt form a group. They have
        the same tag ``group``; without that tag, their ids are equal up to the last
        ``_g<number>``. A claim takes complete groups, and incomplete ones only once nothing more
        can come. A group that has more samples than ``batch_size`` is left for a larger claim; if
        nothing else remains, the claim raises.

        Args:
            partition_id: partition to claim from.
            task_name: the consumer task.
            required_fields: fields that a sample must have.
            batch_size: maximum samples to claim, at least 1.
            dp_rank: data-parallel rank of the caller. Without ``dp_world`` it only names the caller
                to inspectors.
            blocking: wait for a full batch.
            timeout_s: how long to wait, in seconds; longer than a lease if consumers may crash.
            dp_world: number of data-parallel ranks, with ``dp_rank``. One claim draws ``dp_world *
                batch_size`` samples and splits them evenly by count, and about evenly by length
                (the tag ``input_lengths``). The caller gets its part; the other parts are assigned
                to the other ranks. Each rank gets its part, up to its ``batch_size`` at a time,
                when it claims with the same fields, filter and seed. With leases, an assignment
                expires once its rank has not claimed or renewed for the length of a lease. Without
                leases, a claim with another ``dp_world``, fields, filter or seed takes assigned
                samples when it finds nothing else.
            where: conditions that a sample's tags must all meet.
            seed: claim in an order that depends on the seed and the ids alone; None means the
                configured ``claim_order``, or else the order of first puts.
            wait_for_leased: False returns no ids when only leased samples remain, instead of
                waiting for them. Use it in a consumer that prefetches while it holds claims. For
                clients with ``capabilities.leases``.
            sample_ids: claim these samples, in this order, instead of the first ready ones;
                ``batch_size`` is their number. A blocking claim waits until all of them have the
                fields and no other claim of the task holds any of them. They need not be complete
                groups. Excludes ``dp_world``, ``where`` and ``seed``. For clients with
                ``capabilities.named_claims``.

        Returns:
            A meta with ``task_name`` set, ``fields`` = ``required_fields`` and, if the tags hold
            ``input_lengths``, ``sequence_lengths``. With leases, ``extra_info["lease"]`` holds the
            token that `acknowledge`, `renew` and `release` need.

        Raises:
            PartitionNotFoundError: (KeyError, ValueError) the partition is not registered.
            UnknownTaskError: (KeyError) the task is not declared; the error names the declared
                tasks.
            InvalidRequestError: (a ValueError) ``batch_size`` is below 1, not a multiple of the
                group size, or smaller than every remaining group; or ``dp_rank`` does not fit
                ``dp_world``; or ``sample_ids`` names a sample twice, or a sample that the task has
                acknowledged.
            ClaimTimeoutError: (TimeoutError) the deadline passed; nothing is claimed. It reports
                how many samples are ready and missing, which fields are missing, which processes
                hold leases (the caller included), and when the first lease expires.
        """

    @abstractmethod
    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        """Return whether the partition holds samples and each task has acknowledged all of them.

        A claim without a lease acknowledges its samples at once. False for an unknown partition or
        task.
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
        acknowledge: bool = False,
    ) -> KVBatchMeta:
        """Write fields, tags or both for ``sample_ids``, all or nothing.

        A put creates unknown ids, and adds or overwrites the given fields of known ones. Given tags
        replace a sample's tags. Puts are idempotent. The store keeps its own copy.

        Args:
            sample_ids: distinct ids.
            partition_id: a registered partition.
            fields: batch of ``len(sample_ids)`` rows. Leaves are tensors (any dtype) or per-row
                Python values (NonTensorStack, object arrays). A jagged tensor holds one value per
                token; a nested tensor of strided layout holds rows of any shapes (images). The
                first put of either kind decides the field's form, see `get_columns`.
            tags: one dict of primitives per id: str, int of 64 bits, float, bool or None; scalars
                of numpy and torch are converted. ``input_lengths`` is an int of at least 0.
            claim: the leased claim under which the caller computed the values. The put is refused
                if the lease expired or ended. It is also refused if the claim lost one of
                ``sample_ids`` by a release or a clear, or if another claim of the task holds or has
                acknowledged one of them.
            origin: name of this put, a W3C traceparent for example. It is stored with the values,
                for clients with ``capabilities.origins``.
            acknowledge: also acknowledge the ``sample_ids`` that ``claim`` holds, in one atomic
                step with the put. Without it, the samples of a caller that dies after the put can
                be claimed again.

        Returns:
            A meta of the ids, with ``fields`` = the names written (None if none) and the tags.

        Raises:
            PartitionNotFoundError: the partition is not registered.
            DuplicateSampleError: (ValueError) an id is given twice.
            InvalidRequestError: (ValueError) a count differs from the number of ids, or a tag is
                not a primitive; the error names sample and tag.
            SchemaMismatchError: (ValueError, TypeError) a field changes its dtype or kind.
            CapacityExceeded: (TimeoutError) the store stayed full until the deadline, or the put
                has more new samples than the store can hold.
            LeaseLostError: (RuntimeError) the lease of ``claim`` expired or ended, or ``claim``
                does not permit writing one of the samples.
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
            origins: a dict to which the result of `read_origins` is added, without a further
                request; for clients with ``capabilities.origins``.

        Returns:
            A TensorDict of batch size ``(len(sample_ids),)`` whose row i belongs to
            ``sample_ids[i]``. Rows of one shape form a dense tensor, rows of different lengths a
            jagged tensor, Python values a NonTensorStack. Rows that differ in shape, and were put
            as a nested tensor of strided layout, form a strided nested tensor. Each tensor keeps
            its field's form (`dataplane_core.tensors.rows.form_of`), for `get_columns` and
            ``column_io.materialize``. Without ids the TensorDict is empty.

        Raises:
            PartitionNotFoundError: the partition is not registered.
            MissingDataError: (KeyError, ValueError) an id is unknown or cleared, or a row lacks a
                field; a read never returns a partial result.
        """

    @abstractmethod
    def clear_samples(
        self, sample_ids: list[str] | None, partition_id: str, *, force: bool = False
    ) -> None:
        """Drop ``sample_ids``, ignoring unknown ones; None drops the partition.

        None also removes the declaration, so that the next read raises; it issues a RuntimeWarning
        if there was nothing to drop. ``force`` also drops leased samples.

        Raises:
            SamplesLeasedError: (RuntimeError) a task holds a sample under a lease, and ``force`` is
                not set; nothing is dropped.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the client's resources; closing twice is allowed."""

    def get_data(
        self,
        meta: KVBatchMeta,
        select_fields: list[str] | None = None,
        *,
        origins: dict[str, int] | None = None,
    ) -> TensorDict:
        """Fetch ``select_fields`` of the rows of ``meta``; None means ``meta.fields``.

        ``origins`` is as in `get_samples`.

        Raises:
            InvalidRequestError: (a ValueError) ``select_fields`` and ``meta.fields`` are both None.
            MissingDataError: as `get_samples`.
        """
        names = fields_to_read(meta, select_fields)
        # Adapters written for the published contract lack the keyword.
        keywords: dict[str, Any] = {} if origins is None else {"origins": origins}
        return self.get_samples(meta.sample_ids, meta.partition_id, names, **keywords)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
