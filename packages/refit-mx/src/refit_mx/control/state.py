"""The rules of the control plane: a state machine without I/O, threads or a clock of its own.

Time is an argument of every call, in milliseconds of Unix time, and must not go back. Each call
first lets lapse what has lapsed, so an answer never depends on when a sweep last ran. What a call
changed is collected for the store (`ControlState.take_changes`); a call that is refused changed
nothing but what lapsed.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from refit_mx.control.records import (
    Code,
    Lease,
    Refusal,
    Shard,
    Version,
    VersionBody,
    VersionState,
    Worker,
    WorkerRole,
)

Record = Version | Worker | Shard | Lease


@dataclass(frozen=True)
class Limits:
    """How much the control plane keeps, and for how long.

    Attributes:
        retention: READY versions that a model keeps; the oldest beyond it that nobody leases are
            released. 0 keeps all. Versions in object storage do not count.
        forget_after_s: after this a RELEASING version without shards and leases is forgotten, and
            so is a worker that is dead.
        most_released: RELEASING versions that are remembered; the oldest beyond it that have no
            shards and leases are forgotten at once.
        most_versions: that are not forgotten, in all.
        most_workers: that are not forgotten, in all.
        most_leases: live ones on one version.
        most_replicas: shards that fill one slot.
        most_ttl_s: of a worker or a lease.
    """

    retention: int = 2
    forget_after_s: float = 3600.0
    most_released: int = 256
    most_versions: int = 10_000
    most_workers: int = 100_000
    most_leases: int = 10_000
    most_replicas: int = 256
    most_ttl_s: float = 86_400.0


class ControlState:
    """Versions, workers, shards and leases.

    Args:
        limits: what is kept.
        new_id: makes unique ids of versions and leases.
    """

    def __init__(
        self, limits: Limits | None = None, *, new_id: Callable[[], str] | None = None
    ) -> None:
        self.limits = limits or Limits()
        self._new_id = new_id or (lambda: secrets.token_hex(12))
        self.versions: dict[str, Version] = {}
        self.workers: dict[str, Worker] = {}
        self.shards: dict[str, dict[tuple[str, str, str], Shard]] = defaultdict(dict)
        self.leases: dict[str, dict[str, Lease]] = defaultdict(dict)
        self._by_idempotency: dict[tuple[str, str], str] = {}
        self._versions_of_worker: dict[str, set[str]] = defaultdict(set)
        self._order = 0
        # Moments at which something may lapse. An entry can be out of date, then it is ignored.
        self._timers: list[tuple[int, str, str]] = []
        self._changes: dict[tuple[str, tuple[str, ...]], Record | None] = {}

    # Loading and saving

    def load(self, records: Iterable[Record], *, now_ms: int, grace_s: float) -> None:
        """Take in what a store kept.

        Nobody could renew while the server was away, so what was live then gets at least the
        smaller of its time to live and ``grace_s`` from now.
        """

        def extended(ttl_ms: int, expires_at_ms: int) -> int:
            granted = now_ms + min(ttl_ms, int(grace_s * 1000))
            # A clock that was set back must not make anything live longer than it asked for.
            return max(granted, min(expires_at_ms, now_ms + ttl_ms))

        for record in records:
            match record:
                case Version():
                    self.versions[record.uid] = record
                    self._by_idempotency[record.body.model_name, record.body.idempotency_key] = (
                        record.uid
                    )
                    self._order = max(self._order, record.order)
                case Worker():
                    self.workers[record.worker_id] = record
                    if not record.stale and record.expires_at_ms:
                        record.expires_at_ms = extended(record.ttl_ms, record.expires_at_ms)
                case Lease():
                    self.leases[record.version_id][record.worker_id] = record
                    record.expires_at_ms = extended(record.ttl_ms, record.expires_at_ms)
                case Shard():
                    self.shards[record.version_id][record.key] = record
                    self._versions_of_worker[record.worker_id].add(record.version_id)
        for worker in self.workers.values():
            self._at(worker.expires_at_ms, "worker", worker.worker_id)
        for leases in self.leases.values():
            for lease in leases.values():
                self._at(lease.expires_at_ms, "lease", lease.version_id)
        for uid in list(self.versions):
            self._at(now_ms, "version", uid)
        self._expire(now_ms)

    def take_changes(self) -> dict[tuple[str, tuple[str, ...]], Record | None]:
        """What changed since the last call: kind and key to the record, or to None if it is gone.

        The records are the state's own: encode them before the next call.
        """
        changes, self._changes = self._changes, {}
        return changes

    @property
    def next_moment_ms(self) -> int | None:
        """When something may lapse; None if nothing can."""
        return self._timers[0][0] if self._timers else None

    # Versions

    def create_version(self, body: VersionBody, *, now_ms: int) -> Version:
        """A new version, or the one that the same body made before.

        Raises:
            Refusal: INVALID_ARGUMENT for a body that makes no sense; ALREADY_EXISTS where the
                idempotency key or the uid stands for another; RESOURCE_EXHAUSTED.
        """
        self._expire(now_ms)
        _check_body(body)
        known = self._by_idempotency.get((body.model_name, body.idempotency_key))
        if known is not None:
            version = self.versions[known]
            if version.body != body:
                raise Refusal(
                    Code.ALREADY_EXISTS,
                    f"idempotency key {body.idempotency_key!r} of model {body.model_name!r} made "
                    f"version {known!r} with another {_differences(version.body, body)}",
                )
            return version
        if body.uid is not None and body.uid in self.versions:
            raise Refusal(Code.ALREADY_EXISTS, f"version {body.uid!r} exists already")
        if len(self.versions) >= self.limits.most_versions:
            raise Refusal(
                Code.RESOURCE_EXHAUSTED,
                f"{len(self.versions)} versions are kept; delete some and their shards first",
            )
        self._order += 1
        version = Version(
            uid=body.uid or self._new_id(),
            body=body,
            state=body.state,
            order=self._order,
            created_at_ms=now_ms,
        )
        self.versions[version.uid] = version
        self._by_idempotency[body.model_name, body.idempotency_key] = version.uid
        self._changed(version)
        return version

    def get_version(self, uid: str, *, now_ms: int) -> Version:
        """The version as it is now.

        Raises:
            Refusal: NOT_FOUND.
        """
        self._expire(now_ms)
        return self._version(uid)

    def update_version_state(self, uid: str, state: VersionState, *, now_ms: int) -> Version:
        """Move a version forward: to READY if it is complete, or to RELEASING.

        Raises:
            Refusal: NOT_FOUND; FAILED_PRECONDITION for a move back, or while slots are missing.
        """
        self._expire(now_ms)
        version = self._version(uid)
        if state is VersionState.RELEASING:
            self._release(version, "it was asked for", now_ms)
        elif state < version.state:
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"version {uid!r} is {version.state.name}; it cannot go back to {state.name}",
            )
        elif state is VersionState.READY and version.state is VersionState.STAGING:
            missing = self.missing_slots(version, now_ms)
            if missing:
                raise Refusal(
                    Code.FAILED_PRECONDITION,
                    f"version {uid!r} is not complete: {_some(missing)} of "
                    f"{len(version.body.expected_source_slots)} slots have no live shard",
                )
            self._make_ready(version, now_ms)
        return version

    def delete_version(self, uid: str, *, now_ms: int) -> Version:
        """Move a version to RELEASING; its leases stay until they end.

        Raises:
            Refusal: NOT_FOUND.
        """
        return self.update_version_state(uid, VersionState.RELEASING, now_ms=now_ms)

    def missing_slots(self, version: Version, now_ms: int) -> list[str]:
        """Expected slots of a version without a shard of a live worker."""
        covered = {
            shard.source_slot_id
            for shard in self.shards.get(version.uid, {}).values()
            if self._is_live(shard.worker_id, now_ms)
        }
        return [slot for slot in version.body.expected_source_slots if slot not in covered]

    # Workers

    def register_worker(
        self, worker_id: str, role: WorkerRole, model_name: str, *, ttl_s: float, now_ms: int
    ) -> Worker:
        """A worker is alive for ``ttl_s`` from now.

        A worker that lapsed may come back: its shards count again where their version is still
        STAGING or READY.

        Raises:
            Refusal: ALREADY_EXISTS for an id of another role or model; FAILED_PRECONDITION for a
                worker that said STALE; INVALID_ARGUMENT; RESOURCE_EXHAUSTED.
        """
        self._expire(now_ms)
        ttl_ms = self._ttl_ms(ttl_s, f"worker {worker_id!r}")
        worker = self.workers.get(worker_id)
        if worker is None:
            if len(self.workers) >= self.limits.most_workers:
                raise Refusal(
                    Code.RESOURCE_EXHAUSTED, f"{len(self.workers)} workers are registered"
                )
            worker = Worker(worker_id, role, model_name, ttl_ms, now_ms + ttl_ms)
            self.workers[worker_id] = worker
        elif (worker.role, worker.model_name) != (role, model_name):
            raise Refusal(
                Code.ALREADY_EXISTS,
                f"worker {worker_id!r} is a {worker.role.name} of model {worker.model_name!r}, "
                f"not a {role.name} of {model_name!r}; worker ids are unique",
            )
        elif worker.stale:
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"worker {worker_id!r} said STALE; a new process takes a new id",
            )
        else:
            worker.ttl_ms, worker.expires_at_ms = ttl_ms, now_ms + ttl_ms
        self._changed(worker)
        self._at(worker.expires_at_ms, "worker", worker_id)
        for uid in self._versions_of_worker.get(worker_id, ()):
            self._complete(self.versions[uid], now_ms)
        return worker

    def mark_stale(self, worker_id: str, *, now_ms: int) -> Worker:
        """The worker stops: for good, it is not read from any more.

        Raises:
            Refusal: NOT_FOUND.
        """
        self._expire(now_ms)
        worker = self.workers.get(worker_id)
        if worker is None:
            raise Refusal(Code.NOT_FOUND, f"worker {worker_id!r} is not registered")
        if not worker.stale:
            worker.stale = True
            worker.expires_at_ms = min(worker.expires_at_ms, now_ms)
            self._changed(worker)
            self._worker_died(worker_id, now_ms)
        return worker

    # Shards

    def create_shard(self, shard: Shard, *, now_ms: int) -> tuple[Shard, Version]:
        """A worker serves a slot of a version. The version becomes READY with its last slot.

        Raises:
            Refusal: NOT_FOUND for an unknown version; INVALID_ARGUMENT for a slot that the version
                does not expect; FAILED_PRECONDITION while the version is RELEASING or for a worker
                that is not live or of another model; ALREADY_EXISTS where the worker published
                something else there.
        """
        self._expire(now_ms)
        version = self._version(shard.version_id)
        if shard.source_slot_id not in version.body.expected_source_slots:
            raise Refusal(
                Code.INVALID_ARGUMENT,
                f"version {version.uid!r} does not expect slot {shard.source_slot_id!r}; it "
                f"expects {_some(list(version.body.expected_source_slots))}",
            )
        if version.state is VersionState.RELEASING:
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"version {version.uid!r} is RELEASING ({version.reason}); it takes no shards",
            )
        worker = self.workers.get(shard.worker_id)
        if worker is None or not worker.is_live(now_ms):
            found = "is not registered" if worker is None else _how_dead(worker)
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"worker {shard.worker_id!r} {found}; a shard needs a live worker",
            )
        if worker.model_name != version.body.model_name:
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"worker {shard.worker_id!r} is of model {worker.model_name!r}; version "
                f"{version.uid!r} is of {version.body.model_name!r}",
            )
        shards = self.shards[version.uid]
        known = shards.get(shard.key)
        if known is not None:
            if known != shard:
                raise Refusal(
                    Code.ALREADY_EXISTS,
                    f"worker {shard.worker_id!r} has published another shard as slot "
                    f"{shard.source_slot_id!r} of version {version.uid!r}",
                )
            return known, version
        replicas = sum(1 for each in shards.values() if each.source_slot_id == shard.source_slot_id)
        if replicas >= self.limits.most_replicas:
            raise Refusal(
                Code.RESOURCE_EXHAUSTED,
                f"slot {shard.source_slot_id!r} of version {version.uid!r} has {replicas} shards",
            )
        shards[shard.key] = shard
        self._versions_of_worker[shard.worker_id].add(version.uid)
        self._changed(shard)
        self._complete(version, now_ms)
        return shard, version

    def list_shards(self, version_id: str, *, now_ms: int) -> list[Shard]:
        """The shards of live workers, those of the freshest workers first.

        Raises:
            Refusal: NOT_FOUND.
        """
        self._expire(now_ms)
        self._version(version_id)
        live = [
            shard
            for shard in self.shards.get(version_id, {}).values()
            if self._is_live(shard.worker_id, now_ms)
        ]
        return sorted(
            live, key=lambda each: (-self._renewed_at(each.worker_id), each.worker_id, each.key)
        )

    def delete_shard(
        self, version_id: str, source_slot_id: str, worker_id: str, *, now_ms: int
    ) -> bool:
        """The worker stops to serve a slot; afterwards it may use the memory again.

        Returns:
            Whether there was such a shard.

        Raises:
            Refusal: NOT_FOUND; FAILED_PRECONDITION unless the version is RELEASING and not leased.
        """
        self._expire(now_ms)
        version = self._version(version_id)
        shard = self.shards.get(version_id, {}).get((version_id, source_slot_id, worker_id))
        if shard is None:
            return False
        if version.state is not VersionState.RELEASING:
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"version {version_id!r} is {version.state.name}; delete the version first",
            )
        holders = [lease.worker_id for lease in self.live_leases(version_id, now_ms)]
        if holders:
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"version {version_id!r} is leased by {_some(holders)}; its shards stay",
            )
        self._drop_shard(shard)
        self._forget(now_ms)
        return True

    # Leases

    def register_lease(
        self, version_id: str, worker_id: str, *, ttl_s: float, now_ms: int
    ) -> Lease:
        """Hold a version, or hold it longer: while the lease lasts no shard of it is deleted.

        Raises:
            Refusal: NOT_FOUND; FAILED_PRECONDITION unless the version is READY, or RELEASING and
                the worker holds a lease already; INVALID_ARGUMENT; RESOURCE_EXHAUSTED.
        """
        self._expire(now_ms)
        ttl_ms = self._ttl_ms(ttl_s, f"lease of {worker_id!r} on version {version_id!r}")
        version = self._version(version_id)
        leases = self.leases[version_id]
        lease = leases.get(worker_id)
        if lease is None:
            if version.state is not VersionState.READY:
                why = f" ({version.reason})" if version.reason else ""
                missing = self.missing_slots(version, now_ms)
                if version.state is VersionState.STAGING and missing:
                    why = f" (slots without a live shard: {_some(missing)})"
                raise Refusal(
                    Code.FAILED_PRECONDITION,
                    f"version {version_id!r} is {version.state.name}{why}; a lease needs READY",
                )
            if len(leases) >= self.limits.most_leases:
                raise Refusal(
                    Code.RESOURCE_EXHAUSTED,
                    f"version {version_id!r} has {len(leases)} leases",
                )
            lease = Lease(self._new_id(), version_id, worker_id, ttl_ms, now_ms + ttl_ms)
            leases[worker_id] = lease
        else:
            lease.ttl_ms = ttl_ms
            lease.expires_at_ms = max(lease.expires_at_ms, now_ms + ttl_ms)
        self._changed(lease)
        self._at(lease.expires_at_ms, "lease", version_id)
        return lease

    def delete_lease(self, version_id: str, lease_id: str, worker_id: str, *, now_ms: int) -> bool:
        """Give a lease back.

        Returns:
            Whether there was such a lease.
        """
        self._expire(now_ms)
        lease = self.leases.get(version_id, {}).get(worker_id)
        if lease is None or lease.lease_id != lease_id:
            return False
        self._drop_lease(lease)
        self._leases_ended(version_id, now_ms)
        self._forget(now_ms)
        return True

    def live_leases(self, version_id: str, now_ms: int) -> list[Lease]:
        """Those that have not lapsed."""
        return [
            lease
            for lease in self.leases.get(version_id, {}).values()
            if now_ms < lease.expires_at_ms
        ]

    # Time

    def expire(self, *, now_ms: int) -> None:
        """Let lapse what has lapsed by ``now_ms``."""
        self._expire(now_ms)

    def _expire(self, now_ms: int) -> None:
        fired = False
        while self._timers and self._timers[0][0] <= now_ms:
            _, kind, key = heapq.heappop(self._timers)
            fired = True
            if kind == "worker":
                worker = self.workers.get(key)
                if worker is not None and not worker.is_live(now_ms):
                    self._worker_died(key, now_ms)
            elif kind == "lease":
                for lease in list(self.leases.get(key, {}).values()):
                    if lease.expires_at_ms <= now_ms:
                        self._drop_lease(lease)
                self._leases_ended(key, now_ms)
            elif key in self.versions:
                self._check_covered(self.versions[key], now_ms)
        if fired:
            self._forget(now_ms)

    def _at(self, moment_ms: int, kind: str, key: str) -> None:
        heapq.heappush(self._timers, (moment_ms, kind, key))

    def _worker_died(self, worker_id: str, now_ms: int) -> None:
        worker = self.workers[worker_id]
        self._at(worker.expires_at_ms + self._forget_after_ms, "forget", worker_id)
        for uid in list(self._versions_of_worker.get(worker_id, ())):
            self._check_covered(self.versions[uid], now_ms)

    def _check_covered(self, version: Version, now_ms: int) -> None:
        if version.state is VersionState.READY:
            missing = self.missing_slots(version, now_ms)
            if missing:
                self._release(
                    version, f"slots lost their last live shard: {_some(missing)}", now_ms
                )
        elif version.state is VersionState.RELEASING:
            self._drop_dead_shards(version, now_ms)
        else:
            self._complete(version, now_ms)

    def _leases_ended(self, version_id: str, now_ms: int) -> None:
        version = self.versions.get(version_id)
        if version is not None and not self.live_leases(version_id, now_ms):
            self._drop_dead_shards(version, now_ms)
            self._retain(version.body.model_name, now_ms)

    def _drop_dead_shards(self, version: Version, now_ms: int) -> None:
        # Nobody else can delete the shard of a dead worker. Under a lease even those stay: a worker
        # that was only cut off must not find its memory free while it is being read.
        if version.state is VersionState.RELEASING and not self.live_leases(version.uid, now_ms):
            for shard in list(self.shards.get(version.uid, {}).values()):
                if not self._is_live(shard.worker_id, now_ms):
                    self._drop_shard(shard)

    def _complete(self, version: Version, now_ms: int) -> None:
        if (
            version.state is VersionState.STAGING
            and version.body.expected_source_slots
            and not self.missing_slots(version, now_ms)
        ):
            self._make_ready(version, now_ms)

    def _make_ready(self, version: Version, now_ms: int) -> None:
        version.state = VersionState.READY
        self._changed(version)
        self._retain(version.body.model_name, now_ms)

    def _release(self, version: Version, reason: str, now_ms: int) -> None:
        if version.state is not VersionState.RELEASING:
            version.state = VersionState.RELEASING
            version.released_at_ms = now_ms
            version.reason = reason
            self._changed(version)
            self._at(now_ms + self._forget_after_ms, "forget", version.uid)
            self._drop_dead_shards(version, now_ms)
            self._forget(now_ms)

    def _retain(self, model_name: str, now_ms: int) -> None:
        if not self.limits.retention:
            return
        ready = sorted(
            (
                version
                for version in self.versions.values()
                if version.state is VersionState.READY
                and version.body.model_name == model_name
                and version.body.object_storage is None
            ),
            key=lambda version: version.order,
        )
        for version in ready[: -self.limits.retention]:
            if not self.live_leases(version.uid, now_ms):
                self._release(version, f"{self.limits.retention} newer versions are READY", now_ms)

    def _forget(self, now_ms: int) -> None:
        released = sorted(
            (
                version
                for version in self.versions.values()
                if version.state is VersionState.RELEASING
                and not self.shards.get(version.uid)
                and not self.leases.get(version.uid)
            ),
            key=lambda version: (version.released_at_ms, version.order),
        )
        too_many = max(0, len(released) - self.limits.most_released)
        for index, version in enumerate(released):
            if index < too_many or version.released_at_ms + self._forget_after_ms <= now_ms:
                del self.versions[version.uid]
                del self._by_idempotency[version.body.model_name, version.body.idempotency_key]
                self.shards.pop(version.uid, None)
                self.leases.pop(version.uid, None)
                self._changes["version", (version.uid,)] = None
        forgotten = [
            worker_id
            for worker_id, worker in self.workers.items()
            if worker.expires_at_ms + self._forget_after_ms <= now_ms
            and not self._versions_of_worker.get(worker_id)
        ]
        for worker_id in forgotten:
            del self.workers[worker_id]
            self._versions_of_worker.pop(worker_id, None)
            self._changes["worker", (worker_id,)] = None

    # Bits

    @property
    def _forget_after_ms(self) -> int:
        return int(self.limits.forget_after_s * 1000)

    def _version(self, uid: str) -> Version:
        version = self.versions.get(uid)
        if version is None:
            raise Refusal(Code.NOT_FOUND, f"no version {uid!r}")
        return version

    def _is_live(self, worker_id: str, now_ms: int) -> bool:
        worker = self.workers.get(worker_id)
        return worker is not None and worker.is_live(now_ms)

    def _renewed_at(self, worker_id: str) -> int:
        worker = self.workers[worker_id]
        return worker.expires_at_ms - worker.ttl_ms

    def _ttl_ms(self, ttl_s: float, what: str) -> int:
        if not 0 < ttl_s <= self.limits.most_ttl_s:
            raise Refusal(
                Code.INVALID_ARGUMENT,
                f"{what}: time to live {ttl_s:g} s; expected more than 0 and at most "
                f"{self.limits.most_ttl_s:g}",
            )
        return int(ttl_s * 1000)

    def _drop_shard(self, shard: Shard) -> None:
        del self.shards[shard.version_id][shard.key]
        still = any(
            each.worker_id == shard.worker_id for each in self.shards[shard.version_id].values()
        )
        if not still:
            self._versions_of_worker[shard.worker_id].discard(shard.version_id)
        self._changes["shard", shard.key] = None

    def _drop_lease(self, lease: Lease) -> None:
        del self.leases[lease.version_id][lease.worker_id]
        self._changes["lease", (lease.version_id, lease.worker_id)] = None

    def _changed(self, record: Record) -> None:
        kind, key = identity(record)
        self._changes[kind, key] = record


def identity(record: Record) -> tuple[str, tuple[str, ...]]:
    """Kind and key that a record is stored under."""
    match record:
        case Version():
            return "version", (record.uid,)
        case Worker():
            return "worker", (record.worker_id,)
        case Shard():
            return "shard", record.key
        case Lease():
            return "lease", (record.version_id, record.worker_id)


def layout_signature(body: VersionBody) -> str:
    """The same for versions of one model with the same slots: sha256, in hex."""
    layout = [body.model_name, sorted(body.expected_source_slots)]
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()


def _check_body(body: VersionBody) -> None:
    slots = body.expected_source_slots
    if len(set(slots)) != len(slots):
        raise Refusal(Code.INVALID_ARGUMENT, "expected source slots: one is named twice")
    if body.object_storage is None and not slots:
        raise Refusal(
            Code.INVALID_ARGUMENT,
            "expected source slots: none; a version needs some, or object storage",
        )
    if body.object_storage is not None and slots:
        raise Refusal(
            Code.INVALID_ARGUMENT,
            "a version has expected source slots or object storage, not both",
        )
    if body.state is VersionState.RELEASING or (
        body.state is VersionState.READY and body.object_storage is None
    ):
        raise Refusal(
            Code.INVALID_ARGUMENT,
            f"state {body.state.name}; a new version is STAGING, or READY if it lies in object "
            "storage already",
        )


def _differences(known: VersionBody, asked: VersionBody) -> str:
    fields = [
        name for name in known.__struct_fields__ if getattr(known, name) != getattr(asked, name)
    ]
    return " and ".join(field.replace("_", " ") for field in fields)


def _how_dead(worker: Worker) -> str:
    return "said STALE" if worker.stale else "has not registered again in time"


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
