"""Prompts: JSONL records, and the endless seeded stream of batches made from them.

The stream is a function of the seed, a position and the data set. So a resumed run continues with
exactly the prompts that the interrupted run would have taken, and refuses another data set.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from grpo_trainer.errors import ConfigurationError

SHIPPED = Path(__file__).parents[1] / "prompts"

Encode = Callable[[str], list[int]]
"""Function from text to token ids; raises ValueError if the model lacks tokens for a text."""


def _stripped(text: str) -> str:
    if not text.strip():
        raise ValueError("only white space")
    return text.strip()


# A response is compared without the white space around it.
Answer = Annotated[str, AfterValidator(_stripped)]


class FollowUp(BaseModel):
    """Question that the environment asks after a response."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompt: str = Field(min_length=1)
    answer: Answer


class PromptRecord(BaseModel):
    """Line of the data set: a question, its answer, follow-ups with answers, and tags."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    prompt: str = Field(min_length=1)
    answer: Answer
    follow_ups: list[FollowUp] = []
    tags: dict[str, str] = {}
    """Tags to filter the samples by, for example the source of the question."""

    @property
    def questions(self) -> list[str]:
        """All questions, in order."""
        return [self.prompt, *(follow_up.prompt for follow_up in self.follow_ups)]

    @property
    def answers(self) -> list[str]:
        """All answers, in order."""
        return [self.answer, *(follow_up.answer for follow_up in self.follow_ups)]


class Prompt(BaseModel):
    """Record with the tokens of its prompt."""

    model_config = ConfigDict(frozen=True)
    record: PromptRecord
    token_ids: list[int]


def load_prompts(path: Path, encode: Encode, *, max_length: int) -> list[Prompt]:
    """Read and tokenize a data set.

    Args:
        path: JSONL, one `PromptRecord` a line; empty lines are skipped.
        encode: text of a prompt to token ids.
        max_length: maximum tokens of a conversation; a prompt must leave tokens for a response.

    Raises:
        ConfigurationError: naming the file and the line that is malformed or too long, or the file
            if it cannot be read or holds no prompt.
    """
    try:
        # Not splitlines: it splits at U+2028 and others, which JSON strings may contain.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"data set {path}: cannot be read: {error}") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = PromptRecord.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            location = ".".join(str(part) for part in first["loc"])
            raise ConfigurationError(
                f"data set {path}, line {number}: "
                f"{location + ': ' if location else ''}{first['msg']}"
            ) from None
        try:
            token_ids = encode(record.prompt)
            for follow_up in record.follow_ups:
                encode(follow_up.prompt)  # refuse it here, not in the middle of a run
        except ValueError as error:
            raise ConfigurationError(f"data set {path}, line {number}: {error}") from None
        if not 0 < len(token_ids) < max_length:
            raise ConfigurationError(
                f"data set {path}, line {number}: the prompt has {len(token_ids)} tokens; expected "
                f"1 to {max_length - 1} (policy.max_total_sequence_length - 1)"
            )
        prompts.append(Prompt(record=record, token_ids=token_ids))
    if not prompts:
        raise ConfigurationError(f"data set {path}: holds no prompt")
    return prompts


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Return a digest of the questions and answers in their order.

    Token ids are left out: a chat template may contain the current date.
    """
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        content = [prompt.record.questions, prompt.record.answers]
        digest.update(json.dumps(content).encode() + b"\n")
    return digest.hexdigest()


class PromptStream:
    """Endless stream of prompts, in a new seeded order in each epoch.

    Args:
        prompts: at least one.
        seed: seed of every order.
        shuffle: False keeps the order of the file.
        position: number of prompts already taken, by the run that is resumed.
    """

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int, shuffle: bool, position: int = 0
    ) -> None:
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self.position = position
        # A shuffle of a large data set is slow, and `at` uses the orders of one or two epochs.
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def take(self, count: int) -> list[Prompt]:
        """Take the next ``count`` prompts."""
        taken: list[Prompt] = []
        while len(taken) < count:
            epoch, place = divmod(self.position, len(self._prompts))
            rest = self._order(epoch)[place : place + count - len(taken)]
            taken.extend(self._prompts[i] for i in rest)
            self.position += len(rest)
        return taken

    def at(self, position: int) -> Prompt:
        """Return the prompt at a position of the stream."""
        epoch, place = divmod(position, len(self._prompts))
        return self._prompts[self._order(epoch)[place]]

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(len(self._prompts)))
        if self._shuffle:
            random.Random(f"{self._seed}:{epoch}").shuffle(order)  # noqa: S311  # not for secrets
        return order
