"""The next question of a conversation, as the model's chat template has it.

A template renders whole conversations, and a rendered response need not be the tokens that were
generated (templates drop reasoning, for example). So what is taken from it is only the text that
stands between a response and the one after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: transformers' tokenizers

from grpo_trainer.sections import PretrainedModel, RandomModel

if TYPE_CHECKING:  # the environment's process, which renders turns, loads no tokenizer
    import torch

_ANSWER, _QUESTION = "an-answer", "the-next-question"


@dataclass(frozen=True)
class ChatTurn:
    """What a template puts around a question that follows a response.

    Attributes:
        end: text of the end token, which a response that came to its end has already.
        before: what stands between that and the question.
        after: what follows the question, up to the next response.
    """

    end: str
    before: str
    after: str

    def render(self, question: str, *, ended: bool) -> str:
        """The turn.

        Args:
            question: what is asked.
            ended: whether the response has its end token; one that was cut gets it here.
        """
        return ("" if ended else self.end) + self.before + question + self.after


def chat_turn(tokenizer: Any, model: RandomModel | PretrainedModel) -> ChatTurn | str | None:
    """What the tokenizer's chat template puts around a follow-up.

    Returns:
        None if ``model`` asks for no template. What the template does, as a text that follows its
        name, if it raises, renders no second question, or does not end a response with the
        tokenizer's end token: generation ends at no other, so what is generated would not be a
        response of the template.
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
    except Exception as error:  # noqa: BLE001  # a template is a program, and raises what it likes
        told = " ".join(str(error).split())
        return f"cannot render a second question: {type(error).__name__}: {told}"
    between, asked, after = rendered.rpartition(_ANSWER)[2].partition(_QUESTION)
    space, ended, before = between.partition(tokenizer.eos_token)
    if not asked:
        return "renders no second question after a response"
    if not ended or space.strip():
        return f"does not end a response with {tokenizer.eos_token!r}, the tokenizer's end token"
    return ChatTurn(tokenizer.eos_token, before, after)


class EndKeepingTokenizer:
    """A tokenizer whose decoded responses keep their end token.

    For the rollout actor: an environment is told the text of a response and nothing else, and has
    to see whether it came to its end.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.pad_token_id: int = tokenizer.pad_token_id

    def __call__(self, text: str, *, return_tensors: str, add_special_tokens: bool) -> Any:
        """As the tokenizer."""
        return self._tokenizer(
            text, return_tensors=return_tensors, add_special_tokens=add_special_tokens
        )

    def batch_decode(
        self, sequences: Sequence[torch.Tensor], *, skip_special_tokens: bool
    ) -> list[str]:
        """The text of each of ``sequences`` (int64, 1-D), and its end token if it ends with it."""
        texts = self._tokenizer.batch_decode(sequences, skip_special_tokens=skip_special_tokens)
        end = self._tokenizer.eos_token if skip_special_tokens else ""
        return [
            text + end if self._tokenizer.eos_token_id in ids[-1:].tolist() else text
            for text, ids in zip(texts, sequences, strict=True)
        ]
