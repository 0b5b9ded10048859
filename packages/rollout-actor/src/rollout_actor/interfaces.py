"""Interfaces of generation backends and environments.

They are typing protocols, so existing implementations fit without deriving from them. Environments
get their arguments by position; backends get ``data`` by position and ``greedy`` by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import (  # Any: contents, metadata and metrics are the implementations' own values
    Any,
    NamedTuple,
    NotRequired,
    Protocol,
    TypedDict,
)

import torch

from column_io import BatchedDataDict

MessageLog = list[dict[str, Any]]
"""The turns of one conversation. Each has ``role``, ``content`` and ``token_ids`` (int64, 1-D);
generated turns also ``generation_logprobs`` (float32, one per token). Any other tensor is media of
the turn, such as ``pixel_values`` (items, ...)."""


class Observation(TypedDict):
    """An environment's observation after a response: the next turn of the conversation.

    Attributes:
        role: role of the turn, such as "environment", "user" or "tool".
        content: text of the turn; may be empty.
    """

    role: str
    content: str


class VisibleTurn(TypedDict):
    """The part of a turn that an environment gets."""

    role: str
    content: str


class EnvironmentReturn(NamedTuple):
    """The result of ``step`` for n rows, in the order of the arguments.

    It may also be an object with these attributes, a mapping with these keys, or a tuple in this
    order.

    Attributes:
        observations: n observations, also for rows that end; they are not trained on.
        metadata: n values for ``extra_env_info`` of the next step. None, for a row or for all,
            keeps the row's present value.
        next_stop_strings: per row the stop strings of the next response; None for a row removes
            them. None instead of the sequence keeps the stop strings of all rows.
        rewards: float (n,), finite, or a mapping of at least one name to such a tensor. The
            components add up to the row's reward. Reward and components are summed over the turns;
            components are also recorded by name.
        terminateds: bool (n,); True ends the row.
        answers: n extracted answers, or None. Evaluation loops use them, rollouts do not.
    """

    observations: Sequence[Observation]
    metadata: Sequence[Any] | None
    next_stop_strings: Sequence[list[str] | None] | None
    rewards: torch.Tensor | Mapping[str, torch.Tensor]
    terminateds: torch.Tensor
    answers: Sequence[str | None] | None = None


class EnvironmentReturnDict(TypedDict):
    """`EnvironmentReturn` as a mapping."""

    observations: Sequence[Observation]
    metadata: Sequence[Any] | None
    next_stop_strings: Sequence[list[str] | None] | None
    rewards: torch.Tensor | Mapping[str, torch.Tensor]
    terminateds: torch.Tensor
    answers: NotRequired[Sequence[str | None] | None]


class RemoteStep(Protocol):
    """A Ray actor's method, or an object with the same ``remote``."""

    def remote(self, message_logs: list[list[VisibleTurn]], extra_env_info: list[Any], /) -> Any:
        """Start the step.

        Args:
            message_logs: n conversations, whose last turn is the response to judge.
            extra_env_info: n values: at the first step those of the input batch, later the last
                ``metadata`` that was not None.

        Returns:
            A Ray ObjectRef or a `concurrent.futures.Future` of an `EnvironmentReturn`, or the
            `EnvironmentReturn` itself. A deadline applies only to a reference or a future.
        """


class EnvironmentInterface(Protocol):
    """An environment: a handle of a Ray actor, or a local object with the same interface."""

    @property
    def step(self) -> RemoteStep:
        """Method that judges responses and returns the next observations."""


class WeightVersionSpan(TypedDict):
    """Tokens ``[start, end)`` that one version of the weights sampled.

    Attributes:
        version: name of the version in the generation backend.
        start: index of the first token.
        end: index after the last token.
    """

    version: str
    start: int
    end: int


class GenerationOutput(TypedDict):
    """The result of ``generate`` for n rows, in the order of the request.

    A rollout checks it against this description and against the request.

    Attributes:
        output_ids: int (n, any width); each row is the prompt followed by the response,
            right-padded.
        generation_lengths: int (n,), tokens of the response, including the stop token.
        unpadded_sequence_lengths: int (n,), tokens of prompt and response.
        logprobs: float (n, any width); 0 on the prompt, and on the response the log-probability of
            each sampled token, finite and at most 0.
        truncated: bool (n,); whether the response reached its token budget. A response that ends
            at a stop token or stop string is not truncated, even if it used the entire budget. True
            marks the row as truncated, but the environment decides whether the row ends. Without
            this column no row counts as truncated.
        routed_experts: int (n, width, layers, experts per token), width at least the length of
            the longest row; the experts that computed each token. For router replay only.
        weight_versions: per row the contiguous spans over its response's tokens, in order; None if
            the backend does not know them. There is one span unless the weights changed during the
            response.
    """

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor
    truncated: NotRequired[torch.Tensor]
    routed_experts: NotRequired[torch.Tensor]
    weight_versions: NotRequired[Sequence[Sequence[WeightVersionSpan] | None]]


class GenerationInterface(Protocol):
    """A generation backend.

    ``snapshot_step_metrics()``, if the backend has it, is called at the start of each step. A
    backend with an asynchronous engine is an `AsyncGenerationInterface`.
    """

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool) -> Mapping[str, Any]:
        """Generate one response per row.

        Args:
            data: ``input_ids`` int64 (n, width), right-padded with the pad token; ``input_lengths``
                int64 (n,); ``stop_strings``, a list of n lists of strings or None; and for each
                media name of the turns, a list of n tensors or None.
            greedy: take the most likely token instead of sampling.

        Returns:
            `GenerationOutput`, as a dict or `BatchedDataDict`, on any device.
        """

    def clear_logger_metrics(self) -> None:
        """Reset the accumulated metrics."""

    def get_logger_metrics(self) -> dict[str, Any] | None:
        """Return the metrics accumulated since the last clear, for example throughput."""

    def finish_generation(self) -> Any:
        """Release caches and inference state, so that training can use the device."""


class AsyncGenerationInterface(GenerationInterface, Protocol):
    """A generation backend whose engine serves many requests at once."""

    def generate_async(
        self, data: BatchedDataDict[Any], *, greedy: bool
    ) -> AsyncIterator[tuple[int, Mapping[str, Any]]]:
        """Generate responses, and yield each as soon as it is ready.

        Args:
            data: as for `GenerationInterface.generate`. The rollout passes one row per call, with
                concurrent calls for all rows.
            greedy: as for `GenerationInterface.generate`.

        Yields:
            The index of a row in ``data``, and its `GenerationOutput` of one row.
        """


class TokenizerInterface(Protocol):
    """The part of a Hugging Face tokenizer that a rollout uses."""

    pad_token_id: int

    def __call__(self, text: str, *, return_tensors: str, add_special_tokens: bool) -> Any:
        """Return ``input_ids`` (1, length), as attribute or key.

        The rollout passes "pt" and False. An empty text must return no tokens.
        """

    def batch_decode(
        self, sequences: list[torch.Tensor], *, skip_special_tokens: bool
    ) -> list[str]:
        """Return the text of each of ``sequences`` (int64, 1-D); the rollout passes True."""
