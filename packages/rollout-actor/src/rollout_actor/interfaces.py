"""What the rollout expects of the parts it is given: generation back ends and environments.

These are typing protocols: a back end or an environment written elsewhere fits without deriving
from anything here. Environments get their arguments by position, back ends ``data`` by position and
``greedy`` by name, which is what existing implementations take.
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
generated ones also ``generation_logprobs`` (float32, as long as ``token_ids``). Any other tensor is
media of the turn, such as ``pixel_values`` (items, ...)."""


class Observation(TypedDict):
    """What an environment says after a response; the next turn of the conversation.

    Attributes:
        role: role of the turn, such as "environment", "user" or "tool".
        content: its text; empty is fine.
    """

    role: str
    content: str


class VisibleTurn(TypedDict):
    """What an environment sees of a turn."""

    role: str
    content: str


class EnvironmentReturn(NamedTuple):
    """What ``step`` returns for n rows, in the order in which it was given them.

    An object with these attributes, a mapping with these keys, or a tuple in this order serves as
    well.

    Attributes:
        observations: n observations. Also a row that ends may have one; it is not trained on.
        metadata: n values, the ``extra_env_info`` of the next step. None, for a row or as a whole,
            leaves what the row has.
        next_stop_strings: per row the stop strings of the next response, None for no stop strings.
            None as a whole leaves what each row has.
        rewards: float (n,), finite, or name to such a tensor. Named components are summed to the
            row's reward and also kept under their names. Both add up over the turns.
        terminateds: bool (n,); True ends the row.
        answers: n extracted answers, or None as a whole. Read by evaluation loops, not by a
            rollout.
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
    """A Ray actor's method, or anything with the same ``remote``."""

    def remote(self, message_logs: list[list[VisibleTurn]], extra_env_info: list[Any], /) -> Any:
        """Start the step.

        Args:
            message_logs: n conversations so far, the last turn being the response to judge.
            extra_env_info: n values; at first the input batch's, later ``metadata``.

        Returns:
            A Ray ObjectRef or a `concurrent.futures.Future` of an `EnvironmentReturn`, or the
            return itself. Only a reference or a future can be waited for with a deadline.
        """


class EnvironmentInterface(Protocol):
    """An environment: a handle of a Ray actor, or a local object that looks like one."""

    @property
    def step(self) -> RemoteStep:
        """Judge responses and say how the conversations go on."""


class GenerationOutput(TypedDict):
    """What ``generate`` returns for n rows, in the order in which it was given them.

    A rollout checks every answer against this and the prompts it sent.

    Attributes:
        output_ids: int (n, any width), each row the prompt followed by the response, right-padded.
        generation_lengths: int (n,), tokens of the response, the stop token included.
        unpadded_sequence_lengths: int (n,), tokens of prompt and response.
        logprobs: float (n, any width); 0 on the prompt, the log-probability of the sampled token on
            the response: finite and at most 0.
        truncated: bool (n,); the response ran into its token budget. One that stopped by itself is
            not truncated, not even where its last token is the last of the budget. It marks the row
            as truncated and does not end it: the environment decides that. Without this column no
            row counts as truncated.
        routed_experts: int (n, width, layers, experts per token), width at least that of the
            longest row; the experts that computed each token. Needed for router replay only.
    """

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor
    truncated: NotRequired[torch.Tensor]
    routed_experts: NotRequired[torch.Tensor]


class GenerationInterface(Protocol):
    """A generation back end.

    A back end that also has ``snapshot_step_metrics()`` is asked for a snapshot at the start of
    each step; one whose engine is asynchronous is an `AsyncGenerationInterface`.
    """

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool) -> Mapping[str, Any]:
        """Generate one response per row.

        Args:
            data: ``input_ids`` int64 (n, width), right-padded with the pad token; ``input_lengths``
                int64 (n,); ``stop_strings``, a list of n lists of strings or None. If turns have
                media, each kind as a list of n tensors or None under its name.
            greedy: take the likeliest token instead of sampling.

        Returns:
            `GenerationOutput`, as a dict or `BatchedDataDict`, on any device.
        """

    def clear_logger_metrics(self) -> None:
        """Start the accumulation of metrics anew."""

    def get_logger_metrics(self) -> dict[str, Any] | None:
        """The metrics accumulated since the last clear (throughput and the like)."""

    def finish_generation(self) -> Any:
        """Release caches and inference state, so that training can use the device."""


class AsyncGenerationInterface(GenerationInterface, Protocol):
    """A generation back end whose engine serves many requests at once."""

    def generate_async(
        self, data: BatchedDataDict[Any], *, greedy: bool
    ) -> AsyncIterator[tuple[int, Mapping[str, Any]]]:
        """Generate responses as they get ready.

        Args:
            data: as for `GenerationInterface.generate`. The rollout gives one row a call and makes
                the calls of all rows at once.
            greedy: as for `GenerationInterface.generate`.

        Yields:
            The place of a row in ``data``, and its `GenerationOutput` of one row.
        """


class TokenizerInterface(Protocol):
    """The part of a Hugging Face tokenizer that a rollout uses."""

    pad_token_id: int

    def __call__(self, text: str, *, return_tensors: str, add_special_tokens: bool) -> Any:
        """Called with "pt" and False; ``input_ids`` (1, length), as attribute or key.

        Without special tokens: none for an empty text.
        """

    def batch_decode(
        self, sequences: list[torch.Tensor], *, skip_special_tokens: bool
    ) -> list[str]:
        """The text of each of ``sequences`` (int64, 1-D); called with True."""
