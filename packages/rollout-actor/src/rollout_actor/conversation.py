"""`Conversation`: one row of a rollout in progress.

The synchronous and the asynchronous rollout use it to add responses and observations to a row.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any  # Any: contents and environment info are the caller's own values

import torch

from dataplane_core import InvalidRequestError, MissingDataError
from dataplane_core.errors import listed
from rollout_actor.environment_return import StepOutcome, read_stop_strings
from rollout_actor.interfaces import MessageLog, TokenizerInterface, WeightVersionSpan
from rollout_actor.media import media_of, share_equal_media

_NEEDED_COLUMNS = ("message_log", "task_name", "extra_env_info")


@dataclass(frozen=True)
class Response:
    """The response generated for one row.

    Attributes:
        token_ids: int64 (r,).
        logprobs: float32 (r,).
        truncated: whether the token budget ended the response.
        routed_experts: (prompt + r, layers, experts per token) or None.
        weight_versions: spans over the response's tokens; None if unknown.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    truncated: bool
    routed_experts: torch.Tensor | None
    weight_versions: list[WeightVersionSpan] | None


@dataclass(frozen=True)
class TurnRecord:
    """One turn's values for the metrics: tokens generated, tokens observed, reward."""

    generated: int
    observed: int
    reward: float


@dataclass
class Conversation:
    """A row of the batch.

    Attributes:
        row: index of the row in the batch.
        task: task whose environment judges it.
        turns: the message log; a copy, so that the input batch is not changed.
        env_info: ``extra_env_info`` for the environment's next step.
        stop_strings: stop strings of the next response.
        media: name to tensor, for the generation backend.
        truncated: whether a response reached its token budget.
        terminated: whether the environment ended the row.
        full: whether the row ended because an observation left no space for a response.
        rewards: reward component to its sum over the turns.
        history: one record per finished turn.
        weight_versions: spans over the row's generated tokens; None once a response has none.
    """

    row: int
    task: str
    turns: MessageLog
    env_info: Any
    stop_strings: list[str] | None
    media: dict[str, torch.Tensor]
    total_reward: float = 0.0
    truncated: bool = False
    terminated: bool = False
    full: bool = False
    rewards: dict[str, float] = field(default_factory=dict)
    history: list[TurnRecord] = field(default_factory=list)
    weight_versions: list[WeightVersionSpan] | None = field(default_factory=list)

    @property
    def active(self) -> bool:
        """True if the row needs another response."""
        return not (self.terminated or self.full)

    @property
    def token_ids(self) -> torch.Tensor:
        """All tokens so far, int64 (length,)."""
        parts = [turn["token_ids"] for turn in self.turns]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return sum(len(turn["token_ids"]) for turn in self.turns)

    def add_response(self, response: Response, text: str) -> None:
        """Append a response as a turn."""
        self._add_weight_versions(response)
        self.turns.append(
            {
                "role": "assistant",
                "content": text,
                "token_ids": response.token_ids,
                "generation_logprobs": response.logprobs,
            }
        )
        self.truncated |= response.truncated
        if response.routed_experts is not None:
            self._add_routing(response.routed_experts)

    def _add_weight_versions(self, response: Response) -> None:
        if self.weight_versions is None or response.weight_versions is None:
            self.weight_versions = None
            return
        offset = self.length
        self.weight_versions += [
            {
                "version": span["version"],
                "start": offset + span["start"],
                "end": offset + span["end"],
            }
            for span in response.weight_versions
        ]

    def _add_routing(self, routed_experts: torch.Tensor) -> None:
        # The prefill of a later response routes earlier turns again. Training must replay the
        # routing with which a turn was generated, so its first routing stays.
        start = 0
        for turn in self.turns:
            stop = start + len(turn["token_ids"])
            turn.setdefault("routed_experts", routed_experts[start:stop])
            start = stop

    def add_outcome(
        self, outcome: StepOutcome, tokenizer: TokenizerInterface, *, max_seq_len: int
    ) -> None:
        """Add the environment's result for the last response.

        An observation that would fill the sequence is cut, which ends the row.
        """
        observed = _tokenize(tokenizer, outcome.observation["content"])
        length = self.length
        if length + len(observed) >= max_seq_len:
            observed = observed[: max(0, max_seq_len - length)]
            self.full = not outcome.terminated
        generated = len(self.turns[-1]["token_ids"])
        self.turns.append(
            {
                "role": outcome.observation["role"],
                "content": outcome.observation["content"],
                "token_ids": observed,
            }
        )
        self.total_reward += outcome.reward
        for name, reward in outcome.components.items():
            self.rewards[name] = self.rewards.get(name, 0.0) + reward
        self.terminated |= outcome.terminated
        if outcome.metadata is not None:
            self.env_info = outcome.metadata
        if outcome.sets_stop_strings:
            self.stop_strings = outcome.stop_strings
        self.history.append(TurnRecord(generated, len(observed), outcome.reward))


