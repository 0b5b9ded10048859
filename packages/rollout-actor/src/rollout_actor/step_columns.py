"""The columns of a finished rollout: which are put, and which the driver gets.

Bulk columns are put, and later stages read them by sample id. Small columns are "carried": the
driver gets them as the result. Rewards are only carried, because the driver shapes them first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any  # Any: columns are tensors or the caller's own values

import numpy as np
import torch

from column_io import BatchedDataDict
from dataplane_core import (
    INPUT_IDS,
    INPUT_LENGTHS,
    SAMPLE_MASK,
    DataPlaneClient,
    InvalidRequestError,
    MissingDataError,
    PartitionNotFoundError,
    PartitionSummary,
)
from dataplane_core.arguments import argument_type_error, checked_int, checked_ints
from dataplane_core.declaration import PartitionDeclaration, check_enums, check_kinds
from dataplane_core.errors import listed
from dataplane_core.tensors.columns import object_array
from dataplane_core.tensors.rows import OBJECT, Column
from rollout_actor.environment_return import REWARD_PREFIX
from rollout_actor.flatten import OPT_IN_CARRY_KEYS
from rollout_actor.generation import WEIGHT_VERSIONS

_INPUT_COLUMNS = ("message_log", "length", "loss_multiplier", "task_name", "extra_env_info")
_NOT_PUT = frozenset(
    {"message_log", "length", "loss_multiplier", "total_reward", "truncated", WEIGHT_VERSIONS}
)
PAYLOAD_KINDS = {
    INPUT_IDS: "torch.int64",
    INPUT_LENGTHS: "torch.int64",
    "generation_logprobs": "torch.float32",
    "token_mask": "torch.int64",
    SAMPLE_MASK: "torch.float32",
    "turn_lengths": "torch.int64",
    "turn_roles": OBJECT,
    "turn_contents": OBJECT,
    "content": OBJECT,
}
"""Kinds of the columns that every rollout puts.

The backend decides the kind of ``routed_experts``.
"""

_ALWAYS_CARRIED = (
    "total_reward",
    "loss_multiplier",
    "truncated",
    "length",
    INPUT_LENGTHS,
    "prompt_ids_for_adv",
    "response_token_lengths",
)


def check_input(input_batch: Mapping[str, Any], *, group_size: int) -> int:
    """Check an input batch before generation.

    Returns:
        The number of rows.
    """
    missing = [name for name in _INPUT_COLUMNS if name not in input_batch]
    if missing:
        raise MissingDataError(
            f"rollout_to_tq: the input batch has no {listed(missing)}; found {listed(input_batch)}",
            fields=missing,
        )
    rows = len(input_batch["message_log"])
    group_size = checked_int("rollout_to_tq", "group_size", group_size, minimum=1)
    if rows == 0 or rows % group_size:
        raise InvalidRequestError(
            f"rollout_to_tq: {rows} rows in groups of {group_size}; expected at least one row, and "
            "a group size that divides the rows"
        )
    for name, column in input_batch.items():
        count = _row_count(column)
        if count != rows:
            raise InvalidRequestError(
                f"rollout_to_tq: column {name!r} has {'no' if count is None else count} rows; "
                f"expected {rows}, as message_log"
            )
    loss_multiplier(input_batch)
    _check_prompt_lengths(input_batch)
    return rows


def _check_prompt_lengths(input_batch: Mapping[str, Any]) -> None:
    """Refuse a length of 0, and one above the number of tokens of the message log."""
    lengths = checked_ints("rollout_to_tq", "length", input_batch["length"])
    for row, (turns, length) in enumerate(zip(input_batch["message_log"], lengths, strict=True)):
        tokens = sum(torch.as_tensor(turn.get("token_ids", ())).numel() for turn in turns)
        if not min(tokens, 1) <= length <= tokens:
            raise InvalidRequestError(
                f"rollout_to_tq: length of row {row} is {length}; expected "
                f"{f'1 to {tokens}' if tokens else 0}, the tokens of its message_log"
            )


def check_carry_keys(carry_keys: Sequence[str] | None) -> None:
    """Refuse carry keys that no rollout returns; reward components are unknown until it ends."""
    known = (*_ALWAYS_CARRIED, WEIGHT_VERSIONS, *OPT_IN_CARRY_KEYS)
    unknown = [
        key for key in carry_keys or () if key not in known and not key.startswith(REWARD_PREFIX)
    ]
    if unknown:
        raise _unknown_carry_keys(unknown, [*known, f"{REWARD_PREFIX}<component>"])


def find_partition(client: DataPlaneClient, partition_id: str) -> PartitionSummary | None:
    """Return the summary of a partition; None if the store cannot be inspected."""
    if not getattr(getattr(client, "capabilities", None), "inspection", False):
        return None
    partitions = {summary.partition_id: summary for summary in client.inspector.list_partitions()}
    if partition_id not in partitions:
        raise PartitionNotFoundError(
            f"rollout_to_tq: partition {partition_id!r} is not registered; registered: "
            f"{listed(sorted(partitions)) or 'none'}"
        )
    return partitions[partition_id]


def check_columns(
    partition: PartitionSummary, input_batch: Mapping[str, Any], media: Mapping[str, str]
) -> None:
    """Check before generation that a partition can store the columns.

    Args:
        partition: summary of the target partition.
        input_batch: checked by `check_input`.
        media: name of media to the kind of their column.

    Raises:
        SchemaMismatchError: (a ValueError and a TypeError) it holds a column of another kind.
        InvalidRequestError: (a ValueError) a value is outside a column's declared vocabulary.
    """
    names = _input_columns_to_put(list(input_batch))
    columns = {name: _as_column(input_batch[name]) for name in names}
    kinds = {
        **{
            name: OBJECT if isinstance(column, np.ndarray) else str(column.dtype)
            for name, column in columns.items()
        },
        **media,
        **PAYLOAD_KINDS,
    }
    known = {field.name: field.kind for field in partition.fields if field.kind is not None}
    check_kinds(kinds, known, partition_id=partition.partition_id)
    texts = {
        name: Column(OBJECT, list(column))
        for name, column in columns.items()
        if kinds[name] == OBJECT and name != "extra_env_info"  # environments change it
    }
    declared = PartitionDeclaration(partition.partition_id, (), 0, (), enums=partition.enums)
    check_enums(texts, declared)


def carry_columns(
    final_batch: Mapping[str, Any],
    flattened: Mapping[str, Any],
    input_lengths: torch.Tensor,
    *,
    carry_keys: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the columns for the driver.

    Args:
        final_batch: batch that the rollout returned.
        flattened: the driver's part of `flatten_rollout_message_log`.
        input_lengths: valid tokens per row, int64 (n,).
        carry_keys: names to return, in this order; None for all but `OPT_IN_CARRY_KEYS`.
    """
    available: dict[str, Any] = {
        "total_reward": final_batch["total_reward"],
        "loss_multiplier": loss_multiplier(final_batch),
        "truncated": final_batch["truncated"],
        "length": torch.as_tensor(final_batch["length"]).cpu(),
        INPUT_LENGTHS: input_lengths,
        **flattened,
        **_reported_versions(final_batch),
        **{name: final_batch[name] for name in final_batch if name.startswith(REWARD_PREFIX)},
    }
    if carry_keys is None:
        return {name: value for name, value in available.items() if name not in OPT_IN_CARRY_KEYS}
    unknown = [key for key in carry_keys if key not in available]
    if unknown:
        raise _unknown_carry_keys(unknown, list(available))
    return {key: available[key] for key in carry_keys}


