"""`Ledger`: the control plane's records, their indexes, and the changes to store.

It applies no rules. All changes of records go through it, so the store misses none.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

from refit_mx.control.records import Lease, Shard, Version, VersionState, Worker

Record = Version | Worker | Shard | Lease
Key = tuple[str, ...]
Changes = dict[tuple[str, Key], Record | None]


class Ledger:
    """Versions, workers, shards and leases, with the times at which they may expire."""

    def __init__(self) -> None:
        self.versions: dict[str, Version] = {}
        self.workers: dict[str, Worker] = {}
        self.shards: dict[str, dict[Key, Shard]] = defaultdict(dict)
        """Shards by version, then by key."""
        self.leases: dict[str, dict[str, Lease]] = defaultdict(dict)
        """Leases by version, then by worker."""
        self.by_idempotency: dict[tuple[str, str], str] = {}
        self.ready: dict[str, dict[str, Version]] = defaultdict(dict)
        """READY versions by model."""
        self.shards_of: dict[str, set[Key]] = defaultdict(set)
        """Keys of shards by worker."""
        self.emptied: dict[str, None] = {}
        """RELEASING versions without shards and leases, ordered by when they became so."""
        self.order = 0
        self._timers: list[tuple[int, str, Key]] = []
        self._changes: Changes = {}

    def put(self, record: Record) -> None:
        """Add a record, or note that it changed."""
        self._changes[identity(record)] = record
        match record:
            case Version():
                self.versions[record.uid] = record
                self.by_idempotency[record.body.model_name, record.body.idempotency_key] = (
                    record.uid
                )
                self.order = max(self.order, record.order)
                ready = self.ready[record.body.model_name]
                if record.state is VersionState.READY:
                    ready[record.uid] = record
                else:
                    ready.pop(record.uid, None)
                self._note_emptied(record.uid)
            case Worker():
                self.workers[record.worker_id] = record
            case Shard():
                self.shards[record.version_id][record.key] = record
                self.shards_of[record.worker_id].add(record.key)
                self.emptied.pop(record.version_id, None)
            case Lease():
                self.leases[record.version_id][record.worker_id] = record
                self.emptied.pop(record.version_id, None)

    def drop(self, record: Record) -> None:
        """Remove a record; a version must have no shards or leases, a worker no shards."""
        self._changes[identity(record)] = None
        match record:
            case Version():
                del self.versions[record.uid]
                del self.by_idempotency[record.body.model_name, record.body.idempotency_key]
                self.ready[record.body.model_name].pop(record.uid, None)
                if not self.ready[record.body.model_name]:
                    del self.ready[record.body.model_name]
                self.shards.pop(record.uid, None)
                self.leases.pop(record.uid, None)
                self.emptied.pop(record.uid, None)
            case Worker():
                del self.workers[record.worker_id]
                self.shards_of.pop(record.worker_id, None)
            case Shard():
                del self.shards[record.version_id][record.key]
                self.shards_of[record.worker_id].discard(record.key)
                self._note_emptied(record.version_id)
            case Lease():
                del self.leases[record.version_id][record.worker_id]
                self._note_emptied(record.version_id)

    def take_changes(self) -> Changes:
        """Return the changes since the last call: kind and key to record, or to None if dropped.

        The records are not copies: encode them before the ledger changes again.
        """
        changes, self._changes = self._changes, {}
        return changes

    def set_timer(self, moment_ms: int, kind: str, *key: str) -> None:
        """Set a timer: `next_due` returns ``kind`` and ``key`` once ``moment_ms`` has come."""
        heapq.heappush(self._timers, (moment_ms, kind, key))

    def next_due(self, now_ms: int) -> tuple[str, Key] | None:
        """Return and remove the earliest timer that is due; None if none is.

        A timer may be out of date: the caller must check the record.
        """
        if self._timers and self._timers[0][0] <= now_ms:
            _, kind, key = heapq.heappop(self._timers)
            return kind, key
        return None

    def is_live(self, worker_id: str, now_ms: int) -> bool:
        """Return whether receivers may read from a worker."""
        worker = self.workers.get(worker_id)
        return worker is not None and worker.is_live(now_ms)

    def missing_slots(self, version: Version, now_ms: int) -> list[str]:
        """Return the expected slots of a version that have no shard of a live worker."""
        covered = {
            shard.source_slot_id
            for shard in self.shards.get(version.uid, {}).values()
            if self.is_live(shard.worker_id, now_ms)
        }
        return [slot for slot in version.body.expected_source_slots if slot not in covered]

    def _note_emptied(self, uid: str) -> None:
        version = self.versions.get(uid)
        if (
            version is not None
            and version.state is VersionState.RELEASING
            and not self.shards.get(uid)
            and not self.leases.get(uid)
        ):
            self.emptied.setdefault(uid)


def identity(record: Record) -> tuple[str, Key]:
    """Return the kind and key under which a record is stored."""
    match record:
        case Version():
            return "version", (record.uid,)
        case Worker():
            return "worker", (record.worker_id,)
        case Shard():
            return "shard", record.key
        case Lease():
            return "lease", (record.version_id, record.worker_id)


def list_names(names: list[str]) -> str:
    """Return the first names as text for a message."""
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
