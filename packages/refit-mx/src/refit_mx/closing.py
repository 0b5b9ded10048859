"""`Closeable`: base class of objects that a ``with`` block closes."""

from __future__ import annotations

from typing import Self


class Closeable:
    """An object whose `close` is called at the end of a ``with`` block."""

    def close(self) -> None:
        """Release what the object holds. May be called again."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
