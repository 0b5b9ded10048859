"""Which tasks are known to claim, by what they told.

The polls of the data plane ask it of every task with old samples, again and again, and the answer
is mostly that the task never claimed: which the store can only say from all that its partition
told.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataplane_admin.answers.newest_claims import Bounded, NewestClaims
from dataplane_admin.store import ClaimRow, Store
from dataplane_admin.store.texts import storable

_MOST = 10_000


class Claimants:
    """Tasks that claimed, by partition, bounded in number. For one thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: Bounded[str, set[str]] = Bounded(_MOST)
        self._newest = NewestClaims(store, self._learn)

    def has_claimed(self, partition: str, task: str) -> bool:
        """Whether an event tells that a task of a partition has claimed, whatever the run.

        Raises:
            StoreUnavailable: the store cannot be asked.
        """
        self._newest.refresh()
        partition = storable(partition)
        tasks = self._known.get(partition)
        if tasks is None:
            tasks = self._known[partition] = self._store.claimants(partition)
        return storable(task) in tasks

    def _learn(self, claims: Sequence[ClaimRow], complete: bool) -> None:
        if not complete:
            # What was passed over is asked for anew.
            self._known.clear()
        for one in claims:
            if one.claimed and one.partition in self._known:
                self._known[one.partition].add(one.task)
