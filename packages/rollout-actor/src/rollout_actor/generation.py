"""Batches to a generation back end, and its answers taken apart by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: a back end's answer is a mapping of its own columns

import torch

from column_io import BatchedDataDict
from dataplane_core import INPUT_IDS, INPUT_LENGTHS, ROUTED_EXPERTS_FIELD, MissingDataError
from dataplane_core.errors import InvalidRequestError, listed

if TYPE_CHECKING:
    from rollout_actor.conversation import Conversation

_NEEDED_OUTPUTS = ("output_ids", "unpadded_sequence_lengths", "logprobs")


@dataclass(frozen=True)
class Response:
    """What was generated for one row.

    Attributes:
        token_ids: int64 (r,).
        logprobs: float32 (r,).
        truncated: the token budget ended it.
        routed_experts: (prompt + r, layers, experts per token) or None.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    truncated: bool
    routed_experts: torch.Tensor | None


def generation_input(rows: Sequence[Conversation], *, pad_token_id: int) -> BatchedDataDict[Any]:
    """What `GenerationInterface.generate` takes, for ``rows``."""
    token_rows = [row.token_ids for row in rows]
    lengths = torch.tensor([len(tokens) for tokens in token_rows], dtype=torch.int64)
    input_ids = torch.full((len(rows), int(lengths.max())), pad_token_id, dtype=torch.int64)
    for target, tokens in zip(input_ids, token_rows, strict=True):
        target[: len(tokens)] = tokens
    media = dict.fromkeys(name for row in rows for name in row.media)
    return BatchedDataDict(
        {
            **{name: [row.media.get(name) for row in rows] for name in media},
            INPUT_IDS: input_ids,
            INPUT_LENGTHS: lengths,
            "stop_strings": [row.stop_strings for row in rows],
        }
    )


def responses(output: Mapping[str, Any], prompt_lengths: torch.Tensor) -> list[Response]:
    """Take a back end's answer apart.

    Args:
        output: `GenerationOutput` of n rows.
        prompt_lengths: int64 (n,), the ``input_lengths`` that the back end was given.

    Raises:
        MissingDataError: (a KeyError and a ValueError) if a column is missing.
        InvalidRequestError: (a ValueError) if a row is shorter than its prompt or longer than the
            columns are wide, or the number of rows differs.
    """
    missing = [name for name in _NEEDED_OUTPUTS if name not in output]
    if missing:
        raise MissingDataError(
            f"generation: the back end's answer has no {listed(missing)}; found {listed(output)}",
            fields=missing,
        )
    starts = prompt_lengths.tolist()
    stops = torch.as_tensor(output["unpadded_sequence_lengths"]).tolist()
    columns = {name: output[name].detach().cpu() for name in ("output_ids", "logprobs")}
    routing = output.get(ROUTED_EXPERTS_FIELD)
    if routing is not None:
        columns[ROUTED_EXPERTS_FIELD] = routing.detach().cpu()
    truncated = output.get("truncated")
    flags = [False] * len(starts) if truncated is None else torch.as_tensor(truncated).tolist()
    for name, column in columns.items():
        _check_shape(name, column, starts, stops)
    return [
        Response(
            # Copies: a view would keep the whole padded batch of this turn alive.
            token_ids=columns["output_ids"][row, start:stop].to(torch.int64, copy=True),
            logprobs=columns["logprobs"][row, start:stop].to(torch.float32, copy=True),
            truncated=bool(flags[row]),
            routed_experts=(
                None if routing is None else columns[ROUTED_EXPERTS_FIELD][row, :stop].clone()
            ),
        )
        for row, (start, stop) in enumerate(zip(starts, stops, strict=True))
    ]


def _check_shape(
    name: str, column: torch.Tensor, starts: Sequence[int], stops: Sequence[int]
) -> None:
    fits = column.dim() >= 2 and column.shape[0] == len(starts) == len(stops)
    for row, (start, stop) in enumerate(zip(starts, stops, strict=False)):
        if not fits or not start <= stop <= column.shape[1]:
            raise InvalidRequestError(
                f"generation: {name} of shape {tuple(column.shape)} for {len(starts)} rows, "
                f"row {row} from prompt length {start} to length {stop}; expected a row each, "
                "as wide as its prompt and response"
            )
