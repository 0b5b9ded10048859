"""Fields that tasks need, and tasks that claim: known from claims, not from declarations.

`Needs` has the fields that each task claims; `Claimants` has the tasks that have claimed at all.
Both read only new claims. Names are stored names: each lookup passes its name through `storable`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from dataplane_admin.store import ClaimRow, Store
from dataplane_admin.store.texts import storable

# Events read at a time. If there are more, for example at start, only the newest are read.
_PAGE = 20_000
_MAX_TASKS = 1_000
_MAX_PARTITIONS = 10_000

_Name = TypeVar("_Name")
_Known = TypeVar("_Known")


class Needs:
    """Fields that tasks need, for a bounded number of tasks. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._known: _Bounded[tuple[str, str], tuple[str, ...]] = _Bounded(_MAX_TASKS)
        self._newest = _NewestClaims(store, self._learn)

    def of(self, partition: str, task: str) -> tuple[str, ...] | None:
        """Return the fields of a task, None if no claim named any."""
        return self._known.get((storable(partition), storable(task)))

    def refresh(self) -> None:
        """Read new claims; return at once if another thread reads them."""
        self._newest.refresh()

    def _learn(self, claims: Sequence[ClaimRow], complete: bool) -> None:
        for claim in claims:
            if claim.fields is not None:
                self._known[claim.partition, claim.task] = claim.fields


class Claimants:
    """Tasks that have claimed, by partition, bounded in number. For one thread.

    Each poll of the data plane looks up every task with old samples. Most of them never claimed,
    and the store would have to read all events of the partition to find that out.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: _Bounded[str, set[str]] = _Bounded(_MAX_PARTITIONS)
        self._newest = _NewestClaims(store, self._learn)

    def has_claimed(self, partition: str, task: str) -> bool:
        """Return whether a task of a partition has claimed in any run.

        Raises StoreUnavailable if the store cannot be read.
        """
        self._newest.refresh()
        partition = storable(partition)
        tasks = self._known.get(partition)
        if tasks is None:
            tasks = self._known[partition] = self._store.claimants(partition)
        return storable(task) in tasks

    def _learn(self, claims: Sequence[ClaimRow], complete: bool) -> None:
        if not complete:
            # Some claims were skipped, so partitions are read from the store again.
            self._known.clear()
        for claim in claims:
            if claim.claimed and claim.partition in self._known:
                self._known[claim.partition].add(claim.task)


class _NewestClaims:
    """Reader that passes new claims to ``learn``, with a flag that is True if none was skipped.

    Only one thread reads at a time.
    """

    def __init__(self, store: Store, learn: Callable[[Sequence[ClaimRow], bool], None]) -> None:
        self._store = store
        self._learn = learn
        self._read_to = 0
        self._revision = -1
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Read the claims since the last call.

        Raises StoreUnavailable if the store cannot be read; the next call reads it again.
        """
        revision = self._store.revision
        if revision == self._revision or not self._lock.acquire(blocking=False):
            return
        try:
            claims, read_to, complete = self._store.newest_claims(self._read_to, _PAGE)
            self._learn(claims, complete)
            self._read_to, self._revision = read_to, revision
        finally:
            self._lock.release()


class _Bounded(OrderedDict[_Name, _Known]):
    """Mapping of at most ``max_size`` names that drops the oldest."""

    def __init__(self, max_size: int) -> None:
        super().__init__()
        self._max_size = max_size

    def __setitem__(self, name: _Name, known: _Known) -> None:
        """Set a name as the newest."""
        super().__setitem__(name, known)
        self.move_to_end(name)
        while len(self) > self._max_size:
            self.popitem(last=False)
