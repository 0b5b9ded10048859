"""Columns in and out of a data-plane client.

Thin on purpose: a read is one ``get_samples``, a write is one ``put_samples``. What is added is the
codec, and the one width that all readers of a batch pad to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any  # Any: extra_info, tags and pad values are the caller's own

import numpy as np
import torch

from column_io.batched_data_dict import BatchedDataDict
from column_io.codec import (
    check_token_axis,
    count_columns,
    is_storable,
    materialize,
    ragged_columns,
)
from column_io.column_rows import count_rows
from column_io.message_log import attach_message_log_view
from column_io.sharding import is_planned_for
from dataplane_core import (
    ELEM_COUNTS_PER_GB,
    GLOBAL_FORWARD_PAD_SEQLEN,
    INPUT_LENGTHS,
    MICRO_BATCH_INDICES,
    MICRO_BATCH_LENGTHS,
    SAMPLE_MASK,
    DataPlaneClient,
    InvalidRequestError,
    KVBatchMeta,
    Layout,
    MissingDataError,
)
from dataplane_core.arguments import checked_int, checked_ints, checked_names
from dataplane_core.documented_client import as_client
from dataplane_core.errors import listed
from dataplane_core.schema import Form
from dataplane_core.telemetry import detail_span

PAD_TO_MULTIPLE = "pad_to_multiple"
"""``extra_info`` key: the alignment of the sequence width that back ends ask for, in tokens."""


def read_columns(
    dp_client: DataPlaneClient,
    meta: KVBatchMeta,
    select_fields: Sequence[str],
    *,
    layout: Layout = "padded",
    pad_value_dict: dict[str, Any] | None = None,
) -> BatchedDataDict[Any]:
    """Fetch ``select_fields`` of the rows of ``meta``.

    Args:
        dp_client: the client to read from; any object with the documented methods will do, see
            `dataplane_core.documented_client`.
        meta: names the rows; row i of the batch is ``meta.sample_ids[i]``. If its ``extra_info``
            has ``global_forward_pad_seqlen``, columns that are per token are padded to that width,
            else to their longest row; see `DataPlaneClient.get_columns`. If it has a plan of
            micro-batches for these ids in this order, the batch carries it.
        select_fields: the columns to read; no others are.
        layout: "padded" for dense tensors, "jagged" for what the store returned.
        pad_value_dict: column to its pad value (``input_ids``: the pad token's id); 0 if absent.

    Returns:
        The columns, and ``message_log`` if ``input_ids`` and the three turn columns are all asked
        for. Without rows: no columns.

    Raises:
        MissingDataError: (a KeyError and a ValueError) as ``get_samples``.
        PartitionNotFoundError: likewise.
    """
    names = list(select_fields)
    batch: BatchedDataDict[Any]
    if layout == "padded":
        forms: dict[str, Form] = {}
        columns = as_client(dp_client).get_columns(
            meta.sample_ids,
            meta.partition_id,
            names,
            pad_values=pad_value_dict,
            width=meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN) or 0,
            forms=forms,
        )
        batch = BatchedDataDict(columns)
        batch.forms = forms
    else:
        fetched = dp_client.get_samples(meta.sample_ids, meta.partition_id, names)
        batch = materialize(fetched, layout)
    _attach_plan(batch, meta)
    with detail_span("message_log", "overhead"):
        attach_message_log_view(batch)
    return batch


def _attach_plan(batch: BatchedDataDict[Any], meta: KVBatchMeta) -> None:
    indices = meta.extra_info.get(MICRO_BATCH_INDICES)
    if indices is None or not is_planned_for(meta):
        return
    batch.micro_batch_indices = indices
    batch.micro_batch_lengths = meta.extra_info.get(MICRO_BATCH_LENGTHS)
    batch.elem_counts_per_gb = meta.extra_info.get(ELEM_COUNTS_PER_GB)


def write_columns(
    dp_client: DataPlaneClient,
    meta: KVBatchMeta,
    fields: Mapping[str, torch.Tensor | np.ndarray],
) -> None:
    """Write columns for the rows of ``meta``, in one put; none if ``fields`` is empty.

    Args:
        dp_client: the client to write to, as for `read_columns`.
        meta: names the rows. Its ``sequence_lengths`` cut token columns to the lengths that the
            first put gave them; without them every column is stored as wide as it is.
        fields: column name to a tensor or an object array with a row per sample. One that is per
            token by its name (`TOKEN_ALIGNED_FIELDS`) is at least as wide as the longest row;
            ``advantages`` and ``sample_mask`` may hold one value per sample, (n,).

    Raises:
        InvalidRequestError: (a ValueError) if rows or lengths do not fit the ids, or a column that
            is per token has no axis of tokens.
        InvalidTypeError: (a TypeError) if a column is of another type.
    """
    if not fields:
        return
    where = f"write_columns(partition={meta.partition_id!r})"
    samples, lengths = len(meta.sample_ids), meta.sequence_lengths
    if lengths is not None:
        lengths = checked_ints(where, "sequence_lengths", lengths)
        if len(lengths) != samples:
            raise InvalidRequestError(
                f"{where}: {len(lengths)} sequence_lengths for {samples} samples; expected one "
                "per sample, or None"
            )
    count = count_columns(where, fields)
    if count != samples:
        raise InvalidRequestError(
            f"{where}: columns {listed(fields)} of {count} rows for {samples} samples; expected "
            "one row per sample"
        )
    check_token_axis(where, fields, lengths)
    as_client(dp_client).put_columns(
        meta.sample_ids,
        meta.partition_id,
        fields,
        lengths=lengths,
        ragged=ragged_columns(fields, lengths),
    )


def kv_first_write(
    final_batch_cpu: BatchedDataDict[Any],
    *,
    sample_ids: Sequence[str],
    dp_client: DataPlaneClient,
    partition_id: str,
    extra_info: dict[str, Any] | None = None,
    task_name: str = "train",
    pad_to_multiple: int = 1,
    tags: list[dict[str, Any]] | None = None,
) -> KVBatchMeta:
    """Write a rollout's first columns, in one put, and return their meta.

    Args:
        final_batch_cpu: tensors and object arrays are written, token columns cut to
            ``input_lengths``; columns of other types (``message_log``) are not. Has
            ``sample_mask``, whose rows count, and ``input_lengths``, in tokens.
        sample_ids: one distinct id per row.
        dp_client: the client to write to, as for `read_columns`.
        partition_id: a registered partition.
        extra_info: goes into the meta.
        task_name: goes into the meta.
        pad_to_multiple: alignment of the width that readers pad to, in tokens. Above 1 it is noted
            in the meta's ``extra_info``; nothing is padded here.
        tags: one dict of primitives per row; stored with the samples and in the meta.

    Returns:
        A meta of the rows: ``fields`` are the columns written, ``sequence_lengths`` the input
        lengths.

    Raises:
        MissingDataError: (a KeyError and a ValueError) without ``sample_mask`` or
            ``input_lengths``.
        InvalidRequestError: (a ValueError) if there are no rows, if ids, lengths, tags or a column
            have another number of rows, if a length is no int of at least 0, if ``pad_to_multiple``
            is none of at least 1, or if a column that is per token by its name has no axis
            of tokens; see `write_columns`.
    """
    where = f"kv_first_write(partition={partition_id!r})"
    alignment = checked_int(where, "pad_to_multiple", pad_to_multiple, least=1)
    missing = [name for name in (SAMPLE_MASK, INPUT_LENGTHS) if name not in final_batch_cpu]
    if missing:
        raise MissingDataError(
            f"{where}: no columns {listed(missing)} among {listed(final_batch_cpu)}",
            fields=missing,
        )
    rows = count_rows(SAMPLE_MASK, final_batch_cpu[SAMPLE_MASK])
    if rows == 0:
        raise InvalidRequestError(f"{where}: no rows; expected at least one")
    ids = checked_names(where, "sample_ids", sample_ids)
    lengths = checked_ints(where, INPUT_LENGTHS, final_batch_cpu[INPUT_LENGTHS])
    for what, count in (
        ("sample_ids", len(ids)),
        ("input_lengths", len(lengths)),
        ("tags", rows if tags is None else len(tags)),
    ):
        if count != rows:
            raise InvalidRequestError(
                f"{where}: {count} {what} for {rows} rows of sample_mask; expected one per row"
            )
    written = {name: column for name, column in final_batch_cpu.items() if is_storable(column)}
    count_columns(where, written)
    check_token_axis(where, written, lengths)
    as_client(dp_client).put_columns(
        ids,
        partition_id,
        written,
        tags,
        lengths=lengths,
        ragged=ragged_columns(written, lengths),
    )
    info = dict(extra_info or {})
    if alignment > 1:
        info[PAD_TO_MULTIPLE] = alignment
    return KVBatchMeta(
        partition_id=partition_id,
        task_name=task_name,
        sample_ids=ids,
        fields=list(written),
        sequence_lengths=lengths,
        extra_info=info,
        tags=None if tags is None else [dict(tag) for tag in tags],
    )
