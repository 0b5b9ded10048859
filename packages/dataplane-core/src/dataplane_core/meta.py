"""`KVBatchMeta`: a reference to rows of a partition, which processes exchange instead of tensors.

It carries the per-row facts that routing needs (lengths, tags), so that a driver can shard, filter
and merge batches without fetching a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar  # Any: tags and extra_info hold the caller's own values

from dataplane_core.arguments import (
    checked_indices,
    checked_ints,
    checked_items,
    checked_mapping,
    checked_name,
    checked_slice,
)
from dataplane_core.display import html_table, quote_first
from dataplane_core.errors import InvalidRequestError
from dataplane_core.tags import checked_column

LEASE = "lease"
"""``extra_info`` key of the lease token that a claim carries."""

_T = TypeVar("_T")


@dataclass
class KVBatchMeta:
    """Names of rows in a partition, with the facts needed to route them.

    `DataPlaneClient.claim_meta` and `DataPlaneClient.put_samples` return one;
    `DataPlaneClient.get_data` and every stage that works on a shard of a batch accept one. All
    transforms return new objects whose lists and ``extra_info`` are copies.

    Attributes:
        partition_id: the partition that holds the rows.
        task_name: the consumer task the batch was claimed for, or None.
        sample_ids: one id per row, in batch order; may be empty and may repeat.
        fields: names of the batch's columns, or None if not decided.
        sequence_lengths: valid tokens per row, or None if unknown. Only `subset`,
            `slice`, `concat` and `drop` check its length against ``sample_ids``, because stages
            fill it at different times.
        extra_info: facts about the batch (pad width, micro-batch plan, metrics).
        tags: one dict of primitives per row, or None.

    Raises:
        InvalidRequestError: (a ValueError) ``tags`` has another length than ``sample_ids``.
    """

    partition_id: str
    task_name: str | None
    sample_ids: list[str]
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.tags is not None and len(self.tags) != len(self.sample_ids):
            raise InvalidRequestError(
                f"KVBatchMeta(partition={self.partition_id!r}): {len(self.tags)} tags for "
                f"{len(self.sample_ids)} sample_ids; give one dict per id, or None"
            )

    def __repr__(self) -> str:
        """Describe the batch in one line, with its first two ids and without values of tags."""
        parts = [f"partition={self.partition_id!r}"]
        if self.task_name is not None:
            parts.append(f"task={self.task_name!r}")
        ids = quote_first(self.sample_ids[:2], self.size)
        parts.append(f"{self.size} samples ({ids})" if ids else "0 samples")
        if self.fields is not None:
            parts.append(f"fields={self.fields}")
        if self.sequence_lengths is not None:
            with suppress(TypeError):  # unchecked lengths
                parts.append(f"{sum(self.sequence_lengths)} tokens")
        if self.tags:
            parts.append(f"tags={self._tag_names()}")
        return f"KVBatchMeta({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Return an HTML table of the first samples with their token counts and tags."""
        names = self._tag_names()
        lengths = self.sequence_lengths
        columns: list[Sequence[object]] = [self.sample_ids]
        if lengths is not None:
            columns.append(lengths)
        columns += [[tags.get(name, "") for tags in self.tags or ()] for name in names]
        header = ["sample", *(["tokens"] if lengths is not None else []), *names]
        return html_table(repr(self), header, list(zip(*columns, strict=False)))

    def _tag_names(self) -> list[str]:
        return sorted({str(name) for tags in self.tags or () for name in tags})

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.sample_ids)

    def stamp_tags(self, scalars: dict[str, Sequence[Any]]) -> None:
        """Write per-row scalars into ``tags``, in place.

        Args:
            scalars: tag name to a sequence of ``size`` values (list, 1-D tensor or 1-D array).
                Elements of tensors and arrays become Python scalars.

        Raises:
            InvalidRequestError: (a ValueError) a sequence has another length, or a tag cannot hold
                a value (`dataplane_core.tags.primitive`); no tag is written.
        """
        given = checked_mapping("stamp_tags", "scalars", scalars, "a dict of name to values")
        stamped: dict[str, list[Any]] = {}
        for key, values in given.items():
            name = checked_name("stamp_tags", "a tag's name", key)
            column = checked_items("stamp_tags", repr(name), values, "one value per sample")
            if len(column) != self.size:
                raise InvalidRequestError(
                    f"stamp_tags({name!r}): {len(column)} values for {self.size} samples"
                )
            stamped[name] = checked_column("stamp_tags", name, column)
        if self.tags is None:
            self.tags = [{} for _ in self.sample_ids]
        for name, column in stamped.items():
            for tag, value in zip(self.tags, column, strict=True):
                tag[name] = value

    def _lengths(self) -> list[int] | None:
        """Return ``sequence_lengths`` as plain ints; a transform needs one per row."""
        if self.sequence_lengths is None:
            return None
        operation = f"KVBatchMeta(partition={self.partition_id!r})"
        # Items of a tensor are tensors, which messages between processes cannot carry.
        lengths = checked_ints(operation, "sequence_lengths", self.sequence_lengths)
        if len(lengths) != self.size:
            raise InvalidRequestError(
                f"{operation}: {len(lengths)} sequence_lengths "
                f"for {self.size} sample_ids; subset, slice, concat and drop need one per id, or "
                "None"
            )
        return lengths

    def _replace(
        self,
        *,
        sample_ids: list[str],
        sequence_lengths: list[int] | None,
        tags: list[dict[str, Any]] | None = None,
    ) -> KVBatchMeta:
        return replace(
            self,
            sample_ids=list(sample_ids),
            fields=None if self.fields is None else list(self.fields),
            sequence_lengths=None if sequence_lengths is None else list(sequence_lengths),
            extra_info=dict(self.extra_info),
            tags=None if tags is None else list(tags),
        )

    def subset(self, indices: Sequence[int]) -> KVBatchMeta:
        """Return the rows at ``indices``, in that order. Tag dicts are shared with this meta.

        Raises:
            InvalidRequestError: (a ValueError) an index is not an int.
            IndexError: an index is outside the batch.
        """
        picked = checked_indices("subset", indices, self.size)
        return self._replace(
            sample_ids=[self.sample_ids[i] for i in picked],
            sequence_lengths=_pick(self._lengths(), picked),
            tags=_pick(self.tags, picked),
        )

    def slice(self, start: int, stop: int) -> KVBatchMeta:
        """Return the rows in ``[start, stop)``. Tag dicts are shared with this meta.

        Raises:
            InvalidRequestError: (a ValueError) a bound is not an int.
        """
        rows, lengths = checked_slice("slice", start, stop), self._lengths()
        return self._replace(
            sample_ids=self.sample_ids[rows],
            sequence_lengths=None if lengths is None else lengths[rows],
            tags=None if self.tags is None else self.tags[rows],
        )

    def concat(self, *others: KVBatchMeta) -> KVBatchMeta:
        """Return this batch followed by ``others``.

        Task, fields and ``extra_info`` come from this meta. ``sequence_lengths`` becomes None if
        any input has None, and so does ``tags``.

        Raises:
            InvalidRequestError: (a ValueError) an input names another partition.
        """
        metas = (self, *others)
        for other in others:
            if other.partition_id != self.partition_id:
                raise InvalidRequestError(
                    f"concat: partition {other.partition_id!r} joined to {self.partition_id!r}; "
                    "a meta names rows of one partition"
                )
        return self._replace(
            sample_ids=[sample_id for meta in metas for sample_id in meta.sample_ids],
            sequence_lengths=_join(meta._lengths() for meta in metas),
            tags=_join(meta.tags for meta in metas),
        )

    def drop(self, indices: Iterable[int]) -> KVBatchMeta | None:
        """Return all rows except those at ``indices``; None if no row remains.

        Order and repeats in ``indices`` do not matter. Negative indices count from the end.

        Raises:
            InvalidRequestError: (a ValueError) an index is not an int.
            IndexError: an index is outside the batch.
        """
        dropped = set(checked_indices("drop", indices, self.size))
        kept = [i for i in range(self.size) if i not in dropped]
        return self.subset(kept) if kept else None

    def with_fields(self, names: Iterable[str]) -> KVBatchMeta:
        """Return a copy with ``names`` appended to ``fields``, each once. Tag dicts are copied."""
        copied = self._replace(
            sample_ids=self.sample_ids,
            sequence_lengths=self.sequence_lengths,
            tags=None if self.tags is None else [dict(tag) for tag in self.tags],
        )
        copied.fields = list(dict.fromkeys([*(self.fields or []), *names]))
        return copied


def _pick(values: list[_T] | None, indices: list[int]) -> list[_T] | None:
    return None if values is None else [values[i] for i in indices]


def _join(parts: Iterable[list[_T] | None]) -> list[_T] | None:
    joined: list[_T] = []
    for part in parts:
        if part is None:
            return None
        joined.extend(part)
    return joined


def lease_token(meta: KVBatchMeta) -> str:
    """Return the token of the lease under which ``meta`` was claimed.

    Raises:
        InvalidRequestError: (a ValueError) the claim carries no lease.
    """
    token = meta.extra_info.get(LEASE)
    if not isinstance(token, str):
        raise InvalidRequestError(
            f"claim of {len(meta.sample_ids)} samples of partition {meta.partition_id!r} carries "
            "no lease; set claim_lease_s in the data-plane config before claiming"
        )
    return token
