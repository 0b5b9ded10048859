"""Reads and writes of columns through a data-plane client.

A read is one ``get_columns`` or ``get_samples``, a write one ``put_columns``. This module adds the
codec, and the common width to which all readers of a batch pad.
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
from dataplane_core.documented_client import accepts_lengths, as_client
from dataplane_core.errors import listed
from dataplane_core.schema import Form
from dataplane_core.telemetry import detail_span
from dataplane_core.tensors.columns import check_answer
from dataplane_core.tensors.rows import set_forms_by_lengths

PAD_TO_MULTIPLE = "pad_to_multiple"
"""``extra_info`` key of the alignment in tokens that backends require of the sequence width."""


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
        dp_client: the client to read from; any object with the documented methods, see
            `dataplane_core.documented_client`.
        meta: the rows to read; row i of the batch is ``meta.sample_ids[i]``. If ``extra_info`` has
            ``global_forward_pad_seqlen``, per-token columns are padded to that width; without it,
            to their longest row. `DataPlaneClient.get_columns` defines which columns are per token.
            If the store records no forms, a jagged column counts as per token if its rows have the
            lengths ``sequence_lengths``, or if these are None.
            The batch gets the meta's plan of micro-batches, if the plan was made for these ids in
            this order.
        select_fields: the columns to read.
        layout: "padded" returns right-padded dense tensors where columns can be padded, "jagged"
            the tensors of the store.
        pad_value_dict: column to its pad value (``input_ids``: the pad token's id); 0 if absent.

    Returns:
        The columns, and ``message_log`` if ``select_fields`` has ``input_ids`` and the three turn
        columns. Without rows there are no columns.

    Raises:
        MissingDataError: (a KeyError and a ValueError) as ``get_samples``.
        PartitionNotFoundError: as ``get_samples``.
    """
    client, names = as_client(dp_client), list(select_fields)
    batch: BatchedDataDict[Any]
    if layout == "padded":
        forms: dict[str, Form] = {}
        by_lengths: dict[str, Any] = {}
        if accepts_lengths(client):
            by_lengths["lengths"] = meta.sequence_lengths
        columns = client.get_columns(
            meta.sample_ids,
            meta.partition_id,
            names,
            pad_values=pad_value_dict,
            width=meta.extra_info.get(GLOBAL_FORWARD_PAD_SEQLEN) or 0,
            forms=forms,
            **by_lengths,
        )
        batch = BatchedDataDict(columns)
        batch.forms = forms
    else:
        fetched = client.get_samples(meta.sample_ids, meta.partition_id, names)
        set_forms_by_lengths(fetched, meta.sequence_lengths)
        batch = materialize(fetched, layout)
        if meta.sample_ids:
            operation = f"read_columns(partition={meta.partition_id!r})"
            check_answer(operation, batch, names, len(meta.sample_ids))
    indices = meta.extra_info.get(MICRO_BATCH_INDICES)
    if indices is not None and is_planned_for(meta):
        batch.micro_batch_indices = indices
        batch.micro_batch_lengths = meta.extra_info.get(MICRO_BATCH_LENGTHS)
        batch.elem_counts_per_gb = meta.extra_info.get(ELEM_COUNTS_PER_GB)
    with detail_span("message_log", "overhead"):
        attach_message_log_view(batch)
    return batch


