"""`ReadTable`: which bytes of one source's arena go to which place in a scratch buffer.

The planner creates it, the transports execute it, and digests are computed over it. It is columnar,
since a large model has a hundred thousand reads per source.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
"""Array of int64; the docstrings give its shape."""
COLUMNS = ("src", "dst", "run", "n1", "src1", "dst1", "n2", "src2", "dst2")
"""Columns of a `ReadTable`, in order."""


@dataclass(frozen=True)
class ReadTable:
    """Strided copies, one per row.

    For every j < n2 and i < n1, a row copies ``run`` bytes

    - from ``src + j * src2 + i * src1`` of the source's arena
    - to ``dst + j * dst2 + i * dst1`` of the scratch buffer.

    So a box of a tensor is one row if at most two of its axes precede the contiguous ones. If n1 or
    n2 is 1, its strides are 0. Within one scratch buffer, no two rows write the same byte.

    Columns 2 and 3 of a float32 tensor of shape (3, 4), at byte 256 of the arena, are one row that
    copies to byte 0 of the scratch buffer::

        arena    256 | . . x x |  272 | . . x x |  288 | . . x x |   a row is 16 bytes
        scratch    0 | x x |        8 | x x |       16 | x x |       a row is 8 bytes

        src=264 dst=0  run=8  n1=3 src1=16 dst1=8  n2=1 src2=0 dst2=0

    Attributes:
        rows: int64 (reads, 9), columns as in `COLUMNS`. ``run``, ``n1`` and ``n2`` are at least 1.
    """

    rows: Int64s

    def __post_init__(self) -> None:
        if self.rows.dtype != np.int64 or self.rows.ndim != 2 or self.rows.shape[1] != len(COLUMNS):
            raise ValueError(
                f"ReadTable: {self.rows.dtype} {self.rows.shape}; "
                f"expected int64 (reads, {len(COLUMNS)})"
            )

    @property
    def sizes(self) -> Int64s:
        """Bytes that each row moves, int64 (reads,)."""
        sizes: Int64s = self.rows[:, 2] * self.rows[:, 3] * self.rows[:, 6]
        return sizes

    @property
    def nbytes(self) -> int:
        """Bytes that the table moves."""
        return int(self.sizes.sum())

    def __len__(self) -> int:
        return len(self.rows)


def row_parts(
    row: list[int], max_bytes: int, max_runs: int = sys.maxsize
) -> Iterator[tuple[int, ...]]:
    """Yield rows for the same copies in the same order, each within both limits.

    They are cut along ``n2`` if n1 runs fit, else along ``n1`` if one run fits, else within the
    run.
    """
    src, dst, run, n1, src1, dst1, n2, src2, dst2 = row
    if run * n1 <= max_bytes and n1 <= max_runs:
        step = min(max_bytes // (run * n1), max_runs // n1)
        for j in range(0, n2, step):
            n = min(step, n2 - j)
            yield src + j * src2, dst + j * dst2, run, n1, src1, dst1, n, src2, dst2
        return
    step = max(1, min(max_bytes // run, max_runs))
    for j in range(n2):
        for i in range(0, n1, step):
            s, d = src + j * src2 + i * src1, dst + j * dst2 + i * dst1
            if run <= max_bytes:
                yield s, d, run, min(step, n1 - i), src1, dst1, 1, 0, 0
                continue
            for k in range(0, run, max_bytes):
                yield s + k, d + k, min(max_bytes, run - k), 1, 0, 0, 1, 0, 0
