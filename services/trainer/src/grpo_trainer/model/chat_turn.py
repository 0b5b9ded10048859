"""Follow-up questions of a conversation, rendered as the model's chat template does.

A template renders entire conversations and may change a response: some templates drop the
reasoning, for example. So only the text between two responses is taken from the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: transformers' tokenizers

from grpo_trainer.config.sections import PretrainedModel, RandomModel

if TYPE_CHECKING:  # the environment's process, which renders turns, loads no tokenizer
    import torch

_ANSWER, _QUESTION = "an-answer", "the-next-question"


@dataclass(frozen=True)
class ChatTurn:
    """Text that a template puts around a question that follows a response.

    Attributes:
        end: text of the end token; a complete response ends with it.
        before: text between the end token and the question.
        after: text from the question to the next response.
    """

    end: str
    before: str
    after: str

    def render(self, question: str, *, ended: bool) -> str:
        """Return the text of the turn.

        Args:
            question: text of the question.
            ended: whether the response has its end token; a truncated one gets it here.
        """
        return ("" if ended else self.end) + self.before + question + self.after


def chat_turn(tokenizer: Any, model: RandomModel | PretrainedModel) -> ChatTurn | str | None:
    """Return the text that the tokenizer's chat template puts around a follow-up.

    Returns:
        None if ``model`` uses no template. The end of an error message if the template raises,
        renders no second question, or does not end a response with the tokenizer's end token.
        Generation stops only at that token, so a generated response would differ from the
        template's.
    """
    if not isinstance(model, PretrainedModel) or not model.use_chat_template:
        return None
    messages = [
        {"role": "user", "content": "a-question"},
        {"role": "assistant", "content": _ANSWER},
        {"role": "user", "content": _QUESTION},
    ]
    try:
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
    except Exception as error:  # noqa: BLE001  # a template is a program that may raise anything
        message = " ".join(str(error).split())
        return f"cannot render a second question: {type(error).__name__}: {message}"
    between, question, after = rendered.rpartition(_ANSWER)[2].partition(_QUESTION)
    space, ended, before = between.partition(tokenizer.eos_token)
    if not question:
        return "renders no second question after a response"
    if not ended or space.strip():
        return f"does not end a response with {tokenizer.eos_token!r}, the tokenizer's end token"
    return ChatTurn(tokenizer.eos_token, before, after)


class EndKeepingTokenizer:
    """Tokenizer whose decoded responses keep their end token.

    The rollout actor passes an environment only the text of a response. The end token shows the
    environment whether the response is complete.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.pad_token_id: int = tokenizer.pad_token_id

    def __call__(self, text: str, *, return_tensors: str, add_special_tokens: bool) -> Any:
        """Tokenize ``text`` as the wrapped tokenizer does."""
        return self._tokenizer(
            text, return_tensors=return_tensors, add_special_tokens=add_special_tokens
        )

    def batch_decode(
        self, sequences: Sequence[torch.Tensor], *, skip_special_tokens: bool
    ) -> list[str]:
        """Return the text of each of ``sequences`` (int64, 1-D), with its end token if present."""
        texts = self._tokenizer.batch_decode(sequences, skip_special_tokens=skip_special_tokens)
        end = self._tokenizer.eos_token if skip_special_tokens else ""
        return [
            text + end if self._tokenizer.eos_token_id in ids[-1:].tolist() else text
            for text, ids in zip(texts, sequences, strict=True)
        ]