def write_columns(
    dp_client: DataPlaneClient,
    meta: KVBatchMeta,
    fields: Mapping[str, torch.Tensor | np.ndarray],
    *,
    claim: KVBatchMeta | None = None,
) -> None:
    """Write columns for the rows of ``meta`` in one put; write nothing if ``fields`` is empty.

    Args:
        dp_client: the client to write to, as for `read_columns`.
        meta: the rows to write. Token columns are cut to its ``sequence_lengths``; without them
            every column is stored at full width.
        fields: column name to a tensor or an object array with a row per sample. A token-aligned
            column (`TOKEN_ALIGNED_FIELDS`) must be at least as wide as the longest row, or nested
            with the rows' lengths; ``advantages`` and ``sample_mask`` may hold one value per
            sample, (n,).
        claim: the leased claim under which the columns were computed, as in
            `DataPlaneClient.put_samples`.

    Raises:
        InvalidRequestError: (a ValueError) rows or lengths do not fit the ids, or a token-aligned
            column has no token axis.
        InvalidTypeError: (a TypeError) a column has another type.
    """
    if not fields:
        return
    operation = f"write_columns(partition={meta.partition_id!r})"
    samples, lengths = len(meta.sample_ids), meta.sequence_lengths
    if lengths is not None:
        lengths = checked_ints(operation, "sequence_lengths", lengths)
        if len(lengths) != samples:
            raise InvalidRequestError(
                f"{operation}: {len(lengths)} sequence_lengths for {samples} samples; expected one "
                "per sample, or None"
            )
    count = count_columns(operation, fields)
    if count != samples:
        raise InvalidRequestError(
            f"{operation}: columns {listed(fields)} of {count} rows for {samples} samples; "
            "expected one row per sample"
        )
    check_token_axis(operation, fields, lengths)
    as_client(dp_client).put_columns(
        meta.sample_ids,
        meta.partition_id,
        fields,
        lengths=lengths,
        ragged=ragged_columns(fields, lengths),
        claim=claim,
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
    claim: KVBatchMeta | None = None,
) -> KVBatchMeta:
    """Write the first columns of a rollout in one put, and return their meta.

    Args:
        final_batch_cpu: a batch with at least ``sample_mask``, which determines the number of rows,
            and ``input_lengths``, in tokens. Tensors and object arrays are written, token columns
            cut to ``input_lengths``; columns of other types (``message_log``) are not written.
        sample_ids: one distinct id per row.
        dp_client: the client to write to, as for `read_columns`.
        partition_id: a registered partition.
        extra_info: ``extra_info`` of the meta.
        task_name: ``task_name`` of the meta.
        pad_to_multiple: alignment in tokens of the width to which readers pad. Above 1 it is added
            to the meta's ``extra_info``; nothing is padded here.
        tags: one dict of primitives per row, for the samples and the meta.
        claim: the leased claim that the rollout fills, as in `DataPlaneClient.put_samples`.

    Returns:
        A meta of the rows: ``fields`` are the written columns, ``sequence_lengths`` the input
        lengths.

    Raises:
        MissingDataError: (a KeyError and a ValueError) ``sample_mask`` or ``input_lengths`` is
            missing.
        InvalidRequestError: (a ValueError) there are no rows; or ids, lengths, tags or a column
            have another number of rows; or a length is not an int of at least 0; or
            ``pad_to_multiple`` is not an int of at least 1; or a token-aligned column has no token
            axis, see `write_columns`.
    """
    operation = f"kv_first_write(partition={partition_id!r})"
    alignment = checked_int(operation, "pad_to_multiple", pad_to_multiple, minimum=1)
    missing = [name for name in (SAMPLE_MASK, INPUT_LENGTHS) if name not in final_batch_cpu]
    if missing:
        raise MissingDataError(
            f"{operation}: no columns {listed(missing)} among {listed(final_batch_cpu)}",
            fields=missing,
        )
    rows = count_rows(SAMPLE_MASK, final_batch_cpu[SAMPLE_MASK])
    if rows == 0:
        raise InvalidRequestError(f"{operation}: no rows; expected at least one")
    ids = checked_names(operation, "sample_ids", sample_ids)
    lengths = checked_ints(operation, INPUT_LENGTHS, final_batch_cpu[INPUT_LENGTHS])
    for name, count in (
        ("sample_ids", len(ids)),
        ("input_lengths", len(lengths)),
        ("tags", rows if tags is None else len(tags)),
    ):
        if count != rows:
            raise InvalidRequestError(
                f"{operation}: {count} {name} for {rows} rows of sample_mask; expected one per row"
            )
    written = {name: column for name, column in final_batch_cpu.items() if is_storable(column)}
    count_columns(operation, written)
    check_token_axis(operation, written, lengths)
    as_client(dp_client).put_columns(
        ids,
        partition_id,
        written,
        tags,
        lengths=lengths,
        ragged=ragged_columns(written, lengths),
        claim=claim,
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
