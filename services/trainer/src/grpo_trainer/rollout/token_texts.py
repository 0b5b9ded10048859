"""Texts of the tokens of a sequence, which together are the text of the sequence.

A token alone decodes wrongly: bytes of a character that spans tokens decode as U+FFFD, and some
tokenizers drop a leading space. So each token is decoded with the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: transformers' tokenizers

_CUT = "\ufffd"
_MAX_BYTES = 4
"""Maximum bytes of a character in UTF-8, and so maximum tokens that it may span."""


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds.

    The last token of a character that spans tokens has its text; those before it have none.
    """

    def decode(start: int, end: int) -> str:
        text: str = tokenizer.decode(
            tokens[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    texts = [""] * len(tokens)
    # Texts before `done` are known. Those of the tokens from `window` to `done` are the context.
    window = done = 0
    for end in range(1, len(tokens) + 1):
        text = decode(window, end)
        is_cut = text.endswith(_CUT) and end - done < _MAX_BYTES and end < len(tokens)
        if not is_cut:
            texts[end - 1] = text[len(decode(window, done)) :]
            window, done = done, end
    return texts
