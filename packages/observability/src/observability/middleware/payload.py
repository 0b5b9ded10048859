"""Bytes of the tensors in a batch.

A tensor counts its elements times the element size; a ragged one counts its packed values. Python
values count 0, because their encoded size depends on the store.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase

from dataplane_core import DataPlaneError
from dataplane_core.arguments import checked_ints


def bytes_by_field(fields: TensorDictBase | None) -> dict[str, int]:
    """Return the bytes of each field, 0 for Python values; no tensor is copied."""
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
    """Return the bytes of each padded column; ``ragged`` ones count only ``lengths`` per row."""
    sizes = {}
    try:
        for name, column in columns.items():
            sizes[name] = _leaf_bytes(column)
            if name in ragged and lengths is not None and isinstance(column, torch.Tensor):
                positions = math.prod(column.shape[:2])
                used = sum(checked_ints("", "", lengths))
                sizes[name] = sizes[name] // positions * used if positions else 0
    except (AttributeError, TypeError, RuntimeError, DataPlaneError):
        return {}  # the inner client rejects such columns with a better message
    return sizes


def _leaf_bytes(leaf: object) -> int:
    if not isinstance(leaf, torch.Tensor):
        return 0
    values = leaf.values() if leaf.layout == torch.jagged else leaf
    return values.numel() * values.element_size()
