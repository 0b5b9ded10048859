"""Client of the generation worker, for the rollout actor.

It is separate from the worker, because the rollout actor loads no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: batches and Ray handles

from dataplane_core.telemetry import inject
from grpo_trainer.actors.calls import ActorCalls

if TYPE_CHECKING:
    from column_io import BatchedDataDict

GENERATION = "generation worker"

POSITIONS = "positions"
"""Key in the data of a call whose responses are recorded. Its value is the position of each row's
prompt, None if unknown."""

JOURNAL = "journal"
"""Key of the output of a call with `POSITIONS`: its `JournalUse` as a dict."""


@dataclass
class JournalUse:
    """Use of the journal of responses.

    Attributes:
        continued_tokens: tokens of responses that an earlier part of the run drew.
        seconds: seconds spent on the journal.
    """

    continued_tokens: int = 0
    seconds: float = 0.0


_RECORDED: ContextVar[tuple[Mapping[int, Sequence[int]], JournalUse] | None] = ContextVar(
    "recorded", default=None
)
"""Prompts of the thread's rollout by position, and its use of the journal."""


class RayGeneration:
    """`rollout_actor.GenerationInterface` that calls the handle of a `GenerationWorker`."""

    _quiet_s = 0.0

    def __init__(self, worker: Any, *, timeout_s: float) -> None:
        self._calls = ActorCalls(timeout_s=timeout_s, quiet_s=self._quiet_s)
        self._calls.actors[GENERATION] = worker

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool) -> Mapping[str, Any]:
        """Generate one response per row."""
        return self._generate(dict(data), greedy=greedy)

    def _generate(self, data: dict[str, Any], *, greedy: bool) -> Mapping[str, Any]:
        response: Mapping[str, Any] = self._calls.call(
            GENERATION, "generate", data, greedy=greedy, carrier=inject()
        )
        return response

    def clear_logger_metrics(self) -> None:
        """Reset the accumulated metrics."""
        self._calls.call(GENERATION, "clear_metrics")

    def get_logger_metrics(self) -> dict[str, Any]:
        """Return the metrics accumulated since the last reset."""
        metrics: dict[str, Any] = self._calls.call(GENERATION, "metrics")
        return metrics

    def finish_generation(self) -> None:
        """Release cached device memory."""
        self._calls.call(GENERATION, "release_memory")


class StreamingGeneration(RayGeneration):
    """`RayGeneration` of concurrent rollouts, which share the worker's metrics and memory."""

    _quiet_s = 30.0  # with many concurrent rollouts, long calls are normal

    @contextmanager
    def recorded(self, prompts: Mapping[int, Sequence[int]]) -> Iterator[JournalUse]:
        """Let the worker record the responses that this thread requests, and continue partial ones.

        ``prompts`` has the tokens of each prompt by its position in the stream.
        """
        use = JournalUse()
        token = _RECORDED.set((prompts, use))
        try:
            yield use
        finally:
            _RECORDED.reset(token)

    def generate(self, data: BatchedDataDict[Any], *, greedy: bool) -> Mapping[str, Any]:
        """Generate one response per row."""
        recorded = _RECORDED.get()
        if recorded is None or greedy:
            return self._generate(dict(data), greedy=greedy)
        prompts, use = recorded
        lengths = data["input_lengths"].tolist()
        rows = [
            ids[:length] for ids, length in zip(data["input_ids"].tolist(), lengths, strict=True)
        ]
        positions = [_position(row, prompts) for row in rows]
        output = self._generate({**data, POSITIONS: positions}, greedy=greedy)
        use.continued_tokens += output[JOURNAL]["continued_tokens"]
        use.seconds += output[JOURNAL]["seconds"]
        return output

    def weight_version(self) -> str:
        """Return the version id of the weights that the worker holds."""
        version: str = self._calls.call(GENERATION, "weight_version")
        return version

    def clear_logger_metrics(self) -> None:
        """Do nothing: the metrics are those of all rollouts."""

    def get_logger_metrics(self) -> dict[str, Any]:
        """Return no metrics; the generator measures its rollouts."""
        return {}

    def finish_generation(self) -> None:
        """Do nothing: other rollouts continue."""


def _position(row: Sequence[int], prompts: Mapping[int, Sequence[int]]) -> int | None:
    """Return the position of the only prompt that begins a row; None if none or several do.

    With several, a response could be continued for another prompt, whose group may be trained
    already.
    """
    matching = [each for each, ids in prompts.items() if list(row[: len(ids)]) == list(ids)]
    return matching[0] if len(matching) == 1 else None
