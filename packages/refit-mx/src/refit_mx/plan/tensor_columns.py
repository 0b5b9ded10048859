"""`TensorColumns`: the global tensors that manifests name, checked and as columns.

Tables come from other machines: nothing in them is believed before it is checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from refit_mx.errors import LayoutError, ProtocolError
from refit_mx.manifest import TensorTable, decode_table
from refit_mx.tensor_types import ITEM_SIZES, MOST_AXES, TensorSpec

DTYPES = tuple(ITEM_SIZES)
_CODES = {name: code for code, name in enumerate(DTYPES)}
_ITEM_SIZE_OF_CODE = np.array([ITEM_SIZES[name] for name in DTYPES], dtype=np.int64)
_MOST_BYTES = 1 << 60
"""Of one tensor, empty axes counted as 1, so that no offset inside one overflows an int64."""


@dataclass(frozen=True, eq=False)
class TensorColumns:
    """Global tensors, one a row.

    Attributes:
        names: unique.
        dtype: int8 (n,), index into `DTYPES`.
        axes: int8 (n,).
        shape: int64 (n, MOST_AXES), filled up behind with 1.
    """

    names: Sequence[str]
    dtype: npt.NDArray[np.int8]
    axes: npt.NDArray[np.int8]
    shape: npt.NDArray[np.int64]

    @classmethod
    def decode(cls, data: bytes, worker: str) -> TensorColumns:
        """Of an encoded `TensorTable`.

        Args:
            data: from the manifest.
            worker: who sent it, for messages.

        Raises:
            ProtocolError: it is no table, or names dtypes or shapes that no tensor has.
        """
        table = decode_table(data)
        where = f"manifest of worker {worker!r}: its table"
        if len(set(table.names)) != len(table.names):
            raise ProtocolError(f"{where} names a tensor twice")
        dtype = _dtype_codes(table, where)
        return cls(table.names, dtype, *_padded_shapes(table, dtype, where))

    @property
    def item_size(self) -> npt.NDArray[np.int64]:
        """Bytes of one element of each."""
        return _ITEM_SIZE_OF_CODE[self.dtype]

    def spec(self, row: int) -> TensorSpec:
        """Of one row."""
        shape = self.shape[row, : self.axes[row]].tolist()
        return TensorSpec(self.names[row], DTYPES[self.dtype[row]], tuple(shape))


def united(
    tables: Sequence[TensorColumns], workers: Sequence[str]
) -> tuple[TensorColumns, dict[str, int], list[npt.NDArray[np.int64]]]:
    """All tensors that some table names.

    Args:
        tables: different ones, at least one.
        workers: one that sent each table, for messages.

    Returns:
        The tensors; the row of each name; for each table the rows that its own rows became.

    Raises:
        LayoutError: two tables give one tensor different dtypes or shapes.
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
            mine = int(np.flatnonzero(differ)[0])
            name = table.names[mine]
            other = next(i for i, known in enumerate(tables[:number]) if name in set(known.names))
            one, two = columns.spec(row_of[name]), table.spec(mine)
            raise LayoutError(
                f"{name!r}: worker {workers[other]!r} publishes {one.dtype} of shape {one.shape}, "
                f"worker {workers[number]!r} {two.dtype} of shape {two.shape}; expected the same "
                f"({int(differ.sum())} tensors differ)"
            )
    return columns, row_of, rows_of_table


def _dtype_codes(table: TensorTable, where: str) -> npt.NDArray[np.int8]:
    unknown = set(table.dtypes) - _CODES.keys()
    if unknown:
        raise ProtocolError(
            f"{where} names dtype {min(unknown)!r}; expected one of {', '.join(DTYPES)}"
        )
    return np.array([_CODES[dtype] for dtype in table.dtypes], dtype=np.int8)


def _padded_shapes(
    table: TensorTable, dtype: npt.NDArray[np.int8], where: str
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int64]]:
    """Number of axes, and shapes filled up behind with 1."""
    axes = np.array([len(shape) for shape in table.shapes], dtype=np.int64)
    if axes.size and axes.max() > MOST_AXES:
        row = int(axes.argmax())
        raise ProtocolError(
            f"{where}: {table.names[row]!r} has {axes[row]} axes; expected at most {MOST_AXES}"
        )
    try:
        flat = np.fromiter(chain.from_iterable(table.shapes), np.int64, int(axes.sum()))
    except OverflowError:
        raise ProtocolError(f"{where}: a size of a tensor is past 63 bits") from None
    if flat.size and flat.min() < 0:
        raise ProtocolError(f"{where}: a size of a tensor is negative: {flat.min()}")
    shape = np.ones((len(axes), MOST_AXES), dtype=np.int64)
    shape[np.arange(MOST_AXES) < axes[:, None]] = flat
    # In floats, since the product in question may overflow; a power of two is exact in both.
    nbytes = np.maximum(shape, 1).astype(np.float64).prod(axis=1) * _ITEM_SIZE_OF_CODE[dtype]
    if nbytes.size and nbytes.max() > _MOST_BYTES:
        row = int(nbytes.argmax())
        raise ProtocolError(
            f"{where}: {table.names[row]!r} has shape {table.shapes[row]}; "
            f"expected at most {_MOST_BYTES} bytes, sizes of 0 counted as 1"
        )
    return axes.astype(np.int8), shape
