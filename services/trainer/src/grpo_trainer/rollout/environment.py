"""Environment that compares responses with answers, and asks the follow-ups.

A response that equals the answer scores 1. Otherwise its score is the fraction of the answer that
it has before its first mistake. The answer's end counts as one more character, because the model
must learn to stop. All turns have the same share of the conversation's reward. The part that each
turn adds is a reward component, such as ``reward/turn_1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any  # Any: extra_env_info is a plain dict that crosses processes

import torch

from grpo_trainer.actors.telemetry import RunActor, TelemetrySettings
from grpo_trainer.model.chat_turn import ChatTurn
from grpo_trainer.report.step_metrics import REWARD_PREFIX
from observability import traced

if TYPE_CHECKING:  # the environment's process needs neither the rollout actor nor the data plane
    from rollout_actor import EnvironmentReturnDict, Observation


def score(response: str, answer: str) -> float:
    """Return the share of ``answer``, its end included, that precedes the first mistake."""
    if response == answer:
        return 1.0
    pairs = zip(response, answer, strict=False)
    right = next((i for i, (got, want) in enumerate(pairs) if got != want), None)
    if right is None:
        right = min(len(response), len(answer))
    return right / (len(answer) + 1)


class VerifierEnvironment(RunActor):
    """Class of the environment's Ray actor.

    Args:
        correct: text before a follow-up if the last response was correct.
        wrong: text before a follow-up if it was not.
        chat_turn: text around a follow-up, None for none. Complete responses contain its end token
            as text.
        telemetry: settings of telemetry, None for none.
    """

    def __init__(
        self,
        *,
        correct: str,
        wrong: str,
        chat_turn: ChatTurn | None = None,
        telemetry: TelemetrySettings | None = None,
    ) -> None:
        self._start_telemetry(telemetry, "grpo.environment")
        self._chat_turn = chat_turn
        self._correct = correct
        self._wrong = wrong

    @traced(bucket="productive")
    def step(
        self, message_logs: Sequence[Sequence[dict[str, str]]], infos: Sequence[dict[str, Any]]
    ) -> EnvironmentReturnDict:
        """Score the last response of each conversation; the protocol defines the arguments."""
        observations: list[Observation] = []
        metadata, terminated = [], []
        turns = sorted({info["turn"] for info in infos})
        rewards = {turn: torch.zeros(len(infos)) for turn in turns}
        for row, (log, info) in enumerate(zip(message_logs, infos, strict=True)):
            turn = info["turn"]
            response, ended = self._read(log[-1]["content"])
            points = score(response.strip(), info["answers"][turn])
            last = turn + 1 == len(info["answers"])
            verdict = self._correct if points == 1.0 else self._wrong
            question = "" if last else verdict + info["questions"][turn + 1]
            follow_up = "" if last else self._follow_up(question, ended)
            observations.append({"role": "environment", "content": follow_up})
            metadata.append({**info, "turn": turn + 1})
            rewards[turn][row] = points / len(info["answers"])
            terminated.append(last)
        return {
            "observations": observations,
            "metadata": metadata,
            "next_stop_strings": [None] * len(infos),
            "rewards": {f"{REWARD_PREFIX}turn_{turn + 1}": each for turn, each in rewards.items()},
            "terminateds": torch.tensor(terminated),
        }

    def _read(self, content: str) -> tuple[str, bool]:
        """Return a response without its end token, and whether it is complete."""
        if self._chat_turn is None:
            return content, True
        end = self._chat_turn.end
        return content.removesuffix(end), content.endswith(end)

    def _follow_up(self, question: str, ended: bool) -> str:
        if self._chat_turn is None:
            return question
        return self._chat_turn.render(question, ended=ended)
