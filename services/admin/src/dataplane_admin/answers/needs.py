"""Which fields each task claims with, as its newest claims told.

Nothing declares it: a claim names its fields, and its event tells them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from dataplane_admin.store import Store
from observability.records import Event

_MOST = 1_000
# Events looked through at a time, when the service starts for example.
_PAGE = 20_000


class Needs:
    """What tasks need, bounded in number. Safe to be asked from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: OrderedDict[tuple[str, str], tuple[str, ...]] = OrderedDict()
        self._read_to = 0
        self._revision = -1
        self._lock = threading.Lock()

    def of(self, partition: str, task: str) -> tuple[str, ...] | None:
        """The fields; None if no claim told."""
        return self._known.get((partition, task))

    def refresh(self) -> None:
        """Read the events that came since the last time; at once if another thread is doing so."""
        if self._revision == self._store.revision or not self._lock.acquire(blocking=False):
            return
        try:
            self._revision = self._store.revision
            self._read()
        finally:
            self._lock.release()

    def _read(self) -> None:
        events, self._read_to = self._store.newest_claims(self._read_to, _PAGE)
        for event in events:
            self._learn(event)

    def _learn(self, event: Event) -> None:
        fields = event.attributes.get("dataplane.fields")
        partition = event.attributes.get("dataplane.partition")
        task = event.attributes.get("dataplane.task")
        if not (isinstance(partition, str) and isinstance(task, str) and task):
            return
        if isinstance(fields, list | tuple):
            self._known[partition, task] = tuple(one for one in fields if isinstance(one, str))
            self._known.move_to_end((partition, task))
            while len(self._known) > _MOST:
                self._known.popitem(last=False)
