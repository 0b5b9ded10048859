"""Conversion of message logs to flat columns: for the put, and for the driver.

A row holds the tokens of its turns end to end; masks and log-probabilities are aligned with them.
Only tokens that a generation backend sampled with log-probabilities are trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: columns of a batch are tensors or the caller's own values

import torch

from column_io import BatchedDataDict, decompose_message_log, round_up
from dataplane_core import (
    INPUT_IDS,
    ROUTED_EXPERTS_FIELD,
    InvalidRequestError,
    MissingDataError,
)
from dataplane_core.tensors.columns import object_array
from rollout_actor.interfaces import MessageLog
from rollout_actor.media import MediaForms, media_columns

_TURNS = ("turn_roles", "turn_contents")
OPT_IN_CARRY_KEYS: tuple[str, ...] = (*_TURNS, "generated_tokens")
"""Carry keys that are returned only on request, because few callers need them."""

_LOGPROBS = "generation_logprobs"


def flatten_rollout_message_log(
    message_logs: Sequence[MessageLog],
    prompt_lengths: torch.Tensor,
    *,
    pad_token_id: int,
    make_sequence_length_divisible_by: int,
    routed_experts: bool = False,
    media: MediaForms | None = None,
) -> tuple[BatchedDataDict[Any], torch.Tensor, BatchedDataDict[Any]]:
    """Flatten n message logs.

    Args:
        message_logs: per row the turns, each with ``role`` and ``token_ids`` (int64, 1-D);
            generated turns also with ``generation_logprobs`` (float, one per token).
        prompt_lengths: int (n,), tokens of each prompt. The prompt consists of the leading turns
            that begin before this length, including assistant turns of a history.
        pad_token_id: pads ``input_ids`` and ``prompt_ids_for_adv`` on the right.
        make_sequence_length_divisible_by: alignment of the width, in tokens.
        routed_experts: also flatten ``routed_experts`` of the turns, (length, layers, experts per
            token); 0 for turns after the last response, which are not trained on.
        media: further media, such as those of earlier batches; a row gets zero items of media that
            it lacks.

    Returns:
        A tuple of three:

        - The payload of a put. Of shape (n, width): ``input_ids`` int64, ``generation_logprobs``
            float32 (0 outside generated turns), ``token_mask`` int64 (1 on assistant turns with
            generation log-probabilities, else 0). On request ``routed_experts`` (n, width, layers,
            experts per token). Media of the turns by name, as strided nested tensors, see
            `rollout_actor.media`. ``content``, per row the texts of its turns. ``turn_lengths``,
            ``turn_roles`` and ``turn_contents`` as in `column_io.decompose_message_log`.
        - The valid tokens per row, int64 (n,).
        - The part for the driver: ``prompt_ids_for_adv`` int64 (n, longest prompt),
            ``response_token_lengths`` int64 (n,), ``turn_roles`` and ``turn_contents``, and
            ``generated_tokens`` int64 (n,), the tokens that the model generated in all turns.

    Raises:
        InvalidRequestError: (a ValueError) a turn has another number of log-probabilities or
            routings than tokens, or the number of prompt lengths is wrong.
        MissingDataError: (a KeyError and a ValueError) a turn has no role, a generated turn lacks
            the requested ``routed_experts``, or no turn has them.
    """
    if len(prompt_lengths) != len(message_logs):
        raise InvalidRequestError(
            f"flatten: {len(prompt_lengths)} prompt lengths for {len(message_logs)} message logs; "
            "expected one per row"
        )
    turn_columns = decompose_message_log(message_logs)
    response_token_lengths = turn_columns.pop("response_token_lengths")
    input_lengths = turn_columns["turn_lengths"].sum(dim=1)
    width = round_up(
        int(input_lengths.max()) if len(message_logs) else 0, make_sequence_length_divisible_by
    )
    payload: BatchedDataDict[Any] = BatchedDataDict(media_columns(message_logs, media))
    payload[INPUT_IDS] = torch.full((len(message_logs), width), pad_token_id, dtype=torch.int64)
    payload[_LOGPROBS] = torch.zeros((len(message_logs), width), dtype=torch.float32)
    payload["token_mask"] = torch.zeros((len(message_logs), width), dtype=torch.int64)
    if routed_experts:
        payload[ROUTED_EXPERTS_FIELD] = _empty_routing(message_logs, width)
    for row, turns in enumerate(message_logs):
        start = 0
        for turn in turns:
            stop = start + len(turn.get("token_ids", ()))
            if stop > start:
                _fill(payload, row, slice(start, stop), turn)
            start = stop
    payload["content"] = object_array([list(texts) for texts in turn_columns["turn_contents"]])
    payload.update(turn_columns)
    carried: BatchedDataDict[Any] = BatchedDataDict(
        {
            "prompt_ids_for_adv": _prompt_ids(message_logs, prompt_lengths, pad_token_id),
            "response_token_lengths": response_token_lengths,
            **{name: turn_columns[name] for name in _TURNS},
            "generated_tokens": payload["token_mask"].sum(dim=1),
        }
    )
    return payload, input_lengths, carried


def _fill(payload: BatchedDataDict[Any], row: int, span: slice, turn: dict[str, Any]) -> None:
    payload[INPUT_IDS][row, span] = torch.as_tensor(turn["token_ids"])
    sampled = turn["role"] == "assistant" and _LOGPROBS in turn
    aligned = [_LOGPROBS] if sampled else []
    if ROUTED_EXPERTS_FIELD in payload and ROUTED_EXPERTS_FIELD in turn:
        aligned.append(ROUTED_EXPERTS_FIELD)
    elif ROUTED_EXPERTS_FIELD in payload and sampled:  # zeros would replay expert 0
        raise _no_routing(f"a generated turn of row {row} has")
    for name in aligned:
        if len(turn[name]) != span.stop - span.start:
            raise InvalidRequestError(
                f"flatten: row {row} has {len(turn[name])} {name} in a turn of "
                f"{span.stop - span.start} tokens; expected one per token"
            )
        payload[name][row, span] = torch.as_tensor(turn[name])
    if sampled:
        payload["token_mask"][row, span] = 1


def _empty_routing(message_logs: Sequence[MessageLog], width: int) -> torch.Tensor:
    for turns in message_logs:
        for turn in turns:
            if ROUTED_EXPERTS_FIELD in turn:
                routing: torch.Tensor = turn[ROUTED_EXPERTS_FIELD]
                return routing.new_zeros((len(message_logs), width, *routing.shape[1:]))
    raise _no_routing("the turns have")


def _no_routing(turns: str) -> MissingDataError:
    return MissingDataError(
        f"flatten: {turns} no {ROUTED_EXPERTS_FIELD!r}; router replay needs a generation backend "
        "that returns it for every row (policy.router_replay.enabled)",
        fields=[ROUTED_EXPERTS_FIELD],
    )


def _prompt_ids(
    message_logs: Sequence[MessageLog], prompt_lengths: torch.Tensor, pad_token_id: int
) -> torch.Tensor:
    prompts = []
    for turns, length in zip(message_logs, prompt_lengths.tolist(), strict=True):
        parts = [torch.empty(0, dtype=torch.int64)]
        for turn in turns:
            if sum(map(len, parts)) >= length:
                break
            parts.append(torch.as_tensor(turn.get("token_ids", ()), dtype=torch.int64))
        prompts.append(torch.cat(parts))
    width = max(map(len, prompts), default=0)
    padded = torch.full((len(prompts), width), pad_token_id, dtype=torch.int64)
    for target, prompt in zip(padded, prompts, strict=True):
        target[: len(prompt)] = prompt
    return padded
