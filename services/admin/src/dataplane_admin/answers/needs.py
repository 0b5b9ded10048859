"""Which fields each task claims with, as its newest claims told.

Nothing declares it: a claim names its fields, and its event tells them. Events are read once, as
they arrive; the claims of a trace are looked up where nothing is known of a task yet.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from dataplane_admin.store import Store
from observability.records import Event

_MOST = 1_000
# Events looked through when the service starts, and at a time later on.
_PAGE = 1_000
_TRACES = 5


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
        events = self._store.events_since(self._read_to, _PAGE)
        traces: OrderedDict[str, None] = OrderedDict()
        for event in sorted(events, key=lambda event: -event.id):
            self._read_to = max(self._read_to, event.id)
            place = (event.partition, event.task)
            if event.name == "claimed" and event.trace_id and place not in self._known:
                traces.setdefault(event.trace_id)
        for trace_id in list(traces)[:_TRACES]:
            for told in self._store.trace_records(trace_id).events:
                self._learn(told)

    def _learn(self, event: Event) -> None:
        if event.name not in ("claimed", "waiting"):
            return
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
