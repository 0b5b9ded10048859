"""Tensors of turns that are not tokens: images, audio, whatever a model reads beside text.

A row may have one image, several or none, and images of any resolution. What a put makes of them
must not depend on the batch that they happen to be in: a field keeps its dtype and form for as long
as its partition lives. So media are always put as rows of their own shapes, and a row without media
has no items instead of no value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any  # Any: a turn holds the caller's own values

import torch

from column_io import TOKEN_ALIGNED_FIELDS
from dataplane_core import InvalidRequestError
from dataplane_core.rows import shaped_from_rows

_OF_TOKENS = TOKEN_ALIGNED_FIELDS | {"token_ids", "token_loss_mask"}


def media_of(turns: Iterable[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The media of one row: name to the tensors of its turns, joined along dim 0."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, value in _tensors(turns):
        found.setdefault(name, []).append(value)
    return {
        name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in found.items()
    }


def _tensors(turns: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for turn in turns:
        for name, value in turn.items():
            if isinstance(value, torch.Tensor) and name not in _OF_TOKENS:
                yield name, value.reshape(1) if value.dim() == 0 else value


def media_without_items(message_logs: Sequence[Iterable[Mapping[str, Any]]]) -> MediaForms:
    """The media that a batch has: name to what a row without them holds, (0, ...).

    Raises:
        InvalidRequestError: (a ValueError) naming the row, if media of one name differ in dtype or
            number of dimensions, or those of one row in more than their first dimension.
    """
    forms: MediaForms = {}
    for row, turns in enumerate(message_logs):
        shapes: dict[str, torch.Size] = {}
        for name, value in _tensors(turns):
            form = forms.setdefault(name, value.new_empty((0, *value.shape[1:]), device="cpu"))
            if value.dtype != form.dtype or value.dim() != form.dim():
                raise InvalidRequestError(
                    f"media {name!r} of row {row} are {value.dtype} of {value.dim()} dimensions; "
                    f"expected {form.dtype} of {form.dim()}, as in the rows before"
                )
            shape = shapes.setdefault(name, value.shape[1:])
            if shape != value.shape[1:]:
                raise InvalidRequestError(
                    f"media {name!r} of row {row} have items of shapes {tuple(shape)} and "
                    f"{tuple(value.shape[1:])}; expected one shape in a row"
                )
    return forms


MediaForms = dict[str, torch.Tensor]
"""Name of media to an empty tensor of their dtype and dimensions, (0, ...)."""


def share_equal_media(rows: Sequence[dict[str, torch.Tensor]], group_size: int) -> None:
    """Let the rows of each group of ``group_size`` share what equals the first row's, in place."""
    for place, media in enumerate(rows):
        leader = rows[place - place % group_size]
        for name, tensor in media.items():
            if name in leader and torch.equal(tensor, leader[name]):
                media[name] = leader[name]


def media_columns(
    message_logs: Sequence[Iterable[Mapping[str, Any]]], known: MediaForms | None = None
) -> dict[str, torch.Tensor]:
    """The media of a batch as columns.

    Args:
        message_logs: per row the turns.
        known: media that other batches have; columns of theirs are added.

    Returns:
        Per name a nested tensor of strided layout: row i holds the items of row i, of which there
        may be none.

    Raises:
        InvalidRequestError: (a ValueError) as `media_without_items`.
    """
    forms = (known or {}) | media_without_items(message_logs)
    rows = [media_of(turns) for turns in message_logs]
    return {
        name: shaped_from_rows([row.get(name, empty).cpu() for row in rows])
        for name, empty in forms.items()
        if rows
    }
