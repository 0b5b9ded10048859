"""`Expiry`: the rules that apply when time passes and when workers or leases end.

A READY version that loses the last live shard of a slot becomes RELEASING for good: a later
receiver could read only part of it, and a restarted worker may publish other bytes.
"""

from __future__ import annotations

from collections.abc import Iterable

from refit_mx.control.ledger import Key, Ledger, Record, identity, list_names
from refit_mx.control.limits import Limits
from refit_mx.control.records import Lease, Shard, Version, VersionState, Worker


class Expiry:
    """The rules that apply without a call."""

    def __init__(self, ledger: Ledger, limits: Limits) -> None:
        self._ledger = ledger
        self._limits = limits
        self._forget_after_ms = int(limits.forget_after_s * 1000)
        self._abandon_after_ms = int(limits.abandon_after_s * 1000)
        self._extended: dict[tuple[str, Key], int] = {}
        """Expiry of each record whose grace period the last pause extended."""

    def load(self, records: Iterable[Record], *, now_ms: int, grace_s: float) -> None:
        """Load the records of a store.

        No worker could renew while the server was down. So each worker and lease that had not
        ended lasts at least ``grace_s`` from now, or its time to live if that is shorter.
        """
        ledger = self._ledger
        for record in sorted(records, key=_release_time_ms):
            ended = isinstance(record, Worker) and (record.stale or record.expired)
            if isinstance(record, Worker | Lease) and not ended:
                granted = now_ms + min(record.ttl_ms, int(grace_s * 1000))
                # A clock that was set back must not extend a record beyond its time to live.
                stored = min(record.expires_at_ms, now_ms + record.ttl_ms)
                record.expires_at_ms = max(granted, stored)
            ledger.put(record)
        for worker in ledger.workers.values():
            ledger.set_timer(worker.expires_at_ms, "worker", worker.worker_id)
        for version in list(ledger.versions.values()):
            for lease in ledger.leases.get(version.uid, {}).values():
                ledger.set_timer(lease.expires_at_ms, "lease", version.uid, lease.worker_id)
            self.start_limit(version)
            if version.state is VersionState.RELEASING:
                ledger.set_timer(
                    version.released_at_ms + self._forget_after_ms, "version", version.uid
                )
            self.live_shards_changed(version, now_ms)
        self.expire_until(now_ms)

    def extend_grace(self, since_ms: int, now_ms: int, *, grace_s: float) -> None:
        """Extend live records by the length of a server pause: no worker could renew meanwhile.

        Each record then lasts at least ``grace_s``, as after a restart, since a client may have to
        reconnect. A record that was not renewed since the last pause does not get this minimum
        again: repeated pauses must not keep a dead worker alive.
        """
        self.expire_until(since_ms)
        ledger = self._ledger
        records: list[Worker | Lease] = list(ledger.workers.values())
        for held in ledger.leases.values():
            records += held.values()
        extended: dict[tuple[str, Key], int] = {}
        for record in records:
            if isinstance(record, Worker) and (record.stale or record.expired):
                continue
            kind, key = identity(record)
            silent = self._extended.get((kind, key)) == record.expires_at_ms
            record.expires_at_ms += now_ms - since_ms
            if not silent:
                granted = now_ms + min(record.ttl_ms, int(grace_s * 1000))
                record.expires_at_ms = max(granted, record.expires_at_ms)
            extended[kind, key] = record.expires_at_ms
            ledger.put(record)
            ledger.set_timer(record.expires_at_ms, kind, *key)
        self._extended = extended

    def expire_until(self, now_ms: int) -> None:
        """Expire the records that are due by ``now_ms``."""
        ledger = self._ledger
        while (due := ledger.next_due(now_ms)) is not None:
            kind, key = due
            if kind == "worker":
                worker = ledger.workers.get(key[0])
                if worker is not None and not worker.is_live(now_ms):
                    self.worker_ended(worker, now_ms)
            elif kind == "lease":
                lease = ledger.leases.get(key[0], {}).get(key[1])
                if lease is not None and lease.expires_at_ms <= now_ms:
                    self.end_lease(lease, now_ms)
            elif kind == "forget":
                self._forget_worker(key[0], now_ms)
            elif key[0] in ledger.versions:
                version = ledger.versions[key[0]]
                self._abandon(version, now_ms)
                self._forget_old(version, now_ms)

    def start_limit(self, version: Version) -> None:
        """Start the time limit of a STAGING version."""
        if version.state is VersionState.STAGING:
            self._ledger.set_timer(
                version.created_at_ms + self._abandon_after_ms, "version", version.uid
            )

    def live_shards_changed(self, version: Version, now_ms: int) -> None:
        """Make a version READY, release it or clean it up, after its live shards changed."""
        slots = version.body.expected_source_slots
        if version.state is VersionState.RELEASING:
            self._drop_dead_shards(version, now_ms)
        # With fewer shards than slots it is not complete: do not search all slots for each shard.
        elif version.state is VersionState.READY or len(
            self._ledger.shards.get(version.uid, {})
        ) >= len(slots):
            missing = self._ledger.missing_slots(version, now_ms)
            if version.state is VersionState.READY and missing:
                self.release(
                    version, f"slots lost their last live shard: {list_names(missing)}", now_ms
                )
            elif version.state is VersionState.STAGING and slots and not missing:
                self.make_ready(version, now_ms)
        self._abandon(version, now_ms)

    def make_ready(self, version: Version, now_ms: int) -> None:
        """Make a complete version READY."""
        version.state = VersionState.READY
        self._ledger.put(version)
        self._retain(version.body.model_name, now_ms)

    def release(self, version: Version, reason: str, now_ms: int) -> None:
        """Make a version RELEASING; its leases stay until they end."""
        if version.state is VersionState.RELEASING:
            return
        version.state = VersionState.RELEASING
        version.released_at_ms = now_ms
        version.reason = reason
        self._ledger.put(version)
        self._ledger.set_timer(now_ms + self._forget_after_ms, "version", version.uid)
        self._drop_dead_shards(version, now_ms)
        self._forget_excess()

    def worker_ended(self, worker: Worker, now_ms: int) -> None:
        """Apply the end of a worker that expired or is STALE."""
        if not worker.stale and not worker.expired:
            # Stored, so that the worker gets no grace period after a restart.
            worker.expired = True
            self._ledger.put(worker)
        self._ledger.set_timer(
            worker.expires_at_ms + self._forget_after_ms, "forget", worker.worker_id
        )
        for uid in {key[0] for key in self._ledger.shards_of.get(worker.worker_id, ())}:
            self.live_shards_changed(self._ledger.versions[uid], now_ms)

    def worker_registered(self, worker: Worker, now_ms: int, *, was_expired: bool) -> None:
        """Apply a registration; the shards of a worker that had expired count again."""
        self._ledger.set_timer(worker.expires_at_ms, "worker", worker.worker_id)
        if was_expired:
            for uid in {key[0] for key in self._ledger.shards_of.get(worker.worker_id, ())}:
                self.live_shards_changed(self._ledger.versions[uid], now_ms)

    def end_lease(self, lease: Lease, now_ms: int) -> None:
        """End a lease that expired or was released."""
        self._ledger.drop(lease)
        version = self._ledger.versions[lease.version_id]
        self._drop_dead_shards(version, now_ms)
        self._retain(version.body.model_name, now_ms)
        self._forget_old(version, now_ms)

    def drop_shard(self, shard: Shard, now_ms: int) -> None:
        """Drop a shard that no worker serves any more."""
        self._ledger.drop(shard)
        self._forget_old(self._ledger.versions[shard.version_id], now_ms)
        self._forget_worker(shard.worker_id, now_ms)

    def _drop_dead_shards(self, version: Version, now_ms: int) -> None:
        # Only the server can delete the shard of a dead worker. Under a lease it stays: a worker
        # that was only disconnected must not reuse memory that is still being read.
        ledger = self._ledger
        if version.state is VersionState.RELEASING and not ledger.leases.get(version.uid):
            for shard in list(ledger.shards.get(version.uid, {}).values()):
                if not ledger.is_live(shard.worker_id, now_ms):
                    self.drop_shard(shard, now_ms)

    def _retain(self, model_name: str, now_ms: int) -> None:
        if not self._limits.retention:
            return
        ready = sorted(
            (
                version
                for version in self._ledger.ready.get(model_name, {}).values()
                if version.body.object_storage is None
            ),
            key=lambda version: version.order,
        )
        for version in ready[: -self._limits.retention]:
            if not self._ledger.leases.get(version.uid):
                self.release(version, f"{self._limits.retention} newer versions are READY", now_ms)

    def _abandon(self, version: Version, now_ms: int) -> None:
        # Checked both when the time limit passes and when a worker is lost: whichever comes last
        # abandons the version, also if the server restarts in between.
        if (
            version.state is VersionState.STAGING
            and version.created_at_ms + self._abandon_after_ms <= now_ms
            and not any(
                self._ledger.is_live(shard.worker_id, now_ms)
                for shard in self._ledger.shards.get(version.uid, {}).values()
            )
        ):
            self.release(version, "it was abandoned while STAGING", now_ms)

    def _forget_old(self, version: Version, now_ms: int) -> None:
        if (
            version.uid in self._ledger.emptied
            and version.released_at_ms + self._forget_after_ms <= now_ms
        ):
            self._ledger.drop(version)
        self._forget_excess()

    def _forget_excess(self) -> None:
        while len(self._ledger.emptied) > self._limits.max_released:
            self._ledger.drop(self._ledger.versions[next(iter(self._ledger.emptied))])

    def _forget_worker(self, worker_id: str, now_ms: int) -> None:
        worker = self._ledger.workers.get(worker_id)
        if (
            worker is not None
            and worker.expires_at_ms + self._forget_after_ms <= now_ms
            and not self._ledger.shards_of.get(worker_id)
        ):
            self._ledger.drop(worker)


def _release_time_ms(record: Record) -> int:
    # Released versions come last, in the order in which they are forgotten: their shards and leases
    # must be in the ledger before them.
    return record.released_at_ms if isinstance(record, Version) else 0
