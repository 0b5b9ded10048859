"""`ReadTable`: which bytes of one source's arena go where in a scratch buffer.

The planner makes it, the transports carry it out, the digests are taken over it. It is columnar,
since a large model has a hundred thousand reads a source.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

COLUMNS = ("src", "dst", "run", "n1", "src1", "dst1", "n2", "src2", "dst2")
"""Columns of a `ReadTable`, in this order."""


@dataclass(frozen=True)
class ReadTable:
    """Strided copies. Row r copies, for every j < n2 and i < n1, ``run`` bytes

    - from ``src + j * src2 + i * src1`` of the source's arena
    - to ``dst + j * dst2 + i * dst1`` of the scratch buffer.

    So a part of a tensor with up to two axes before its contiguous ones is one row. Where n1 or n2
    is 1 its strides are 0. No two rows of the plans of one scratch buffer write the same byte.

    Attributes:
        rows: int64, (reads, 9), columns as `COLUMNS`. ``run``, ``n1`` and ``n2`` are at least 1.
    """

    rows: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        if self.rows.dtype != np.int64 or self.rows.ndim != 2 or self.rows.shape[1] != len(COLUMNS):
            raise ValueError(
                f"ReadTable: {self.rows.dtype} {self.rows.shape}; "
                f"expected int64 (reads, {len(COLUMNS)})"
            )

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return int((self.rows[:, 2] * self.rows[:, 3] * self.rows[:, 6]).sum())

    def __len__(self) -> int:
        return len(self.rows)
