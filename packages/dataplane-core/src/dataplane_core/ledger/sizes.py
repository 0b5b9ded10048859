"""`FieldBytes`: the bytes of each field of a partition, updated by every put."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias  # Any: cells belong to the storage

Measure: TypeAlias = Callable[[Sequence[Any]], int]
"""Function of a store that returns the bytes of one or more cells of a field."""


class FieldBytes:
    """Bytes by field. A put costs one addition per field; only removed cells are measured.

    Args:
        measure: returns the bytes of cells; None if the store does not know them.

    Attributes:
        is_measured: whether the store knows the bytes of cells.
    """

    def __init__(self, measure: Measure | None) -> None:
        self.is_measured = measure is not None
        self._measure = measure
        self._held: dict[str, int] = {}

    def add(self, nbytes: Mapping[str, int]) -> None:
        """Add the bytes that a put wrote, by field; a field that is never added is unknown."""
        if self.is_measured:
            for name, count in nbytes.items():
                self._held[name] = self._held.get(name, 0) + count

    def remove(self, name: str, cells: Sequence[Any]) -> None:
        """Subtract cells of a field that are overwritten or cleared."""
        if self._measure is not None and cells and name in self._held:
            self._held[name] -= self._measure(cells)

    def forget(self) -> None:
        """Forget the bytes of all fields."""
        self._held.clear()

    def of(self, name: str, written: int) -> int | None:
        """Return the bytes of a field that ``written`` samples have; None if unknown."""
        if not written:
            return 0 if self.is_measured else None
        return self._held.get(name)

    @property
    def total(self) -> int | None:
        """Bytes of the fields whose size is known; None if the store knows none."""
        return sum(self._held.values()) if self.is_measured else None
