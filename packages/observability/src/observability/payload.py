"""How many bytes of tensors a batch carries.

Only what a tensor holds counts: elements times element size, for ragged rows the packed values.
Python values count nothing, because their size on a wire depends on the store.
"""

from __future__ import annotations

from collections import Counter

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


def _leaf_bytes(leaf: object) -> int:
    if not isinstance(leaf, torch.Tensor):
        return 0
    values = leaf.values() if leaf.layout == torch.jagged else leaf
    return values.numel() * values.element_size()
