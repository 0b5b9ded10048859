"""`BatchedDataDict`: the columns of a batch, and the row operations that training needs.

Three attributes hold the plan of micro-batches. The plan refers to rows by index, so operations
that pick or move rows drop the plan; only `get_batch` keeps the part for its rows.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar  # Any: columns are tensors, arrays or lists

import numpy as np
import torch

from column_io.batching_args import DynamicBatchingArgs, SequencePackingArgs
from column_io.column_rows import (
    common_row_count,
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
from dataplane_core.arguments import (
    MIN_INT,
    checked_indices,
    checked_int,
    checked_ints,
    checked_slice,
)
from dataplane_core.display import html_table
from dataplane_core.errors import listed
from dataplane_core.schema import Form
from dataplane_core.tensors.columns import is_per_token

_ColumnsT = TypeVar("_ColumnsT")
_MAX_KINDS = 3


class BatchedDataDict(UserDict[str, Any], Generic[_ColumnsT]):
    """A dict of columns with one row per sample in each.

    A column is a tensor (dense, or nested for rows of different length), a numpy array, or a list.
    The type parameter names a TypedDict of the columns, for readers and editors only.

    Attributes:
        micro_batch_indices: per global batch a list of [start, stop) relative to its first row;
            None without a plan.
        micro_batch_lengths: per global batch, the tokens (sequence packing) or the width (dynamic
            batching) of each micro-batch; None without a plan.
        elem_counts_per_gb: rows per global batch, with sequence packing; else None.
        forms: column to its `dataplane_core.schema.Form`, if it has one; set by reads and
            `materialize`. None if the batch was built by other code.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.micro_batch_indices: MicroBatchIndices | None = None
        self.micro_batch_lengths: list[list[int]] | None = None
        self.elem_counts_per_gb: list[int] | None = None
        self.forms: Mapping[str, Form] | None = None

    def __repr__(self) -> str:
        """Describe the columns in one line, without their values."""
        columns = ", ".join(f"{name}: {_described(column)}" for name, column in self.data.items())
        return f"{type(self).__name__}({columns})"

    def _repr_html_(self) -> str:
        """Return a table of the columns, as notebooks show it."""
        rows = [(name, _described(column)) for name, column in self.data.items()]
        return html_table(f"{type(self).__name__} of {len(rows)} columns", ("column", "type"), rows)

    @classmethod
    def from_batches(
        cls,
        batches: Sequence[Mapping[str, Any]],
        pad_value_dict: Mapping[str, float] | None = None,
    ) -> Self:
        """Return one batch with the rows of all ``batches``, in order.

        Args:
            batches: at least one; all have the same columns.
            pad_value_dict: column to the value that pads dim 1 of narrower tensors (of two or more
                dims) to the widest; 0 if absent.

        Raises:
            MissingDataError: (a KeyError and a ValueError) a batch lacks a column of another.
            InvalidRequestError: (a ValueError) there is no batch, or a column's parts differ in
                kind, dtype or shape beyond dims 0 and 1 (of arrays: beyond dim 0).
        """
        if not batches:
            raise InvalidRequestError("from_batches: no batches; expected at least one")
        names = list(dict.fromkeys(name for batch in batches for name in batch))
        for index, batch in enumerate(batches):
            missing = [name for name in names if name not in batch]
            if missing:
                raise MissingDataError(
                    f"from_batches: batch {index} of {len(batches)} lacks columns "
                    f"{listed(missing)}; drop them from the other batches, or add them to this one",
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
            InvalidRequestError: (a ValueError) the columns differ in their number of rows.
        """
        return common_row_count("batch", self.data)

    def get_dict(self) -> dict[str, Any]:
        """Return the columns as a plain dict, which is not a copy."""
        return self.data

    def to(self, device: str | torch.device) -> Self:
        """Move every tensor to ``device``, in place, and return this batch."""
        for name, column in self.data.items():
            if isinstance(column, torch.Tensor):
                self.data[name] = column.to(device)
        return self

    def slice(self, start: int, end: int) -> Self:
        """Return the rows in ``[start, end)`` with Python's slice rules; dense tensors are views.

        Raises:
            InvalidRequestError: (a ValueError) a bound is not an int.
        """
        start, end, _ = checked_slice("slice", start, end).indices(self.size)
        return self._like(
            {name: slice_rows(column, start, end) for name, column in self.data.items()}
        )

    def _like(self, columns: dict[str, Any]) -> Self:
        batch = type(self)(columns)
        batch.forms = self.forms
        return batch

    def select_indices(self, indices: Sequence[int] | torch.Tensor) -> Self:
        """Return copies of the rows at ``indices``, in that order; repeats are allowed.

        Args:
            indices: row indices; a tensor is 1-D, of integers or a bool mask of the rows.

        Raises:
            InvalidRequestError: (a ValueError) an index is not an int, or a mask has another size.
            IndexError: an index is outside the batch.
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
        return checked_indices("select_indices", indices, size)

    def reorder_data(self, reorded_indices: Sequence[int]) -> None:
        """Move row i to index ``reorded_indices[i]``, in place, and drop the micro-batch plan.

        Called on the concatenated shards, with the order that `shard_by_batch_size` returned, it
        restores the order of the batch that was sharded.

        Raises:
            InvalidRequestError: (a ValueError) the list is not a permutation of the rows.
        """
        size = self.size
        targets = checked_ints("reorder_data", "reorded_indices", reorded_indices, minimum=MIN_INT)
        if sorted(targets) != list(range(size)):
            raise InvalidRequestError(
                f"reorder_data: {len(targets)} indices {targets[:10]}; expected a permutation of "
                f"the {size} rows"
            )
        sources = sorted(range(size), key=lambda row: targets[row])
        for name, column in self.data.items():
            self.data[name] = take_rows(column, sources)
        self._attach(None)

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Return each row ``num_repeats`` times consecutively; Python values are deep copies.

        Raises:
            InvalidRequestError: (a ValueError) ``num_repeats`` is not an int of at least 0.
        """
        times = checked_int("repeat_interleave", "num_repeats", num_repeats)
        return self._like({name: repeat_rows(column, times) for name, column in self.data.items()})

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Cut every dense tensor to ``truncated_len`` along ``dim``, in place.

        Tensors that are narrower, or lack the dimension, stay as they are.

        Raises:
            InvalidRequestError: (a ValueError) an argument is not an int of at least 0.
        """
        dim = checked_int("truncate_tensors", "dim", dim)
        length = checked_int("truncate_tensors", "truncated_len", truncated_len)
        self._truncate(dim, length, list(self.data))

    def _truncate(self, dim: int, length: int, names: Sequence[str]) -> Self:
        for name in names:
            width = dense_width(self.data[name], dim)
            if width is not None:
                self.data[name] = self.data[name].narrow(dim, 0, min(length, width))
        return self

    def chunk(self, rank: int, chunks: int) -> Self:
        """Cut the rows into ``chunks`` contiguous parts; return a copy of part ``rank``.

        The last parts may be smaller or empty.

        Raises:
            InvalidRequestError: (a ValueError) unless 0 <= ``rank`` < ``chunks``.
        """
        chunks = checked_int("chunk", "chunks", chunks, minimum=1)
        rank = checked_int("chunk", "rank", rank, maximum=chunks - 1)
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
        """Distribute the rows over ``shards`` ranks, global batch by global batch.

        The batch is cut into global batches of ``batch_size`` rows, and each is distributed
        separately. A shard has its rank's rows of the first global batch, then of the second, and
        so on.

        Args:
            shards: number of ranks.
            batch_size: rows in a global batch; None means one global batch with all rows.
            allow_uneven_shards: the last ranks may get fewer rows; cannot be combined with
                ``batch_size`` or micro-batches.
            dynamic_batching_args: group rows of similar length into micro-batches of one width.
            sequence_packing_args: pack rows into micro-batches of bounded tokens.

        Returns:
            The shards. With micro-batches a tuple: the shards, with their plans attached, and the
            order for `reorder_data`: ``order[j]`` is the row of this batch at index j of the
            concatenated shards.

        Raises:
            InvalidRequestError: (a ValueError) two arguments exclude each other, or a row exceeds a
                micro-batch.
            UnevenShardsError: (a ValueError and an AssertionError) the rows cannot be divided
                evenly.
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
        """Return global batch ``batch_idx`` of this shard, with its micro-batches if planned.

        Args:
            batch_idx: index of the global batch.
            batch_size: rows in a global batch on this rank; ignored if micro-batches are planned,
                because the plan has the number.

        Raises:
            InvalidRequestError: (a ValueError) there is neither a plan nor ``batch_size``, or a
                number is not an int.
            IndexError: there is no such global batch.
        """
        batch_idx = checked_int("get_batch", "batch_idx", batch_idx, minimum=MIN_INT)
        if self.micro_batch_indices is None:
            if batch_size is None:
                raise InvalidRequestError(
                    "get_batch: no batch_size and no planned micro-batches; pass batch_size, the "
                    "number of rows of a global batch"
                )
            batch_size = checked_int("get_batch", "batch_size", batch_size, minimum=1)
            start, stop = batch_idx * batch_size, (batch_idx + 1) * batch_size
            if batch_idx < 0 or stop > self.size:
                raise IndexError(
                    f"get_batch: rows {start} to {stop} are outside a batch of {self.size} rows"
                )
            return self.slice(start, stop)
        if not 0 <= batch_idx < len(self.micro_batch_indices):
            raise IndexError(
                f"get_batch: no global batch {batch_idx}; "
                f"{len(self.micro_batch_indices)} are planned"
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
        """Yield micro-batches of ``microbatch_size`` rows, in order.

        Raises:
            UnevenShardsError: (a ValueError and an AssertionError) the rows cannot be divided
                evenly.
        """
        size, operation = self.size, "make_microbatch_iterator"
        microbatch_size = checked_int(operation, "microbatch_size", microbatch_size)
        if microbatch_size == 0 or size % microbatch_size:
            raise UnevenShardsError(
                f"{operation}: {size} rows in micro-batches of {microbatch_size}; "
                "expected a size that divides the number of rows"
            )
        return (
            self.slice(start, start + microbatch_size) for start in range(0, size, microbatch_size)
        )

    def make_microbatch_iterator_with_dynamic_shapes(self, sequence_dim: int = 1) -> Iterator[Self]:
        """Yield the planned micro-batches, cut to their width along ``sequence_dim``.

        It cuts the columns that are per token, by their name or form. In a batch without forms it
        cuts the columns that have the width of ``input_ids``; without ``input_ids``, all columns.

        Raises:
            InvalidRequestError: (a ValueError) there is no plan, or the plan has several global
                batches (see `get_batch`) or another number of rows.
        """
        operation = "make_microbatch_iterator_with_dynamic_shapes"
        sequence_dim = checked_int(operation, "sequence_dim", sequence_dim)
        cuts, lengths = self._single_plan(operation)
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
        """Return the length of `make_microbatch_iterator_with_dynamic_shapes`."""
        return len(self._single_plan("get_microbatch_iterator_dynamic_shapes_len")[0])

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[Self]:
        """Yield the planned micro-batches at full width; the consumer packs each into one sequence.

        Raises:
            InvalidRequestError: (a ValueError) there is no plan, or the plan has several global
                batches (see `get_batch`) or another number of rows.
        """
        cuts, _ = self._single_plan("make_microbatch_iterator_for_packable_sequences")
        return (self.slice(start, stop) for start, stop in cuts)

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Return the number of micro-batches, and the tokens of the largest."""
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
                "dynamic_batching_args, or read a shard whose meta has a plan for its rows in this "
                "order"
            )
        if len(indices) != 1 or len(lengths) != 1:
            raise InvalidRequestError(
                f"{caller}: micro-batches of {len(indices)} global batches; expected one, from "
                "get_batch"
            )
        self._check_planned(caller, indices)
        return indices[0], lengths[0]


def _described(column: object) -> str:
    """Return type and shape of a column; a nested tensor has a ragged axis."""
    if isinstance(column, torch.Tensor):
        dtype = str(column.dtype).removeprefix("torch.")
        if column.is_nested:
            return f"{dtype}[{column.size(0)}, ragged]"
        return f"{dtype}{list(column.shape)}"
    if isinstance(column, np.ndarray):
        return f"numpy {column.dtype}{list(column.shape)}"
    if isinstance(column, list):
        kinds = sorted({type(value).__name__ for value in column})
        return f"list of {len(column)} ({', '.join(kinds[:_MAX_KINDS])})"
    return type(column).__name__