def start_conversations(
    input_batch: Mapping[str, Any], *, media_group_size: int = 1
) -> list[Conversation]:
    """Return the conversations of ``input_batch``, with copies of all values that may change.

    Args:
        input_batch: ``message_log``, ``task_name``, ``extra_env_info``, maybe ``stop_strings``.
        media_group_size: number of consecutive rows that repeat one prompt and share its media.

    Raises:
        MissingDataError: (a KeyError and a ValueError) a column or a turn's tokens are missing.
        InvalidRequestError: (a ValueError) the columns differ in their number of rows, a turn's
            tokens are not integers (tokens,), or a row's ``stop_strings`` are not a list of
            strings.
    """
    missing = [name for name in _NEEDED_COLUMNS if name not in input_batch]
    if missing:
        raise MissingDataError(
            f"rollout: the input batch has no {listed(missing)}; found {listed(input_batch)}",
            fields=missing,
        )
    logs: Sequence[MessageLog] = input_batch["message_log"]
    columns = [
        input_batch["task_name"],
        input_batch["extra_env_info"],
        input_batch.get("stop_strings", [None] * len(logs)),
    ]
    if any(len(column) != len(logs) for column in columns):
        raise InvalidRequestError(
            f"rollout: {len(logs)} message logs with {len(columns[0])} task names, "
            f"{len(columns[1])} extra_env_info and {len(columns[2])} stop_strings; expected one "
            "of each per row"
        )
    conversations = [
        Conversation(
            row=row,
            task=str(task),
            turns=[_copied_turn(turn, row, index) for index, turn in enumerate(log)],
            # Repeated prompts often share one dict, to which an environment may write.
            env_info=copy.deepcopy(env_info),
            stop_strings=read_stop_strings(stop_strings, f"rollout: stop_strings of row {row}"),
            media=media_of(log),
        )
        for row, (log, task, env_info, stop_strings) in enumerate(zip(logs, *columns, strict=True))
    ]
    if media_group_size > 1:
        share_equal_media([row.media for row in conversations], media_group_size)
    return conversations


def check_tokenizer(tokenizer: TokenizerInterface) -> None:
    """Refuse a tokenizer that adds tokens to a text, because it would add them to observations.

    Raises:
        InvalidRequestError: (a ValueError) names the tokenizer and the tokens that it adds.
    """
    added = _tokenize(tokenizer, "").tolist()
    if added:
        raise InvalidRequestError(
            f"rollout: tokenizer {type(tokenizer).__name__} returns the tokens {added} for an "
            "empty text, called with add_special_tokens=False; expected none, because they would "
            "be added to every observation"
        )


def _copied_turn(turn: Mapping[str, Any], row: int, index: int) -> dict[str, Any]:
    missing = [name for name in ("role", "token_ids") if name not in turn]
    if missing:
        raise MissingDataError(
            f"rollout: turn {index} of row {row} has no {listed(missing)}; found {listed(turn)}",
            fields=missing,
        )
    token_ids = torch.as_tensor(turn["token_ids"])
    inexact = token_ids.is_floating_point() or token_ids.is_complex()
    # A tokenizer returns an empty float tensor for an empty text.
    if token_ids.dim() != 1 or (inexact and len(token_ids)):
        raise InvalidRequestError(
            f"rollout: turn {index} of row {row} has token_ids of shape {tuple(token_ids.shape)} "
            f"({token_ids.dtype}); expected integers of shape (tokens,)"
        )
    return {"content": "", **turn, "token_ids": token_ids.to("cpu", torch.int64)}


def _tokenize(tokenizer: TokenizerInterface, text: str) -> torch.Tensor:
    encoded = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    ids = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded.input_ids
    # Tokenizers return an empty float tensor for an empty text.
    return torch.as_tensor(ids).to("cpu", torch.int64).reshape(-1)
