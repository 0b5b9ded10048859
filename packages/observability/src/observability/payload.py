"""How many bytes of tensors a batch carries.

Only what a tensor holds counts: elements times element size, for ragged rows the packed values.
Python values count nothing, because their size on a wire depends on the store.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase


def bytes_by_field(fields: TensorDictBase | None) -> dict[str, int]:
    """Bytes of each field of ``fields``, 0 for fields of Python values; no tensor is copied."""
    if isinstance(fields, LazyStackedTensorDict):
        # Reading a field of a lazy stack would stack it, or fail on rows of different shapes.
        total: Counter[str] = Counter()
        for part in fields.tensordicts:
            total.update(bytes_by_field(part))
        return dict(total)
    if not isinstance(fields, TensorDictBase):
        return {}
    return {name: _leaf_bytes(leaf) for name, leaf in fields.items()}


def bytes_by_column(
    columns: Mapping[str, object],
    lengths: Sequence[int] | None = None,
    ragged: Collection[str] = (),
) -> dict[str, int]:
    """Bytes of each padded column; of those in ``ragged`` only what ``lengths`` leave of a row."""
    found = {}
    try:
        for name, column in columns.items():
            found[name] = _leaf_bytes(column)
            if name in ragged and lengths is not None and isinstance(column, torch.Tensor):
                positions = math.prod(column.shape[:2])
                found[name] = found[name] // positions * sum(lengths) if positions else 0
    except (AttributeError, TypeError, RuntimeError):
        return {}  # the inner client refuses such columns, and names what is wrong
    return found


def _leaf_bytes(leaf: object) -> int:
    if not isinstance(leaf, torch.Tensor):
        return 0
    values = leaf.values() if leaf.layout == torch.jagged else leaf
    return values.numel() * values.element_size()