def bulk_columns(
    final_batch: Mapping[str, Any],
    payload: Mapping[str, Any],
    input_lengths: torch.Tensor,
    *,
    input_columns: Sequence[str],
) -> BatchedDataDict[Any]:
    """Return the columns of the put.

    Args:
        final_batch: batch that the rollout returned.
        payload: the put's part of `flatten_rollout_message_log`.
        input_lengths: valid tokens per row, int64 (n,).
        input_columns: names of the input batch's columns. Carried ones are left out; a payload
            column replaces one of the same name.
    """
    return BatchedDataDict(
        {
            **{
                name: _as_column(final_batch[name]) for name in _input_columns_to_put(input_columns)
            },
            **payload,
            **_reported_versions(final_batch),
            INPUT_LENGTHS: input_lengths,
            SAMPLE_MASK: loss_multiplier(final_batch),
        }
    )


def _reported_versions(final_batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: final_batch[name] for name in (WEIGHT_VERSIONS,) if name in final_batch}


def _input_columns_to_put(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in _NOT_PUT and not name.startswith(REWARD_PREFIX)]


def loss_multiplier(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return ``loss_multiplier`` as float32 (n,), the dtype of ``sample_mask``.

    Raises:
        InvalidRequestError: (a ValueError) it is not one finite number per row.
    """
    values, rows = batch["loss_multiplier"], len(batch["message_log"])
    try:
        column = torch.as_tensor(values).to("cpu", torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise argument_type_error(
            "rollout_to_tq", "loss_multiplier", values, f"{rows} numbers"
        ) from error
    if column.shape != (rows,) or not column.isfinite().all():
        raise InvalidRequestError(
            f"rollout_to_tq: loss_multiplier of shape {tuple(column.shape)} has the values "
            f"{column.flatten()[:10].tolist()}; expected finite numbers of shape ({rows},)"
        )
    return column


def _row_count(column: Any) -> int | None:
    if isinstance(column, torch.Tensor | np.ndarray) and not column.ndim:
        return None
    if isinstance(column, torch.Tensor):
        return column.size(0)  # nested tensors of strided layout have neither shape nor length
    per_row = hasattr(column, "__len__") and not isinstance(column, str | bytes | Mapping)
    return len(column) if per_row else None


def _as_column(values: Any) -> torch.Tensor | np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.cpu()
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return torch.as_tensor(values)
    return object_array(values)


def _unknown_carry_keys(unknown: Sequence[str], available: Sequence[str]) -> MissingDataError:
    return MissingDataError(
        f"rollout_to_tq: carry_keys {listed(unknown)} do not exist; available are "
        # List all keys, because a shortened list could hide the intended one.
        f"{', '.join(map(repr, available))}",
        fields=unknown,
    )
