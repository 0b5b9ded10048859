"""Sizes in bytes of the tensors in a batch.

The size of a tensor is its number of elements times the size of an element. A ragged tensor has
only its packed values as elements. The size of Python values is 0, because their encoded size
depends on the store.
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
    """Return the size of each field; no tensor is copied."""
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
    """Return the size of each padded column, without the padding of ``ragged`` columns.

    Row i of a ragged column has ``lengths[i]`` positions; the other positions are padding.
    """
    sizes = {}
    try:
        for name, column in columns.items():
            sizes[name] = _leaf_bytes(column)
            if name in ragged and lengths is not None and isinstance(column, torch.Tensor):
                positions = math.prod(column.shape[:2])  # rows x width
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
