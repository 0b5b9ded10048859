"""How many bytes each field of a partition holds, kept up to date put by put."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias  # Any: cells belong to the storage

Measure: TypeAlias = Callable[[Sequence[Any]], int]
"""A store's own: bytes of these cells, which are of one field and not none."""


class FieldBytes:
    """Bytes by field: a put costs an addition per field, only what goes is looked at cell by cell.

    Args:
        measure: None if the store cannot tell; then nothing is kept.

    Attributes:
        known: whether the store can tell.
    """

    def __init__(self, measure: Measure | None) -> None:
        self.known = measure is not None
        self._measure = measure
        self._held: dict[str, int] = {}

    def add(self, nbytes: Mapping[str, int]) -> None:
        """A put wrote this many bytes by field; of fields that it leaves out nothing is known."""
        if self.known:
            for name, count in nbytes.items():
                self._held[name] = self._held.get(name, 0) + count

    def remove(self, name: str, cells: Sequence[Any]) -> None:
        """Cells of a field are overwritten or cleared."""
        if self._measure is not None and cells and name in self._held:
            self._held[name] -= self._measure(cells)

    def forget(self) -> None:
        """No field has a value any more."""
        self._held.clear()

    def of(self, name: str, written: int) -> int | None:
        """Bytes of a field that ``written`` samples have; None if that is not known."""
        if not written:
            return 0 if self.known else None
        return self._held.get(name)

    @property
    def total(self) -> int | None:
        """Bytes of the fields of which they are known; None if the store cannot tell."""
        return sum(self._held.values()) if self.known else None
