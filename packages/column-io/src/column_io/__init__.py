"""Columns on top of a data-plane client: jagged codec, reads and writes, sharding over ranks."""

from __future__ import annotations

from column_io.batched_data_dict import BatchedDataDict
from column_io.batching_args import DynamicBatchingArgs, SequencePackingArgs
from column_io.codec import (
    materialize,
    pack_jagged_fields,
    pack_per_token_field,
    response_from_nested,
    to_nested_by_length,
)
from column_io.columns import kv_first_write, read_columns, write_columns
from column_io.message_log import (
    MESSAGE_LOG_BULK_FIELDS,
    attach_message_log_view,
    decompose_message_log,
    reconstruct_message_log,
)
from column_io.rounding import round_up
from column_io.sharding import shard_meta_for_dp
from dataplane_core.schema import TOKEN_ALIGNED_FIELDS

__all__ = [
    "MESSAGE_LOG_BULK_FIELDS",
    "TOKEN_ALIGNED_FIELDS",
    "BatchedDataDict",
    "DynamicBatchingArgs",
    "SequencePackingArgs",
    "attach_message_log_view",
    "decompose_message_log",
    "kv_first_write",
    "materialize",
    "pack_jagged_fields",
    "pack_per_token_field",
    "read_columns",
    "reconstruct_message_log",
    "response_from_nested",
    "round_up",
    "shard_meta_for_dp",
    "to_nested_by_length",
    "write_columns",
]
