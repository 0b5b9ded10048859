"""Nested tensors to and from their rows.

Rows are copied with plain tensor copies, never computed with, so that every dtype (bfloat16,
float16, bool and the integers) keeps its bits. Nested tensors of strided layout occur too: they
hold rows that differ in more than their first dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def jagged_from_rows(rows: Sequence[torch.Tensor], *, like: torch.Tensor) -> torch.Tensor:
    """A jagged tensor of ``rows``.

    Args:
        rows: tensors of shape (length, *features) that differ in their length only.
        like: gives dtype, device and ``features`` where there are no rows, as (any, *features).
    """
    lengths = torch.tensor([row.shape[0] for row in rows], dtype=torch.int64)
    offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    values = torch.cat(list(rows)) if rows else like.new_empty((0, *like.shape[1:]))
    return torch.nested.nested_tensor_from_jagged(
        values,
        offsets.to(values.device),
        min_seqlen=int(lengths.min()) if rows else 0,
        max_seqlen=int(lengths.max()) if rows else 0,
    )


def nested_from_rows(rows: Sequence[torch.Tensor], *, like: torch.Tensor) -> torch.Tensor:
    """A nested tensor of ``rows`` in the layout of the nested tensor ``like``."""
    if like.layout == torch.jagged:
        return jagged_from_rows(rows, like=like.values())
    return torch.nested.nested_tensor(
        list(rows), layout=torch.strided, dtype=like.dtype, device=like.device
    )


def padded_from_nested(nested: torch.Tensor, pad_value: float) -> torch.Tensor:
    """The rows of ``nested`` in one dense tensor (n, longest, ...), right-padded."""
    rows = nested.unbind()
    if not rows:
        features = nested.values().shape[1:] if nested.layout == torch.jagged else ()
        return torch.empty((0, 0, *features), dtype=nested.dtype, device=nested.device)
    widest = [max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True)]
    padded = rows[0].new_full((len(rows), *widest), pad_value)
    for place, row in enumerate(rows):
        padded[place][tuple(slice(size) for size in row.shape)] = row
    return padded


def pad_width(tensor: torch.Tensor, width: int, pad_value: float) -> torch.Tensor:
    """``tensor`` (n, w, ...) right-padded along dim 1 to ``width``; unchanged if it is as wide."""
    if tensor.shape[1] >= width:
        return tensor
    padded = tensor.new_full((tensor.shape[0], width, *tensor.shape[2:]), pad_value)
    padded[:, : tensor.shape[1]] = tensor
    return padded
