"""`OrderedKeys`: a set of keys ordered by position, from which the first can be taken."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Any, Generic, TypeVar  # Any: entries are of two kinds, never mixed

from dataplane_core.ledger.parted_dict import PartedDict

K = TypeVar("K", int, str)

_MAX_RUN = 1024
"""Maximum entries of a sorted run, so that moving or freeing one takes microseconds."""
_KEY_BITS = 64
_KEY_MASK = (1 << _KEY_BITS) - 1


class OrderedKeys(Generic[K]):
    """Keys with a position each, in sorted runs of up to 1,024 entries.

    An entry is ``(position, key)``. Every run has a bound: no entry of the run is larger, and every
    entry of the next run is larger::

        runs     [(0, 7), (2, 3)]   [(4, 9), (5, 1), (5, 2)]   [(8, 4)]
        bounds            (3, 5)                     (5, 2)     (8, 4)

    One bisection of the bounds and one of a run find an entry. A bound remains when its entry is
    removed, here (3, 5). An empty run is removed, and a run that is too large is split in the
    middle.

    If position and key are integers, an entry is the integer ``position << 64 | key``, which
    compares three times as fast as a tuple.
    """

    __slots__ = ("_bounds", "_entries", "_runs")

    def __init__(self) -> None:
        self._entries: PartedDict[K, Any] = PartedDict()
        self._runs: list[list[Any]] = []
        self._bounds: list[Any] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def put(self, key: K, position: float | tuple[float, int]) -> None:
        """Add a key that is not in the set."""
        entry: Any = position, key
        if isinstance(key, int) and isinstance(position, int):
            entry = position << _KEY_BITS | key
        self._entries[key] = entry
        bounds, runs = self._bounds, self._runs
        if not bounds or entry > bounds[-1]:
            if not bounds or len(runs[-1]) >= _MAX_RUN:
                runs.append([])
                bounds.append(entry)
            runs[-1].append(entry)
            bounds[-1] = entry
            return
        at = bisect_left(bounds, entry)
        run = runs[at]
        insort(run, entry)
        if len(run) > _MAX_RUN:
            half = len(run) // 2
            runs.insert(at, run[:half])
            bounds.insert(at, run[half - 1])
            del run[:half]

    def discard(self, keys: Iterable[K]) -> None:
        """Remove the keys; keys that are not in the set are ignored."""
        for key in keys if self._entries else ():
            entry = self._entries.pop(key)
            if entry is not None:
                at = bisect_left(self._bounds, entry)
                run = self._runs[at]
                if len(run) > 1:
                    del run[bisect_left(run, entry)]
                else:
                    del self._runs[at], self._bounds[at]

    def take(self, count: int) -> list[K]:
        """Remove and return the first ``count`` keys, by position."""
        taken: list[K] = []
        while self._runs and len(taken) < count:
            run = self._runs[0]
            first = run[: count - len(taken)]
            if len(first) < len(run):
                del run[: len(first)]
            else:
                del self._runs[0], self._bounds[0]
            keys: Iterable[Any] = (
                each & _KEY_MASK if isinstance(each, int) else each[1] for each in first
            )
            taken += keys
        for key in taken:
            del self._entries[key]
        return taken

    def free_entries(self, count: int) -> bool:
        """Free about ``count`` keys of an unused set; return whether it is empty."""
        for _ in range(-(-count // _MAX_RUN)):
            if self._runs:
                del self._runs[-1], self._bounds[-1]
        return self._entries.free_entries(count) and not self._runs
