"""`HeldBoxes`: the boxes of tensors that a source holds, checked and in columns.

Positions in the arena are not included: replicas hold the same boxes and share one `HeldBoxes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from refit_mx.errors import ProtocolError
from refit_mx.layout import MAX_AXES
from refit_mx.manifest.format import BLOCK_BYTES, ShardColumns
from refit_mx.manifest.reads import Int64s
from refit_mx.plan.tensor_columns import TensorColumns

_INT32 = np.dtype("<i4")
_INT64 = np.dtype("<i8")


@dataclass(frozen=True, eq=False)
class HeldBoxes:
    """Boxes of tensors, one per row, in the order of the manifest."""

    tensor: Int64s  # (n,), row of the merged `TensorColumns`
    start: Int64s  # (n, MAX_AXES), padded at the end with 0
    stop: Int64s  # (n, MAX_AXES), padded at the end with 1
    nbytes: Int64s  # (n,), size of each box
    blocks_before: Int64s  # (n + 1,), number of digests of all boxes before each

    @classmethod
    def decode(
        cls, shards: ShardColumns, tensors: TensorColumns, rows: Int64s, worker: str
    ) -> HeldBoxes:
        """Decode a manifest's shards.

        ``rows`` has the row in ``tensors`` of each tensor in the manifest's table.

        Raises:
            ProtocolError: a column has a wrong length, or a shard belongs to no tensor of the table
                or extends beyond its tensor.
        """
        label = f"manifest of worker {worker!r}: its shards"
        if not 0 <= shards.axes <= MAX_AXES:
            raise ProtocolError(f"{label} have {shards.axes} axes; expected at most {MAX_AXES}")
        count = len(shards.tensor) // _INT32.itemsize
        for name, itemsize in (
            ("tensor", _INT32.itemsize),
            ("start", shards.axes * _INT64.itemsize),
            ("shape", shards.axes * _INT64.itemsize),
        ):
            actual = len(getattr(shards, name))
            if actual != count * itemsize:
                raise ProtocolError(
                    f"{label}: column {name!r} has {actual} bytes; "
                    f"expected {count * itemsize}, for {count} shards of {shards.axes} axes"
                )
        local = np.frombuffer(shards.tensor, _INT32).astype(np.int64)
        if count and not (local.min() >= 0 and local.max() < len(rows)):
            raise ProtocolError(
                f"{label} are of tensors {local.min()} to {local.max()}; "
                f"expected 0 to {len(rows) - 1}, as the table has {len(rows)}"
            )
        tensor = rows[local] if count else local
        start = _padded(shards.start, shards.axes, count, 0)
        shape = _padded(shards.shape, shards.axes, count, 1)
        full = tensors.shape[tensor]
        axes = tensors.axes[tensor]
        inside = axes <= shards.axes
        # Axis by axis, several times as fast as all axes at once.
        for axis in range(shards.axes):
            begin, size, maximum = start[:, axis], shape[:, axis], full[:, axis]
            # Compared so that no sum can overflow.
            inside &= (begin >= 0) & (size >= 0) & (size <= maximum) & (begin <= maximum - size)
            # Beyond its axes a tensor has size 1, and so has its shard.
            inside &= (size == 1) | (axes > axis)
        if not inside.all():
            row = int(np.flatnonzero(~inside)[0])
            raise ProtocolError(
                f"{label}: shard {row}, of {tensors.names[tensor[row]]!r}, starts at "
                f"{start[row].tolist()} with shape {shape[row].tolist()}; expected one inside the "
                f"tensor's shape {full[row].tolist()}, with starts of 0 and sizes of 1 beyond its "
                f"{tensors.axes[tensor[row]]} axes; the columns have {shards.axes} axes"
            )
        nbytes = tensors.item_size[tensor]
        for axis in range(shards.axes):
            nbytes *= shape[:, axis]
        blocks = np.zeros(count + 1, dtype=np.int64)
        np.cumsum(-(-nbytes // BLOCK_BYTES), out=blocks[1:])
        return cls(tensor, start, start + shape, nbytes, blocks)

    def __len__(self) -> int:
        return len(self.tensor)

    @cached_property
    def by_tensor(self) -> Int64s | None:
        """Rows ordered by tensor; None if they already are."""
        if (self.tensor[1:] >= self.tensor[:-1]).all():
            return None
        return np.argsort(self.tensor, kind="stable")

    def counts(self, tensors: int) -> Int64s:
        """Return the number of rows of each of ``tensors`` tensors."""
        return np.bincount(self.tensor, minlength=tensors)


def _padded(column: bytes, axes: int, count: int, fill: int) -> Int64s:
    columns = np.full((count, MAX_AXES), fill, dtype=np.int64)
    columns[:, :axes] = np.frombuffer(column, _INT64).reshape(count, axes)
    return columns
