"""`BatchedDataDict`: the columns of a batch, with what training does to a batch's rows.

The plan of micro-batches travels as three attributes beside the columns. It refers to rows by
place, so every operation that changes places leaves a batch without it; only `get_batch` carries
the part that belongs to its rows.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar  # Any: columns are tensors, arrays or lists

import torch

from column_io.batching_args import DynamicBatchingArgs, SequencePackingArgs
from column_io.column_rows import (
    count_rows,
    dense_width,
    join_columns,
    repeat_rows,
    slice_rows,
    take_rows,
)
from column_io.shard_plan import (
    MicroBatchIndices,
    RankPlan,
    UnevenShardsError,
    plan_dynamic_batching,
    plan_even_shards,
    plan_sequence_packing,
)
from dataplane_core import INPUT_IDS, INPUT_LENGTHS, InvalidRequestError, MissingDataError
from dataplane_core.arguments import checked_int, checked_ints
from dataplane_core.columns import is_per_token
from dataplane_core.errors import listed
from dataplane_core.schema import Form

_ColumnsT = TypeVar("_ColumnsT")


class BatchedDataDict(UserDict[str, Any], Generic[_ColumnsT]):
    """A dict of columns with one row per sample in each.

    A column is a tensor (dense, or nested for rows of different length), a numpy array, or a list.
    The type parameter names a TypedDict of the columns, for readers and editors only.

    Attributes:
        micro_batch_indices: per global batch a list of [start, stop) relative to its first row, or
            None if no micro-batches are planned.
        micro_batch_lengths: per global batch, the tokens (sequence packing) or the width (dynamic
            batching) of each micro-batch; None likewise.
        elem_counts_per_gb: rows per global batch, with sequence packing; else None.
        forms: the `dataplane_core.schema.Form` of the columns that have one, as a read or
            `materialize` knows them; None if the batch was put together by hand.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batch_indices: MicroBatchIndices | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None
        self.forms: Mapping[str, Form] | None = None

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[str, Any]],
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> Self:
        """One batch with the rows of ``batches`` one after the other.

        Args:
            batches: at least one; all have the same columns.
            pad_value_dict: column to the value that fills dim 1 of narrower tensors (of two or
                more dims) up to the widest; 0 if absent.

        Raises:
            MissingDataError: (a KeyError and a ValueError) if a batch lacks a column of another.
            InvalidRequestError: (a ValueError) if there is no batch, or if a column's parts differ
                in kind, dtype or shape beyond dims 0 and 1.
        """
        if not batches:
            raise InvalidRequestError("from_batches: no batches; expected at least one")
        names = list(dict.fromkeys(name for batch in batches for name in batch))
        for place, batch in enumerate(batches):
            missing = [name for name in names if name not in batch]
            if missing:
                raise MissingDataError(
                    f"from_batches: batch {place} of {len(batches)} lacks columns "
                    f"{listed(missing)}; drop them from the others or add them",
                    fields=missing,
                )
        pad_values = pad_value_dict or {}
        forms: dict[str, Form] = {}
        for batch in batches:
            forms |= getattr(batch, "forms", None) or {}
        joined = cls(
            {
                name: join_columns(
                    name,
                    [batch[name] for batch in batches],
                    pad_values.get(name, 0),
                    shaped=forms.get(name) == "shaped",
                )
                for name in names
            }
        )
        if all(getattr(batch, "forms", None) is not None for batch in batches):
            joined.forms = forms
        return joined

    @property
    def size(self) -> int:
        """Number of rows; 0 without columns.

        Raises:
            InvalidRequestError: (a ValueError) if the columns disagree.
        """
        counts = {name: count_rows(name, column) for name, column in self.data.items()}
        if len(set(counts.values())) > 1:
            found = ", ".join(f"{name}: {count}" for name, count in list(counts.items())[:10])
            raise InvalidRequestError(f"batch: columns differ in their number of rows ({found})")
        return next(iter(counts.values()), 0)

    def get_dict(self) -> dict[str, Any]:
        """The columns as a plain dict, which this batch keeps using."""
        return self.data

    def to(self, device: str | torch.device) -> Self:
        """Move every tensor to ``device``, in place, and return this batch."""
        for name, column in self.data.items():
            if isinstance(column, torch.Tensor):
                self.data[name] = column.to(device)
        return self

    def slice(self, start: int, end: int) -> Self:
        """The rows in ``[start, end)``, by Python's slice rules; dense tensors are views."""
        start, end, _ = slice(start, end).indices(self.size)
        return self._like(
            {name: slice_rows(column, start, end) for name, column in self.data.items()}
        )

    def _like(self, columns: dict[str, Any]) -> Self:
        batch = type(self)(columns)
        batch.forms = self.forms
        return batch

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """The rows at ``indices``, copied, in that order; repeats are fine.

        Args:
            indices: places in this batch; a tensor is 1-D, of integers or a bool mask of the rows.

        Raises:
            IndexError: if an index is outside the batch.
        """
        picked = self._checked_indices(indices)
        return self._like({name: take_rows(column, picked) for name, column in self.data.items()})

    def _checked_indices(self, indices: Sequence[int] | torch.Tensor) -> list[int]:
        size = self.size
        if isinstance(indices, torch.Tensor) and indices.dtype == torch.bool:
            if indices.shape != (size,):
                raise InvalidRequestError(
                    f"select_indices: mask of shape {tuple(indices.shape)}; expected ({size},)"
                )
            indices = indices.nonzero().flatten()
        picked = [int(index) for index in indices]
        for index in picked:
            if not -size <= index < size:
                raise IndexError(f"select_indices: index {index} outside a batch of {size} rows")
        return [index % size for index in picked]

    def reorder_data(self, reorded_indices: Sequence[int]) -> None:
        """Move row i to place ``reorded_indices[i]``, in place; a plan of micro-batches is dropped.

        Undoes the order that `shard_by_batch_size` returns: the concatenated shards, reordered by
        that list, are in the order of the batch that was sharded.

        Raises:
            InvalidRequestError: (a ValueError) if the list is no permutation of the rows.
        """
        size = self.size
        targets = [int(index) for index in reorded_indices]
        if sorted(targets) != list(range(size)):
            raise InvalidRequestError(
                f"reorder_data: {len(targets)} places {targets[:10]}; expected a permutation of "
                f"the {size} rows"
            )
        sources = sorted(range(size), key=lambda place: targets[place])
        for name, column in self.data.items():
            self.data[name] = take_rows(column, sources)
        self._attach(None)

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Each row ``num_repeats`` times in a row; Python values are deep copies.

        Raises:
            InvalidRequestError: (a ValueError) if ``num_repeats`` is no int of at least 0.
        """
        times = checked_int("repeat_interleave", "num_repeats", num_repeats)
        return self._like({name: repeat_rows(column, times) for name, column in self.data.items()})

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cut every dense tensor that has dimension ``dim`` to ``truncated_len`` there, in place.

        Narrower tensors stay as they are.

        Raises:
            InvalidRequestError: (a ValueError) if ``truncated_len`` is no int of at least 0.
        """
        length = checked_int("truncate_tensors", "truncated_len", truncated_len)
        self._truncate(dim, length, list(self.data))

    def _truncate(self, dim: int, length: int, names: Sequence[str]) -> Self:
        for name in names:
            width = dense_width(self.data[name], dim)
            if width is not None:
                self.data[name] = self.data[name].narrow(dim, 0, min(length, width))
        return self

    def chunk(self, rank: int, chunks: int) -> Self:
        """Part ``rank`` of ``chunks`` contiguous parts, copied; the last ones may be smaller.

        Raises:
            InvalidRequestError: (a ValueError) unless 0 <= ``rank`` < ``chunks``.
        """
        chunks = checked_int("chunk", "chunks", chunks, least=1)
        rank = checked_int("chunk", "rank", rank, most=chunks - 1)
        return self.select_indices(
            plan_even_shards(self.size, chunks, allow_uneven=True)[rank].rows
        )

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
    ) -> list[Self] | tuple[list[Self], list[int]]:
        """Deal the rows to ``shards`` ranks, global batch by global batch.

        The batch is cut into global batches of ``batch_size`` rows; each is dealt on its own, and a
        rank's shard has its rows of the first, then of the second, and so on.

        Args:
            shards: number of ranks.
            batch_size: rows in a global batch; None is the whole batch.
            allow_uneven_shards: the last ranks may get fewer rows; without ``batch_size`` and
                micro-batches only.
            dynamic_batching_args: group rows of similar length into micro-batches of one width.
            sequence_packing_args: pack rows into micro-batches of bounded tokens.

        Returns:
            The shards. With either kind of micro-batches a tuple of the shards, with their plan
            attached, and the order: ``order[j]`` is the row of this batch that stands at place j
            of the concatenated shards. `reorder_data` takes it.

        Raises:
            InvalidRequestError: (a ValueError) if the arguments exclude each other or a row exceeds
                a micro-batch.
            UnevenShardsError: (a ValueError and an AssertionError) if the rows do not divide.
        """
        exclusive = [allow_uneven_shards, dynamic_batching_args, sequence_packing_args]
        if sum(bool(argument) for argument in exclusive) > 1:
            raise InvalidRequestError(
                "shard_by_batch_size: expected at most one of allow_uneven_shards, "
                "dynamic_batching_args and sequence_packing_args"
            )
        size = self.size
        if sequence_packing_args is not None:
            lengths = self._row_lengths(sequence_packing_args.get("input_lengths_key"))
            plans = plan_sequence_packing(
                lengths, shards, sequence_packing_args, batch_size=batch_size
            )
        elif dynamic_batching_args is not None:
            lengths = self._row_lengths(dynamic_batching_args.get("input_lengths_key"))
            plans = plan_dynamic_batching(
                lengths, shards, dynamic_batching_args, batch_size=batch_size
            )
        else:
            plans = plan_even_shards(
                size, shards, batch_size=batch_size, allow_uneven=allow_uneven_shards
            )
            return [self._planned(plan) for plan in plans]
        return [self._planned(plan) for plan in plans], [row for plan in plans for row in plan.rows]

    def _row_lengths(self, key: str | None) -> list[int]:
        name = INPUT_LENGTHS if key is None else key
        if name not in self.data:
            raise MissingDataError(
                f"shard_by_batch_size: no column {name!r} among {listed(self.data)}; "
                "input_lengths_key names the column of the lengths",
                fields=[name],
            )
        return checked_ints("shard_by_batch_size", name, self.data[name])

    def _planned(self, plan: RankPlan) -> Self:
        shard = self.select_indices(plan.rows)
        shard._attach(plan)
        return shard

    def _attach(self, plan: RankPlan | None) -> None:
        self.micro_batch_indices = None if plan is None else plan.micro_batch_indices
        self.micro_batch_lengths = None if plan is None else plan.micro_batch_lengths
        self.elem_counts_per_gb = None if plan is None else plan.elem_counts_per_gb

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> Self:
        """Global batch ``batch_idx`` of this shard, with its micro-batches if planned.

        Args:
            batch_idx: which one, from 0.
            batch_size: rows in a global batch on this rank. With planned micro-batches the plan
                says it, and this is not read.

        Raises:
            InvalidRequestError: (a ValueError) without a plan and without ``batch_size``.
            IndexError: if there is no such global batch.
        """
        if self.micro_batch_indices is None:
            if batch_size is None or batch_size < 1:
                raise InvalidRequestError(
                    f"get_batch: batch_size {batch_size} and no planned micro-batches; expected "
                    "the rows of a global batch"
                )
            start, stop = batch_idx * batch_size, (batch_idx + 1) * batch_size
            if batch_idx < 0 or stop > self.size:
                raise IndexError(
                    f"get_batch: rows {start} to {stop} of a batch of {self.size} rows"
                )
            return self.slice(start, stop)
        if not 0 <= batch_idx < len(self.micro_batch_indices):
            raise IndexError(
                f"get_batch: batch {batch_idx}; {len(self.micro_batch_indices)} are planned"
            )
        self._check_planned("get_batch", self.micro_batch_indices)
        counts = [cuts[-1][1] for cuts in self.micro_batch_indices]
        start = sum(counts[:batch_idx])
        batch = self.slice(start, start + counts[batch_idx])
        batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
        if self.micro_batch_lengths is not None:
            batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
        if self.elem_counts_per_gb is not None:
            batch.elem_counts_per_gb = [self.elem_counts_per_gb[batch_idx]]
        return batch

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[Self]:
        """Micro-batches of ``microbatch_size`` rows, in order.

        Raises:
            UnevenShardsError: (a ValueError and an AssertionError) if the rows do not divide.
        """
        size, where = self.size, "make_microbatch_iterator"
        microbatch_size = checked_int(where, "microbatch_size", microbatch_size)
        if microbatch_size == 0 or size % microbatch_size:
            raise UnevenShardsError(
                f"{where}: {size} rows in micro-batches of {microbatch_size}; "
                "expected a divisor of the rows"
            )
        return (
            self.slice(start, start + microbatch_size) for start in range(0, size, microbatch_size)
        )

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[Self]:
        """The planned micro-batches, cut to their width along ``sequence_dim``.

        Cut are the columns that are per token, by their name or form. A batch that was put together
        by hand knows no forms: those of the width of ``input_ids`` are cut, without ``input_ids``
        all.

        Raises:
            InvalidRequestError: (a ValueError) unless micro-batches of one global batch are
                planned, for as many rows as there are; see `get_batch`.
        """
        cuts, lengths = self._single_plan("make_microbatch_iterator_with_dynamic_shapes")
        names = self._along_tokens(sequence_dim)
        return (
            self.slice(start, stop)._truncate(sequence_dim, width, names)
            for (start, stop), width in zip(cuts, lengths, strict=True)
        )

    def _along_tokens(self, dim: int) -> list[str]:
        if self.forms is not None:
            forms = self.forms
            return [name for name in self.data if is_per_token(name, forms.get(name))]
        width = dense_width(self.data.get(INPUT_IDS), dim)
        return [name for name in self.data if width in (None, dense_width(self.data[name], dim))]

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """How many micro-batches `make_microbatch_iterator_with_dynamic_shapes` yields."""
        return len(self._single_plan("get_microbatch_iterator_dynamic_shapes_len")[0])

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[Self]:
        """The planned micro-batches at full width; the consumer packs each into one sequence.

        Raises:
            InvalidRequestError: (a ValueError) unless micro-batches of one global batch are
                planned; see `get_batch`.
        """
        cuts, _ = self._single_plan("make_microbatch_iterator_for_packable_sequences")
        return (self.slice(start, stop) for start, stop in cuts)

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """How many micro-batches there are, and the tokens of the largest."""
        cuts, lengths = self._single_plan("get_microbatch_iterator_for_packable_sequences_len")
        return len(cuts), max(lengths)

    def _check_planned(self, caller: str, indices: MicroBatchIndices) -> None:
        planned = sum(cuts[-1][1] for cuts in indices if cuts)
        if planned != self.size:
            raise InvalidRequestError(
                f"{caller}: micro-batches are planned for {planned} rows and the batch has "
                f"{self.size}; plan again after rows were added or dropped"
            )

    def _single_plan(self, caller: str) -> tuple[list[list[int]], list[int]]:
        indices, lengths = self.micro_batch_indices, self.micro_batch_lengths
        if indices is None or lengths is None:
            raise InvalidRequestError(
                f"{caller}: no micro-batches are planned; shard with sequence_packing_args or "
                "dynamic_batching_args, or read a shard whose meta has a plan for its rows in "
                "their order"
            )
        if len(indices) != 1 or len(lengths) != 1:
            raise InvalidRequestError(
                f"{caller}: micro-batches of {len(indices)} global batches; expected one, "
                "take it with get_batch"
            )
        self._check_planned(caller, indices)
        return indices[0], lengths[0]
