"""Which tasks are known to claim, by what they told.

The polls of the data plane ask it of every task with old samples, again and again, and the answer
is mostly that the task never claimed: which the store can only say from all that its partition
told.
"""

from __future__ import annotations

from collections import OrderedDict

from dataplane_admin.store import Store
from dataplane_admin.store.texts import storable

_MOST = 10_000
# Events looked through since the last time; of more the partitions are asked anew.
_PAGE = 20_000


class Claimants:
    """Tasks that claimed, by partition, bounded in number. For one thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[str, set[str]] = OrderedDict()
        self._read_to = 0
        self._revision = -1

    def has_claimed(self, partition: str, task: str) -> bool:
        """Whether an event tells that a task of a partition has claimed, whatever the run.

        Raises:
            StoreUnavailable: the store cannot be asked.
        """
        self._refresh()
        partition = storable(partition)
        tasks = self._known.get(partition)
        if tasks is None:
            tasks = self._known[partition] = self._store.claimants(partition)
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
        return storable(task) in tasks

    def _refresh(self) -> None:
        revision = self._store.revision
        if revision == self._revision:
            return
        claims, read_to, complete = self._store.newest_claimants(self._read_to, _PAGE)
        if not complete:
            self._known.clear()
        for partition, task in claims:
            if partition in self._known:
                self._known[partition].add(task)
        self._read_to, self._revision = read_to, revision
