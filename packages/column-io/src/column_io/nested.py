"""Nested tensors to and from their rows.

Rows are copied with plain copies, never computed with, so that every dtype (bfloat16, float16, bool
and the integers) keeps its bits. Nested tensors of strided layout occur too: they hold rows that
differ in more than their first dimension.

In main memory the rows are copied as slices of bytes, into pages that are used again: that costs a
tenth of torch's masks, index arithmetic and jagged operators, which also split their work over
threads that wait for each other on a busy machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any  # Any: torch does not type what only nested tensors have

import numpy as np
import torch
from numpy.typing import NDArray

from dataplane_core import pages
from dataplane_core.slices import copy_slices


def jagged_from_padded(padded: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """A jagged tensor of each row's first ``lengths[i]`` values; ``padded`` is (n, width, ...)."""
    features = padded.shape[2:]
    if padded.device.type != "cpu" or padded.requires_grad or not padded.numel():
        rows = [row[:length] for row, length in zip(padded, lengths, strict=True)]
        return jagged_from_rows(rows, like=padded[0:0].reshape(0, *features))
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    total, width = int(offsets[-1]), padded.shape[1]
    step = padded.element_size() * math.prod(features)
    raw = pages.empty(total * step)
    starts = range(0, len(lengths) * width * step, width * step)
    sizes = [length * step for length in lengths]
    copy_slices(raw, (offsets[:-1] * step).tolist(), _bytes(padded), starts, sizes)
    return torch.nested.nested_tensor_from_jagged(
        _tensor(raw, padded.dtype, (total, *features)),
        torch.from_numpy(offsets),
        min_seqlen=min(lengths),
        max_seqlen=max(lengths),
    )


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).contiguous()
    raw: NDArray[np.uint8] = plain.view(torch.uint8).numpy()
    return raw


def _tensor(raw: NDArray[np.uint8], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor on the memory of ``raw``."""
    if not raw.size:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.from_numpy(raw).view(dtype).view(tuple(shape))


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
    if _is_plain_jagged(nested):
        return _padded_from_jagged(nested, pad_value)
    rows = nested.unbind()
    if not rows:
        features = nested.values().shape[1:] if nested.layout == torch.jagged else ()
        return torch.empty((0, 0, *features), dtype=nested.dtype, device=nested.device)
    widest = [max(sizes) for sizes in zip(*(row.shape for row in rows), strict=True)]
    padded = rows[0].new_full((len(rows), *widest), pad_value)
    for place, row in enumerate(rows):
        padded[place][tuple(slice(size) for size in row.shape)] = row
    return padded


def _is_plain_jagged(nested: Any) -> bool:
    """Whether the rows lie one after the other in main memory, ragged in their first dimension."""
    return bool(
        nested.layout == torch.jagged
        and nested.device.type == "cpu"
        and not nested.requires_grad
        and nested.lengths() is None
        and nested._ragged_idx == 1
        and nested.values().numel()
    )


def _padded_from_jagged(nested: Any, pad_value: float) -> torch.Tensor:
    values, bounds = nested.values(), nested.offsets().numpy()
    lengths = np.diff(bounds)
    width = int(lengths.max())
    features = values.shape[1:]
    step = values.element_size() * math.prod(features)
    raw = pages.empty(len(lengths) * width * step)
    padded = _tensor(raw, values.dtype, (len(lengths), width, *features))
    pad = _bytes(torch.full((1,), pad_value, dtype=values.dtype))
    lane = f"u{min(pad.size, 8)}"  # as integers, or as pairs of them for complex128
    raw.view(lane).reshape(-1, len(pad.view(lane)))[:] = pad.view(lane)
    rows = range(0, raw.size, width * step)
    copy_slices(raw, rows, _bytes(values), (bounds[:-1] * step).tolist(), (lengths * step).tolist())
    return padded


def pad_width(tensor: torch.Tensor, width: int, pad_value: float) -> torch.Tensor:
    """``tensor`` (n, w, ...) right-padded along dim 1 to ``width``; unchanged if it is as wide."""
    if tensor.shape[1] >= width:
        return tensor
    padded = tensor.new_full((tensor.shape[0], width, *tensor.shape[2:]), pad_value)
    padded[:, : tensor.shape[1]] = tensor
    return padded
