"""`PartedDict`: a mapping that grows without long pauses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, overload  # Any: keys of any type can be looked up

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")

_PART_MASK = 4095
"""Mask of a part's number: one less than a power of two."""
_BITS = 7
"""Low bits of a hash that do not select the part, so that a range of integers uses few parts."""


class PartedDict(Mapping[K, V]):
    """A dict in up to 4,096 small parts. Items are unordered.

    A dict moves all its items whenever it grows, and frees them all when it is deleted, which takes
    tens of milliseconds for a million items.
    """

    __slots__ = ("_length", "_parts")

    def __init__(self) -> None:
        self._parts: dict[int, dict[K, V]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, key: Any) -> bool:
        part = self._parts.get(hash(key) >> _BITS & _PART_MASK)
        return part is not None and key in part

    def __getitem__(self, key: K) -> V:
        return self._parts[hash(key) >> _BITS & _PART_MASK][key]

    def __setitem__(self, key: K, value: V) -> None:
        number = hash(key) >> _BITS & _PART_MASK
        part = self._parts.get(number)
        if part is None:
            part = self._parts[number] = {}
        before = len(part)
        part[key] = value
        self._length += len(part) - before

    def __delitem__(self, key: K) -> None:
        number = hash(key) >> _BITS & _PART_MASK
        part = self._parts[number]
        del part[key]
        self._length -= 1
        if not part:
            del self._parts[number]

    def __iter__(self) -> Iterator[K]:
        for part in self._parts.values():
            yield from part

    @overload
    def get(self, key: K) -> V | None: ...
    @overload
    def get(self, key: K, default: D) -> V | D: ...
    def get(self, key: K, default: Any = None) -> Any:
        """Return the value of ``key``, or ``default`` if there is none."""
        part = self._parts.get(hash(key) >> _BITS & _PART_MASK)
        return default if part is None else part.get(key, default)

    def pop(self, key: K) -> V | None:
        """Remove ``key`` and return its value; None if it is not there."""
        number = hash(key) >> _BITS & _PART_MASK
        part = self._parts.get(number)
        if part is None or key not in part:
            return None
        value = part.pop(key)
        self._length -= 1
        if not part:
            del self._parts[number]
        return value

    def free_entries(self, count: int) -> bool:
        """Free about ``count`` items of an unused mapping; return whether it is empty."""
        while self._parts and count > 0:
            freed = len(self._parts.popitem()[1])
            self._length -= freed
            count -= freed
        return not self._parts
