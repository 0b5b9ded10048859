"""The environment: compares responses with answers by program, and asks the follow-ups.

A response scores 1 if it is the answer and nothing else. Otherwise it scores the part of the answer
it got right before its first mistake, the end counting as one more character: that a response must
stop is part of what is learnt. Each turn is worth the same share of the conversation's reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any  # Any: extra_env_info is a plain dict that crosses processes

import torch

from grpo_trainer.chat_turn import ChatTurn
from grpo_trainer.reporting import Reporting, ReportingActor
from observability import traced

if TYPE_CHECKING:  # the environment's process needs neither the rollout actor nor the data plane
    from rollout_actor import EnvironmentReturnDict, Observation


def score(response: str, answer: str) -> float:
    """The share of ``answer`` and its end that ``response`` has right before its first mistake."""
    if response == answer:
        return 1.0
    pairs = zip(response, answer, strict=False)
    right = next((i for i, (got, want) in enumerate(pairs) if got != want), None)
    if right is None:
        right = min(len(response), len(answer))
    return right / (len(answer) + 1)


class VerifierEnvironment(ReportingActor):
    """A Ray actor's class.

    Args:
        correct: what is said before a follow-up if the last response was right.
        wrong: the same if it was not.
        chat_turn: what stands around a follow-up, None for nothing. Responses that came to their
            end have its end token as text.
        reporting: how to report, None not to.
    """

    def __init__(
        self,
        *,
        correct: str,
        wrong: str,
        chat_turn: ChatTurn | None = None,
        reporting: Reporting | None = None,
    ) -> None:
        self._report(reporting, "grpo.environment")
        self._chat_turn = chat_turn
        self._correct = correct
        self._wrong = wrong

    @traced(bucket="productive")
    def step(
        self, message_logs: Sequence[Sequence[dict[str, str]]], infos: Sequence[dict[str, Any]]
    ) -> EnvironmentReturnDict:
        """Judge the last response of each conversation; arguments as the protocol has them."""
        observations: list[Observation] = []
        metadata, rewards, terminated = [], [], []
        for log, info in zip(message_logs, infos, strict=True):
            turn = info["turn"]
            response, ended = self._read(log[-1]["content"])
            points = score(response.strip(), info["answers"][turn])
            last = turn + 1 == len(info["answers"])
            said = self._correct if points == 1.0 else self._wrong
            follow_up = "" if last else self._ask(said + info["questions"][turn + 1], ended)
            observations.append({"role": "environment", "content": follow_up})
            metadata.append({**info, "turn": turn + 1})
            rewards.append(points / len(info["answers"]))
            terminated.append(last)
        return {
            "observations": observations,
            "metadata": metadata,
            "next_stop_strings": [None] * len(rewards),
            "rewards": torch.tensor(rewards),
            "terminateds": torch.tensor(terminated),
        }

    def _read(self, content: str) -> tuple[str, bool]:
        """A response without its end token, and whether it had one."""
        if self._chat_turn is None:
            return content, True
        end = self._chat_turn.end
        return content.removesuffix(end), content.endswith(end)

    def _ask(self, question: str, ended: bool) -> str:
        if self._chat_turn is None:
            return question
        return self._chat_turn.render(question, ended=ended)
