"""Search for stop strings in growing responses, at a constant cost per token.

Only a window of tokens at the end of the response is decoded. The window begins at the start of a
character: a tokenizer that falls back to bytes decodes a run of bytes as U+FFFD if the first byte
is inside a character. So the window, and the cost per token, grow only during a run of tokens that
decode as U+FFFD. Some tokenizers drop a leading space, so the window has `_MARGIN` characters more
than a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: transformers' tokenizers

_MARGIN = 8
_CUT = "\ufffd"
_MAX_BYTES = 4
"""Maximum bytes of a character in UTF-8, and so maximum tokens that it may span."""


class StopSearch:
    """Search for the stop strings of one response.

    Args:
        tokenizer: decodes the tokens, special ones included.
        stops: non-empty strings.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._needed = max(map(len, stops)) + _MARGIN
        self._limit = 4 * self._needed
        self._window: list[int] = []

    def add(self, token: int) -> bool:
        """Append a token, and return whether the text now contains a stop string."""
        self._window.append(token)
        text = self._decode(self._window)
        # Search the entire window, because a token may extend beyond a stop string. The tokens
        # before this one completed no stop string.
        if any(stop in text for stop in self._stops):
            return True
        # An incomplete character may make the entire window decode as U+FFFD.
        if len(text) > self._limit and not text.endswith(_CUT):
            rest = self._rest_of(text)
            # A larger limit makes retries rare, so the cost per token stays bounded.
            self._limit = 2 * len(text) if rest is None else 4 * self._needed
            self._window = rest or self._window
        return False

    def _rest_of(self, text: str) -> list[int] | None:
        """Return about half of the window, if it decodes to the end of ``text``."""
        half = len(self._window) // 2
        for start in range(half, min(half + _MAX_BYTES, len(self._window))):
            rest = self._window[start:]
            tail = self._decode(rest)
            if len(tail) >= self._needed and text.endswith(tail) and not tail.startswith(_CUT):
                return rest
        return None

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text
