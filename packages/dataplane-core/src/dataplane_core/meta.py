"""`KVBatchMeta`: what travels between processes instead of the bulk.

A meta names rows of one partition and carries per-row facts that routing needs (lengths, tags), so
that a driver can shard, filter and merge batches without ever fetching a tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar  # Any: tags and extra_info hold the caller's own values

from dataplane_core.arguments import checked_items, checked_mapping, checked_name
from dataplane_core.errors import InvalidRequestError
from dataplane_core.tags import checked_column

_T = TypeVar("_T")


@dataclass
class KVBatchMeta:
    """Names of rows in a partition, with the facts needed to route them.

    Returned by `DataPlaneClient.claim_meta` and `DataPlaneClient.put_samples`, accepted by
    `DataPlaneClient.get_data` and by every stage that works on a shard of a batch. All transforms
    return new objects whose lists and ``extra_info`` are copies.

    Attributes:
        partition_id: the partition that holds the rows.
        task_name: the consumer task the batch was claimed for, or None.
        sample_ids: one id per row, in batch order; may be empty and may repeat.
        fields: names of the columns the batch is about, or None if not decided.
        sequence_lengths: valid tokens per row, or None if not known. Checked against
            ``sample_ids`` by the transforms alone, because stages fill it at different times.
        extra_info: facts about the batch as a whole (pad width, micro-batch plan, metrics).
        tags: one dict of primitives per row, or None.

    Raises:
        InvalidRequestError: (a ValueError) if ``tags`` has another length than ``sample_ids``.
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
            InvalidRequestError: (a ValueError) if a sequence has another length, or a value is
                none that a tag can hold (`dataplane_core.tags.primitive`); no tag is written then.
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
        """``sequence_lengths``, for a transform: row i's must be at place i."""
        lengths = self.sequence_lengths
        if lengths is not None and len(lengths) != self.size:
            raise InvalidRequestError(
                f"KVBatchMeta(partition={self.partition_id!r}): {len(lengths)} sequence_lengths "
                f"for {self.size} sample_ids; expected one per id, or None, before rows are "
                "picked, moved or joined"
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
        """The rows at ``indices``, in that order. Tag dicts are shared with this meta."""
        picked = [int(i) for i in indices]
        return self._replace(
            sample_ids=[self.sample_ids[i] for i in picked],
            sequence_lengths=_pick(self._lengths(), picked),
            tags=_pick(self.tags, picked),
        )

    def slice(self, start: int, stop: int) -> KVBatchMeta:
        """The rows in ``[start, stop)``. Tag dicts are shared with this meta."""
        lengths = self._lengths()
        return self._replace(
            sample_ids=self.sample_ids[start:stop],
            sequence_lengths=None if lengths is None else lengths[start:stop],
            tags=None if self.tags is None else self.tags[start:stop],
        )

    def concat(self, *others: KVBatchMeta) -> KVBatchMeta:
        """This batch followed by ``others``.

        Task, fields and ``extra_info`` come from this meta. ``sequence_lengths`` (and, on its own,
        ``tags``) becomes None as soon as one input has None.

        Raises:
            InvalidRequestError: (a ValueError) if another partition is among the inputs.
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
        """All rows but those at ``indices``; the complement of `subset`, None if nothing is left.

        Order and repeats in ``indices`` do not matter. Negative indices count from the end.

        Raises:
            IndexError: if an index is outside the batch.
        """
        dropped: set[int] = set()
        for index in indices:
            place = int(index)
            if not -self.size <= place < self.size:
                raise IndexError(f"drop: index {place} outside a batch of {self.size} samples")
            dropped.add(place % self.size)
        kept = [i for i in range(self.size) if i not in dropped]
        return self.subset(kept) if kept else None

    def with_fields(self, names: Iterable[str]) -> KVBatchMeta:
        """A copy with ``names`` appended to ``fields``, each name once. Tag dicts are copied."""
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
