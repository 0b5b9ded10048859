"""Which columns of a finished rollout are put, and which go to the driver.

The two hardly overlap: what is put is bulk that later stages read by sample id, what is carried is
small and per row. Rewards are carried only, since the driver shapes them before anyone else may.
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
from dataplane_core.arguments import checked_int
from dataplane_core.declaration import PartitionDeclaration, check_enums, check_kinds
from dataplane_core.errors import listed
from dataplane_core.rows import OBJECT, Column
from rollout_actor.flatten import OPT_IN_CARRY_KEYS
from rollout_actor.object_column import object_column

REWARD_PREFIX = "reward/"
"""Reward components with this prefix are carried."""

_INPUT_COLUMNS = ("message_log", "length", "loss_multiplier", "task_name", "extra_env_info")
_NOT_PUT = frozenset({"message_log", "length", "loss_multiplier", "total_reward", "truncated"})
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
"""Kinds of the columns that every rollout puts; that of ``routed_experts`` is the back end's."""

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
    """Refuse a batch that cannot be rolled out, before anything is generated.

    Returns:
        The number of rows.

    Raises:
        MissingDataError: (a KeyError and a ValueError) if a column is missing.
        InvalidRequestError: (a ValueError) if there are no rows, columns differ in their number of
            rows, or ``group_size`` is below 1 or does not divide the rows.
    """
    missing = [name for name in _INPUT_COLUMNS if name not in input_batch]
    if missing:
        raise MissingDataError(
            f"rollout_to_tq: the input batch has no {listed(missing)}; found {listed(input_batch)}",
            fields=missing,
        )
    rows = len(input_batch["message_log"])
    group_size = checked_int("rollout_to_tq", "group_size", group_size, least=1)
    if rows == 0 or rows % group_size:
        raise InvalidRequestError(
            f"rollout_to_tq: {rows} rows in groups of {group_size}; expected a group size of at "
            "least 1 that divides the rows, of which there is at least one"
        )
    for name, column in input_batch.items():
        found = _row_count(column)
        if found != rows:
            raise InvalidRequestError(
                f"rollout_to_tq: column {name!r} has {'no' if found is None else found} rows; "
                f"expected {rows}, as message_log"
            )
    return rows


def check_carry_keys(carry_keys: Sequence[str] | None) -> None:
    """Refuse carry keys that no rollout has. Which reward components there are is known later.

    Raises:
        MissingDataError: (a KeyError and a ValueError) naming the keys there are.
    """
    known = (*_ALWAYS_CARRIED, *OPT_IN_CARRY_KEYS)
    unknown = [
        key for key in carry_keys or () if key not in known and not key.startswith(REWARD_PREFIX)
    ]
    if unknown:
        raise _unknown_carry_keys(unknown, [*known, f"{REWARD_PREFIX}<component>"])


def find_partition(client: DataPlaneClient, partition_id: str) -> PartitionSummary | None:
    """What a store says of a partition; None if it cannot be inspected.

    Raises:
        PartitionNotFoundError: (a KeyError and a ValueError) if it is not registered.
    """
    if not getattr(getattr(client, "capabilities", None), "inspection", False):
        return None
    partitions = {summary.partition_id: summary for summary in client.list_partitions()}
    if partition_id not in partitions:
        raise PartitionNotFoundError(
            f"rollout_to_tq: partition {partition_id!r} is not registered; registered: "
            f"{listed(sorted(partitions)) or 'none'}"
        )
    return partitions[partition_id]


def check_columns(
    partition: PartitionSummary, input_batch: Mapping[str, Any], media: Mapping[str, str]
) -> None:
    """Refuse columns that a partition cannot take, before anything is generated.

    Args:
        partition: the partition that will be put into.
        input_batch: checked by `check_input`.
        media: name of media to the kind of their column.

    Raises:
        SchemaMismatchError: (a ValueError and a TypeError) if it holds one in another kind.
        InvalidRequestError: (a ValueError) if a value is outside a column's declared vocabulary.
    """
    names = _put_of_input(list(input_batch))
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
        if kinds[name] == OBJECT and name != "extra_env_info"  # which environments change
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
    """The columns for the driver.

    Args:
        final_batch: what the rollout returned.
        flattened: the driver's part of `flatten_rollout_message_log`.
        input_lengths: valid tokens per row, int64 (n,).
        carry_keys: the names to return, in this order; None for all but `OPT_IN_CARRY_KEYS`.

    Raises:
        MissingDataError: (a KeyError and a ValueError) naming the keys there are.
    """
    available: dict[str, Any] = {
        "total_reward": final_batch["total_reward"],
        "loss_multiplier": loss_multiplier(final_batch),
        "truncated": final_batch["truncated"],
        "length": torch.as_tensor(final_batch["length"]).cpu(),
        INPUT_LENGTHS: input_lengths,
        **flattened,
        **{name: final_batch[name] for name in _reward_components(final_batch)},
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
    """The columns of the put.

    Args:
        final_batch: what the rollout returned.
        payload: the put's part of `flatten_rollout_message_log`.
        input_lengths: valid tokens per row, int64 (n,).
        input_columns: the names that the input batch had. Those that the driver carries are left
            out; one with the name of a payload column gives way to it.
    """
    return BatchedDataDict(
        {
            **{name: _as_column(final_batch[name]) for name in _put_of_input(input_columns)},
            **payload,
            INPUT_LENGTHS: input_lengths,
            SAMPLE_MASK: loss_multiplier(final_batch),
        }
    )


def _put_of_input(names: Sequence[str]) -> list[str]:
    return [name for name in names if name not in _NOT_PUT and not name.startswith(REWARD_PREFIX)]


def loss_multiplier(batch: Mapping[str, Any]) -> torch.Tensor:
    """``loss_multiplier`` as float32 (n,), the dtype in which the driver writes the mask again."""
    return torch.as_tensor(batch["loss_multiplier"]).to("cpu", torch.float32)


def _row_count(column: Any) -> int | None:
    if isinstance(column, torch.Tensor | np.ndarray) and not column.ndim:
        return None
    if isinstance(column, torch.Tensor):
        return column.size(0)  # nested tensors of strided layout have neither shape nor length
    per_row = hasattr(column, "__len__") and not isinstance(column, str | bytes | Mapping)
    return len(column) if per_row else None


def _reward_components(final_batch: Mapping[str, Any]) -> list[str]:
    return [name for name in final_batch if name.startswith(REWARD_PREFIX)]


def _as_column(values: Any) -> torch.Tensor | np.ndarray:
    if isinstance(values, torch.Tensor):
        return values.cpu()
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
        return torch.as_tensor(values)
    return object_column(values)


def _unknown_carry_keys(unknown: Sequence[str], available: Sequence[str]) -> MissingDataError:
    return MissingDataError(
        f"rollout_to_tq: carry_keys {listed(unknown)} do not exist; available are "
        # All of them: a listing cut short could hide the one that was meant.
        f"{', '.join(map(repr, available))}",
        fields=unknown,
    )
