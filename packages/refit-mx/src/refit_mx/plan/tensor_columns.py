"""`TensorColumns`: the global tensors that manifests name, checked and in columns.

Tables come from other machines: everything in them is checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from refit_mx.errors import LayoutError, ProtocolError
from refit_mx.layout import ITEM_SIZES, MAX_AXES, TensorSpec
from refit_mx.manifest.format import TensorTable, decode_table
from refit_mx.manifest.reads import Int64s

DTYPES = tuple(ITEM_SIZES)
DTYPE_CODES = {name: code for code, name in enumerate(DTYPES)}
ITEM_SIZE_OF_CODE = np.array([ITEM_SIZES[name] for name in DTYPES], dtype=np.int64)
_MAX_BYTES = 1 << 60
"""Size limit of a tensor, empty axes counted as 1, so that no offset in it overflows an int64."""


@dataclass(frozen=True, eq=False)
class TensorColumns:
    """Global tensors, one per row."""

    names: Sequence[str]  # unique
    dtype: npt.NDArray[np.int8]  # int8 (n,), index into `DTYPES`
    axes: npt.NDArray[np.int8]  # int8 (n,), number of axes
    shape: Int64s  # (n, MAX_AXES), padded at the end with 1

    @classmethod
    def decode(cls, data: bytes, worker: str) -> TensorColumns:
        """Decode a `TensorTable`.

        Raises:
            ProtocolError: the data is no table, or has invalid dtypes or shapes.
        """
        table = decode_table(data)
        label = f"manifest of worker {worker!r}: its table"
        if len(set(table.names)) != len(table.names):
            raise ProtocolError(f"{label} has a tensor twice")
        unknown = set(table.dtypes) - DTYPE_CODES.keys()
        if unknown:
            raise ProtocolError(
                f"{label} names dtype {min(unknown)!r}; expected one of {', '.join(DTYPES)}"
            )
        dtype = np.array([DTYPE_CODES[name] for name in table.dtypes], dtype=np.int8)
        return cls(table.names, dtype, *_padded_shapes(table, dtype, label))

    @property
    def item_size(self) -> Int64s:
        """Bytes of one element of each tensor."""
        return ITEM_SIZE_OF_CODE[self.dtype]

    def spec(self, row: int) -> TensorSpec:
        """Return the spec of one row."""
        shape = self.shape[row, : self.axes[row]].tolist()
        return TensorSpec(self.names[row], DTYPES[self.dtype[row]], tuple(shape))


def merge_tables(
    tables: Sequence[TensorColumns], workers: Sequence[str]
) -> tuple[TensorColumns, dict[str, int], list[Int64s]]:
    """Merge distinct tables into one with all tensors; ``workers`` has one sender of each.

    Returns:
        The tensors; the row of each name; and for each table, the merged row of each of its rows.

    Raises:
        LayoutError: two tables have one tensor with different dtypes or shapes.
    """
    row_of: dict[str, int] = {}
    rows_of_table = []
    first_seen = []
    for table in tables:
        known = len(row_of)
        rows = np.array([row_of.setdefault(name, len(row_of)) for name in table.names], np.int64)
        rows_of_table.append(rows)
        first_seen.append(np.flatnonzero(rows >= known))
    pairs = list(zip(tables, first_seen, strict=True))
    columns = TensorColumns(
        tuple(row_of),
        np.concatenate([table.dtype[rows] for table, rows in pairs]),
        np.concatenate([table.axes[rows] for table, rows in pairs]),
        np.concatenate([table.shape[rows] for table, rows in pairs]),
    )
    for number, (table, rows) in enumerate(zip(tables, rows_of_table, strict=True)):
        differ = (
            (table.dtype != columns.dtype[rows])
            | (table.axes != columns.axes[rows])
            | (table.shape != columns.shape[rows]).any(axis=1)
        )
        if differ.any():
            row = int(np.flatnonzero(differ)[0])
            name = table.names[row]
            other = next(i for i, known in enumerate(tables[:number]) if name in set(known.names))
            first, second = columns.spec(row_of[name]), table.spec(row)
            raise LayoutError(
                f"{name!r}: worker {workers[other]!r} publishes {first.dtype} of shape "
                f"{first.shape}, worker {workers[number]!r} {second.dtype} of shape "
                f"{second.shape}; expected equal ones ({int(differ.sum())} tensors differ)"
            )
    return columns, row_of, rows_of_table


def _padded_shapes(
    table: TensorTable, dtype: npt.NDArray[np.int8], label: str
) -> tuple[npt.NDArray[np.int8], Int64s]:
    """Return the number of axes, and shapes padded at the end with 1."""
    axes = np.array([len(shape) for shape in table.shapes], dtype=np.int64)
    if axes.size and axes.max() > MAX_AXES:
        row = int(axes.argmax())
        raise ProtocolError(
            f"{label}: {table.names[row]!r} has {axes[row]} axes; expected at most {MAX_AXES}"
        )
    try:
        flat = np.fromiter(chain.from_iterable(table.shapes), np.int64, int(axes.sum()))
    except OverflowError:
        raise ProtocolError(f"{label}: a size of a tensor is past 63 bits") from None
    if flat.size and flat.min() < 0:
        raise ProtocolError(f"{label}: a size of a tensor is negative: {flat.min()}")
    shape = np.ones((len(axes), MAX_AXES), dtype=np.int64)
    shape[np.arange(MAX_AXES) < axes[:, None]] = flat
    # In floats, since a product of integers may overflow; rounding is harmless far below 2**63.
    nbytes = np.maximum(shape, 1).astype(np.float64).prod(axis=1) * ITEM_SIZE_OF_CODE[dtype]
    if nbytes.size and nbytes.max() > _MAX_BYTES:
        row = int(nbytes.argmax())
        raise ProtocolError(
            f"{label}: {table.names[row]!r} has shape {table.shapes[row]}; "
            f"expected at most {_MAX_BYTES} bytes, sizes of 0 counted as 1"
        )
    return axes.astype(np.int8), shape
