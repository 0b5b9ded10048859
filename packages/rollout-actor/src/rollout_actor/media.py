"""Media: tensors of turns that are not tokens, such as images and audio.

A row may have any number of images, of any resolution. A field keeps its dtype and form while its
partition has samples, so the stored form must not depend on the batch. Media are therefore always
put as nested tensors whose rows may differ in shape, and a row without media has zero items. The
names come from the configuration, the batch and the partition; a batch that does not fit is refused
before generation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any  # Any: a turn holds the caller's own values

import torch

from column_io import TOKEN_ALIGNED_FIELDS
from dataplane_core import (
    INPUT_IDS,
    INPUT_LENGTHS,
    DataPlaneClient,
    InvalidRequestError,
    MissingDataError,
    PartitionSummary,
    SchemaMismatchError,
)
from dataplane_core.tensors.rows import shaped_from_rows

NOT_MEDIA = TOKEN_ALIGNED_FIELDS | {"token_ids", "token_loss_mask"}
"""Tensors of a turn that belong to its tokens."""

RESERVED_NAMES = frozenset(
    {
        "content",
        INPUT_LENGTHS,
        "role",
        "stop_strings",
        "turn_contents",
        "turn_lengths",
        "turn_roles",
        "weight_versions",
    }
)
"""Names of other columns of a request or put, which would replace media of that name."""

_PAGE = 1000


def media_of(turns: Iterable[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the media of one row: name to the tensors of its turns, joined along dim 0."""
    by_name: dict[str, list[torch.Tensor]] = {}
    for name, value in _tensors(turns):
        by_name.setdefault(name, []).append(value)
    return {
        name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in by_name.items()
    }


def _tensors(turns: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for turn in turns:
        for name, value in turn.items():
            if isinstance(value, torch.Tensor) and name not in NOT_MEDIA:
                yield name, value.reshape(1) if value.dim() == 0 else value


def media_forms(message_logs: Sequence[Iterable[Mapping[str, Any]]]) -> MediaForms:
    """Return the media of a batch: name to the empty tensor that a row without items gets.

    Raises:
        InvalidRequestError: (a ValueError) media of one name differ in dtype or number of
            dimensions, items of one row differ in shape, or media have the name of another column.
            The error names the row.
    """
    forms: MediaForms = {}
    for row, turns in enumerate(message_logs):
        shapes: dict[str, torch.Size] = {}
        for name, value in _tensors(turns):
            if name in RESERVED_NAMES:
                raise InvalidRequestError(
                    f"media {name!r} of row {row} have the name of another column; expected "
                    "another name, such as 'pixel_values'"
                )
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
                    f"{tuple(value.shape[1:])}; expected one shape per row"
                )
    return forms


MediaForms = dict[str, torch.Tensor]
"""Name of media to an empty tensor of their dtype and dimensions, (0, ...)."""


def stored_media(client: DataPlaneClient, partition: PartitionSummary) -> MediaForms:
    """Return the media of a partition's samples, whichever process put them.

    The store records a field's dtype and form only; the dimensions are read from one sample.
    """
    names = {each.name for each in partition.fields if each.form == "shaped" and each.written}
    forms: MediaForms = {}
    start = 0
    while names and (
        page := client.inspector.list_samples(partition.partition_id, start=start, limit=_PAGE)
    ):
        start += len(page)
        for sample in page:
            for name in sorted(names.intersection(sample.fields)):
                try:
                    ids, partition_id = [sample.sample_id], partition.partition_id
                    row = client.get_samples(ids, partition_id, [name])[name]
                except MissingDataError:
                    continue  # cleared since the listing
                forms[name] = row.new_empty((0, *row.shape[2:]))
                names.remove(name)
            if not names:
                break
    return forms


def check_media(
    partition: PartitionSummary, media: MediaForms, stored: MediaForms, declared: MediaForms
) -> None:
    """Refuse media that cannot be read together with the samples of a partition.

    Args:
        partition: summary of the partition.
        media: media of the batch.
        stored: media of the partition.
        declared: media of the configuration.

    Raises:
        SchemaMismatchError: (a ValueError and a TypeError) media have other dimensions, or the
            samples of earlier rollouts lack them; names them.
    """
    operation = f"rollout_to_tq: partition {partition.partition_id!r}"
    for name, form in (declared | media).items():
        if name in stored and stored[name].dim() != form.dim():
            raise SchemaMismatchError(
                f"{operation} holds media {name!r} of {stored[name].dim()} dimensions and cannot "
                f"take {form.dim()}; clear the partition before changing them"
            )
    rollouts = count_rollouts(partition)
    for name, form in media.items():
        if rollouts and name not in stored:
            kind = str(form.dtype).removeprefix("torch.")
            raise SchemaMismatchError(
                f"{operation} holds {rollouts} samples without media {name!r}, which cannot be "
                "read together with samples that have it; declare "
                f"policy.media.{name} (dtype {kind}, dims {form.dim()}) from the first rollout on, "
                "or clear the partition first"
            )


def count_rollouts(partition: PartitionSummary) -> int:
    """Return the number of a partition's samples that a rollout put."""
    return next((each.written for each in partition.fields if each.name == INPUT_IDS), 0)


def check_declared(media: MediaForms, declared: MediaForms) -> None:
    """Refuse media whose dtype or number of dimensions differs from the declaration."""
    for name, form in media.items():
        expected = declared.get(name, form)
        if (expected.dtype, expected.dim()) != (form.dtype, form.dim()):
            raise SchemaMismatchError(
                f"rollout_to_tq: media {name!r} are {form.dtype} of {form.dim()} dimensions; "
                f"expected {expected.dtype} of {expected.dim()}, as policy.media declares"
            )


def share_equal_media(rows: Sequence[dict[str, torch.Tensor]], group_size: int) -> None:
    """Make rows share the tensors of their group's first row where media are equal, in place."""
    for index, media in enumerate(rows):
        first = rows[index - index % group_size]
        for name, tensor in media.items():
            if name in first and torch.equal(tensor, first[name]):
                media[name] = first[name]


def media_columns(
    message_logs: Sequence[Iterable[Mapping[str, Any]]], known: MediaForms | None = None
) -> dict[str, torch.Tensor]:
    """Return the media of a batch as columns.

    Args:
        message_logs: list of turns per row.
        known: media of other batches, which get columns too.

    Returns:
        Name to a strided nested tensor, whose row i holds the items of row i, possibly none.
    """
    forms = (known or {}) | media_forms(message_logs)
    rows = [media_of(turns) for turns in message_logs]
    return {
        name: shaped_from_rows([row.get(name, empty).cpu() for row in rows])
        for name, empty in forms.items()
        if rows
    }
