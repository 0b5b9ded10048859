"""Tensors of turns that are not tokens: images, audio, whatever a model reads beside text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any  # Any: a turn holds the caller's own values

import numpy as np
import torch

from column_io import TOKEN_ALIGNED_FIELDS
from rollout_actor.object_column import object_column

_OF_TOKENS = TOKEN_ALIGNED_FIELDS | {"token_ids", "token_loss_mask"}


def media_of(turns: Iterable[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The media of one row: name to the tensors of its turns, joined along dim 0."""
    found: dict[str, list[torch.Tensor]] = {}
    for turn in turns:
        for name, value in turn.items():
            if isinstance(value, torch.Tensor) and name not in _OF_TOKENS:
                found.setdefault(name, []).append(value)
    return {
        name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in found.items()
    }


def share_equal_media(rows: Sequence[dict[str, torch.Tensor]], group_size: int) -> None:
    """Let the rows of each group of ``group_size`` share what equals the first row's, in place."""
    for place, media in enumerate(rows):
        leader = rows[place - place % group_size]
        for name, tensor in media.items():
            if name in leader and torch.equal(tensor, leader[name]):
                media[name] = leader[name]


def media_columns(
    rows: Sequence[Mapping[str, torch.Tensor]],
) -> dict[str, torch.Tensor | np.ndarray]:
    """The media of a batch as columns.

    Args:
        rows: per row, name to tensor.

    Returns:
        Per name: rows of one shape dense, (n, items, ...); rows that differ in dim 0 only jagged;
        all else, rows without the name included (None), as an object array (n,).
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: _column([row.get(name) for row in rows]) for name in names}


def _column(values: Sequence[torch.Tensor | None]) -> torch.Tensor | np.ndarray:
    tensors = [value.cpu() for value in values if value is not None]
    first = tensors[0]
    alike = len(tensors) == len(values) and all(
        tensor.dtype == first.dtype and tensor.dim() == first.dim() >= 1 for tensor in tensors
    )
    if alike and all(tensor.shape == first.shape for tensor in tensors):
        return torch.stack(tensors)
    if alike and all(tensor.shape[1:] == first.shape[1:] for tensor in tensors):
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    return object_column([None if value is None else value.cpu() for value in values])
