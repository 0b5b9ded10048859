"""`HeldBoxes`: which boxes of which tensors a source holds, checked and as columns.

Not where they lie in its arena: replicas hold the same boxes, and share one `HeldBoxes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from refit_mx.errors import ProtocolError
from refit_mx.manifest import BLOCK_BYTES, ShardColumns
from refit_mx.plan.tensor_columns import TensorColumns
from refit_mx.tensor_types import MOST_AXES

_INT32 = np.dtype("<i4")
_INT64 = np.dtype("<i8")


@dataclass(frozen=True, eq=False)
class HeldBoxes:
    """Boxes of tensors, one a row, in the order of the manifest.

    Attributes:
        tensor: int64 (n,), row of the united `TensorColumns`.
        start: int64 (n, MOST_AXES), filled up behind with 0.
        stop: int64 (n, MOST_AXES), filled up behind with 1.
        nbytes: int64 (n,).
        blocks_before: int64 (n + 1,), how many digests the boxes before each have.
    """

    tensor: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    blocks_before: npt.NDArray[np.int64]

    @classmethod
    def decode(
        cls,
        shards: ShardColumns,
        tensors: TensorColumns,
        rows: npt.NDArray[np.int64],
        worker: str,
    ) -> HeldBoxes:
        """Of a manifest's shards.

        Args:
            shards: from the manifest.
            tensors: the united ones.
            rows: of ``tensors`` that the manifest's own table became.
            worker: who sent it, for messages.

        Raises:
            ProtocolError: a column has a wrong length, a shard is of no tensor of the table, or
                reaches out of its tensor.
        """
        where = f"manifest of worker {worker!r}: its shards"
        if not 0 <= shards.axes <= MOST_AXES:
            raise ProtocolError(f"{where} have {shards.axes} axes; expected at most {MOST_AXES}")
        count = len(shards.tensor) // _INT32.itemsize
        for name, itemsize in (
            ("tensor", _INT32.itemsize),
            ("start", shards.axes * _INT64.itemsize),
            ("shape", shards.axes * _INT64.itemsize),
        ):
            found = len(getattr(shards, name))
            if found != count * itemsize:
                raise ProtocolError(
                    f"{where}: column {name!r} has {found} bytes; "
                    f"expected {count * itemsize}, for {count} shards of {shards.axes} axes"
                )
        local = np.frombuffer(shards.tensor, _INT32).astype(np.int64)
        if count and not (local.min() >= 0 and local.max() < len(rows)):
            raise ProtocolError(
                f"{where} are of tensors {local.min()} to {local.max()}; "
                f"expected 0 to {len(rows) - 1}, as the table has {len(rows)}"
            )
        tensor = rows[local] if count else local
        start = _padded(shards.start, shards.axes, count, 0)
        shape = _padded(shards.shape, shards.axes, count, 1)
        full = tensors.shape[tensor]
        axes = tensors.axes[tensor]
        inside = axes <= shards.axes
        # Axis by axis, which is several times as fast as all at once.
        for axis in range(shards.axes):
            begin, size, most = start[:, axis], shape[:, axis], full[:, axis]
            # Compared so that no sum can overflow.
            inside &= (begin >= 0) & (size >= 0) & (size <= most) & (begin <= most - size)
            # Behind its axes a tensor has one element, and a shard of it holds that one.
            inside &= (size == 1) | (axes > axis)
        if not inside.all():
            row = int(np.flatnonzero(~inside)[0])
            raise ProtocolError(
                f"{where}: shard {row}, of {tensors.names[tensor[row]]!r}, starts at "
                f"{start[row].tolist()} with shape {shape[row].tolist()}; expected one inside the "
                f"tensor's shape {full[row].tolist()}, with starts of 0 and sizes of 1 behind its "
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
    def by_tensor(self) -> npt.NDArray[np.int64] | None:
        """The rows ordered by tensor; None where they already are."""
        if (self.tensor[1:] >= self.tensor[:-1]).all():
            return None
        return np.argsort(self.tensor, kind="stable")

    def counts(self, tensors: int) -> npt.NDArray[np.int64]:
        """How many rows each of ``tensors`` tensors has."""
        return np.bincount(self.tensor, minlength=tensors)


def _padded(column: bytes, axes: int, count: int, fill: int) -> npt.NDArray[np.int64]:
    columns = np.full((count, MOST_AXES), fill, dtype=np.int64)
    columns[:, :axes] = np.frombuffer(column, _INT64).reshape(count, axes)
    return columns
