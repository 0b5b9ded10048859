"""`OptionalMethods`: client methods beyond the published contract, with their defaults.

Authors of adapters override the methods that their store supports and set the flags of
`Capabilities`. By default the column methods use ``put_samples`` and ``get_samples``; most other
methods raise `UnsupportedError`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol  # Any: tags

from dataplane_core.boundary import check_clear, check_put, check_read
from dataplane_core.errors import SamplesLeasedError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Mapping, Sequence

    from tensordict import TensorDict

    from dataplane_core.inspector import StoreInspector
    from dataplane_core.meta import KVBatchMeta
    from dataplane_core.schema import Form
    from dataplane_core.tensors.columns import Column


class SampleStore(Protocol):
    """The methods of a client that the optional methods call."""

    @property
    def put_samples(self) -> Callable[..., KVBatchMeta]: ...

    @property
    def get_samples(self) -> Callable[..., TensorDict]: ...

    @property
    def clear_samples(self) -> Callable[..., None]: ...


class OptionalMethods:
    """All optional methods of a client: columns, leases, origins, withdrawal, and its inspector.

    Override `put_columns` and `get_columns` to avoid a copy. `acknowledge`, `renew` and `release`
    are for ``capabilities.leases``.
    """

    def put_columns(
        self: SampleStore,
        sample_ids: list[str],
        partition_id: str,
        columns: Mapping[str, Column],
        tags: list[dict[str, Any]] | None = None,
        *,
        lengths: Sequence[int] | None = None,
        ragged: Collection[str] = (),
        claim: KVBatchMeta | None = None,
        origin: str | None = None,
        acknowledge: bool = False,
    ) -> KVBatchMeta:
        """Put padded columns without their padding.

        Args:
            sample_ids: distinct ids.
            partition_id: a registered partition.
            columns: name to a tensor with a row per id, or a numpy object array (n,).
            tags: one dict of primitives per id.
            lengths: length of each row along dim 1, no larger than the columns' width.
            ragged: names of columns of shape (n, width, ...) whose row i is stored only up to
                ``lengths[i]``. They are per token from then on, see `get_columns`.
            claim: see `put_samples`.
            origin: see `put_samples`.
            acknowledge: see `put_samples`.

        Raises:
            InvalidRequestError: (a ValueError) columns or lengths do not fit.
            DataPlaneError: as `put_samples`.
        """
        from dataplane_core.tensors.columns import check_columns, fields_of_columns

        put = check_put(
            "put_columns",
            sample_ids,
            partition_id,
            tags,
            claim=claim,
            origin=origin,
            acknowledge=acknowledge,
        )
        count = len(put.sample_ids)
        row_lengths, cut_columns = check_columns(put.operation, columns, count, lengths, ragged)
        fields = fields_of_columns(columns, count, row_lengths, cut_columns)
        keywords = _without_none(claim=claim, origin=origin, acknowledge=put.acknowledge or None)
        return self.put_samples(put.sample_ids, put.partition_id, fields, put.tags, **keywords)

    def get_columns(
        self: SampleStore,
        sample_ids: list[str],
        partition_id: str,
        select_fields: list[str],
        *,
        pad_values: Mapping[str, float] | None = None,
        width: int = 0,
        lengths: Sequence[int] | None = None,
        origins: dict[str, int] | None = None,
        forms: dict[str, Form] | None = None,
    ) -> dict[str, Column]:
        """Get samples as padded columns.

        Shapes do not decide whether a field is per token. The fields of
        `dataplane_core.schema.TOKEN_ALIGNED_FIELDS` are per token. So are fields that were put
        ragged, with `put_columns` or as a jagged tensor, even if the rows read have one length.

        Args:
            sample_ids: ids, which may repeat.
            partition_id: their partition.
            select_fields: the fields to read.
            pad_values: field to its pad value; 0 if absent.
            width: minimum size of dim 1, to which per-token tensors of two or more dims are
                right-padded. Other tensors keep their shape; if their rows differ in the first
                dimension, they are padded to the longest row.
            lengths: tokens of each row. If the store records no forms, a jagged field outside
                ``TOKEN_ALIGNED_FIELDS`` counts as put ragged only if its rows have these lengths.
                If None or empty, every jagged field counts as put ragged.
            origins: see `get_samples`.
            forms: a dict to which the `dataplane_core.schema.Form` of each field that has one is
                added.

        Returns:
            A dict in the order of ``select_fields``, of dense tensors (n, ...) and numpy object
            arrays (n,); the caller owns their memory. Two kinds of fields are not padded: those put
            as a nested tensor of strided layout (images), and those whose rows differ beyond their
            first dimension. They are nested tensors unless their rows have one shape. Without ids
            the dict is empty.

        Raises:
            InvalidRequestError: (a ValueError) ``width`` is above 1, and ``advantages`` or
                ``sample_mask`` was put dense with shape (n, 1), which is ambiguous: it may be per
                sample, but would be padded.
            DataPlaneError: as `get_samples`.
        """
        from dataplane_core.tensors.columns import check_answer, check_padding, columns_of_fields
        from dataplane_core.tensors.rows import forms_of, set_forms_by_lengths

        read = check_read("get_columns", sample_ids, partition_id, select_fields, origins=origins)
        pad_values, width = check_padding(read.operation, pad_values, width)
        keywords = _without_none(origins=origins)
        samples = self.get_samples(read.sample_ids, read.partition_id, read.fields, **keywords)
        if not read.sample_ids:
            return {}
        set_forms_by_lengths(samples, lengths)
        columns = columns_of_fields(samples, pad_values=pad_values, width=width)
        check_answer(read.operation, columns, read.fields, len(read.sample_ids))
        if forms is not None:
            forms.update(forms_of(samples))
        return {name: columns[name] for name in read.fields}

    def acknowledge(self, meta: KVBatchMeta) -> None:
        """Acknowledge a leased claim, or a subset of it: its samples never return to the task.

        Raises:
            InvalidRequestError: (a ValueError) ``meta`` names another task than its claim.
            LeaseLostError: the lease expired or was ended for one of the samples.
            UnsupportedError: the client has no leases.
        """
        raise _unsupported(self, "leases")

    def renew(self, meta: KVBatchMeta) -> None:
        """Restart the lease of a claim; the errors are those of `acknowledge`."""
        raise _unsupported(self, "leases")

    def release(self, meta: KVBatchMeta) -> None:
        """Release a leased claim: its samples can be claimed again.

        The errors are those of `acknowledge`.
        """
        raise _unsupported(self, "leases")

    @property
    def inspector(self) -> StoreInspector:
        """The inspector of the store; for ``capabilities.inspection``.

        Raises:
            UnsupportedError: the store cannot be inspected.
        """
        raise _unsupported(self, "inspection and capabilities.conservation")

    @property
    def store_key(self) -> Hashable:
        """Key of the store, equal for all its clients in this process.

        Telemetry reports each key once. By default the key is the client itself.
        """
        return self

    def withdraw_samples(self: SampleStore, sample_ids: list[str], partition_id: str) -> None:
        """Undo a put whose samples will be put again under other ids.

        The samples are dropped as by a forced `clear_samples`; unknown ids are ignored. They count
        as never put, so that a blocking claim waits for their replacements. Without
        ``capabilities.withdrawal`` they count as put and cleared.
        """
        ids, partition, _ = check_clear("withdraw_samples", sample_ids, partition_id)
        try:
            self.clear_samples(ids, partition)
        except SamplesLeasedError:
            self.clear_samples(ids, partition, force=True)

    def read_origins(
        self, sample_ids: Sequence[str], partition_id: str, fields: Sequence[str]
    ) -> dict[str, int]:
        """Return the origins of the puts that wrote ``fields`` of ``sample_ids``.

        Returns:
            A dict of the put's ``origin`` to the number of samples in which the put wrote one of
            the fields, largest number first. Values put without an origin, and unknown ids and
            fields, are left out.

        Raises:
            PartitionNotFoundError: the partition is not registered.
            UnsupportedError: the client stores no origins; see ``capabilities.origins``.
        """
        raise _unsupported(self, "origins")


def _without_none(**keywords: Any) -> dict[str, Any]:
    """Return the keywords that are not None; adapters may not know the others."""
    return {name: value for name, value in keywords.items() if value is not None}


def _unsupported(client: object, promise: str) -> UnsupportedError:
    return UnsupportedError(f"{type(client).__name__} lacks capabilities.{promise}")
