"""The rules of the control plane: a state machine without I/O, threads or a clock.

Time is an argument of every call, in milliseconds of Unix time, and must not go back. Each call
first expires what is due, so a result never depends on when a sweep last ran. The changes of each
call are collected for the store (`Ledger.take_changes`). A refused call changes nothing, except
that it expires what is due.
"""

from __future__ import annotations

import hashlib
import json
import secrets

from refit_mx.control.expiry import Expiry
from refit_mx.control.ledger import Ledger, list_names
from refit_mx.control.limits import Limits
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


class ControlState:
    """Versions, workers, shards and leases, with the operations on them."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.ledger = Ledger()
        self.expiry = Expiry(self.ledger, self.limits)

    # Versions

    def create_version(self, body: VersionBody, *, now_ms: int) -> Version:
        """Create a version, or return the version that an equal body created before.

        Raises:
            Refusal: INVALID_ARGUMENT for an inconsistent body; ALREADY_EXISTS if the idempotency
                key or the uid belongs to another version; RESOURCE_EXHAUSTED beyond
                `Limits.max_versions`.
        """
        self.expiry.expire_until(now_ms)
        _check_body(body)
        known = self.ledger.by_idempotency.get((body.model_name, body.idempotency_key))
        if known is not None:
            version = self.ledger.versions[known]
            if version.body != body:
                raise Refusal(
                    Code.ALREADY_EXISTS,
                    f"idempotency key {body.idempotency_key!r} of model {body.model_name!r} "
                    f"created version {known!r} with different {_differences(version.body, body)}",
                )
            return version
        if body.uid is not None and body.uid in self.ledger.versions:
            raise Refusal(Code.ALREADY_EXISTS, f"version {body.uid!r} already exists")
        if len(self.ledger.versions) >= self.limits.max_versions:
            raise Refusal(
                Code.RESOURCE_EXHAUSTED,
                f"{len(self.ledger.versions)} versions exist, the limit; delete some of them and "
                "their shards",
            )
        version = Version(
            uid=body.uid or secrets.token_hex(12),
            body=body,
            state=body.state,
            order=self.ledger.order + 1,
            created_at_ms=now_ms,
        )
        self.ledger.put(version)
        self.expiry.start_limit(version)
        return version

    def get_version(self, uid: str, *, now_ms: int) -> Version:
        """Return the current state of a version.

        Raises:
            Refusal: NOT_FOUND for an unknown version.
        """
        self.expiry.expire_until(now_ms)
        return self._version(uid)

    def update_version_state(self, uid: str, state: VersionState, *, now_ms: int) -> Version:
        """Move a version forward: to READY if it is complete, or to RELEASING.

        Raises:
            Refusal: NOT_FOUND; FAILED_PRECONDITION for a move back, or while slots are missing.
        """
        self.expiry.expire_until(now_ms)
        version = self._version(uid)
        if state is VersionState.RELEASING:
            self.expiry.release(version, "a client released it", now_ms)
        elif state < version.state:
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"version {uid!r} is {version.state.name}; it cannot go back to {state.name}",
            )
        elif state is VersionState.READY and version.state is VersionState.STAGING:
            missing = self.ledger.missing_slots(version, now_ms)
            if missing:
                raise Refusal(
                    Code.FAILED_PRECONDITION,
                    f"version {uid!r} is not complete: {len(missing)} of "
                    f"{len(version.body.expected_source_slots)} slots have no live shard: "
                    f"{list_names(missing)}",
                )
            self.expiry.make_ready(version, now_ms)
        return version

    def delete_version(self, uid: str, *, now_ms: int) -> Version:
        """Move a version to RELEASING; its leases stay until they end.

        Raises:
            Refusal: NOT_FOUND for an unknown version.
        """
        return self.update_version_state(uid, VersionState.RELEASING, now_ms=now_ms)

    # Workers

    def register_worker(
        self, worker_id: str, role: WorkerRole, model_name: str, *, ttl_s: float, now_ms: int
    ) -> Worker:
        """Register a worker as live for ``ttl_s`` from now.

        A worker that expired may register again: its shards count again if their version is still
        STAGING or READY.

        Raises:
            Refusal: ALREADY_EXISTS for an id with another role or model; FAILED_PRECONDITION for a
                STALE worker; INVALID_ARGUMENT; RESOURCE_EXHAUSTED.
        """
        self.expiry.expire_until(now_ms)
        ttl_ms = self._ttl_ms(ttl_s, f"worker {worker_id!r}")
        worker = self.ledger.workers.get(worker_id)
        was_expired = False
        if worker is None:
            if len(self.ledger.workers) >= self.limits.max_workers:
                raise Refusal(
                    Code.RESOURCE_EXHAUSTED,
                    f"{len(self.ledger.workers)} workers are registered, the limit; stopped "
                    f"workers are forgotten after {self.limits.forget_after_s:g} s",
                )
            worker = Worker(worker_id, role, model_name, ttl_ms, now_ms + ttl_ms)
        elif (worker.role, worker.model_name) != (role, model_name):
            raise Refusal(
                Code.ALREADY_EXISTS,
                f"worker {worker_id!r} is a {worker.role.name} of model {worker.model_name!r}, "
                f"not a {role.name} of {model_name!r}; worker ids are unique",
            )
        elif worker.stale:
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"worker {worker_id!r} is STALE; a new process needs a new id",
            )
        else:
            worker.ttl_ms, worker.expires_at_ms = ttl_ms, now_ms + ttl_ms
            was_expired, worker.expired = worker.expired, False
        self.ledger.put(worker)
        self.expiry.worker_registered(worker, now_ms, was_expired=was_expired)
        return worker

    def mark_stale(self, worker_id: str, *, now_ms: int) -> Worker:
        """Mark a worker STALE for good, so that no receiver reads from it any more.

        Raises:
            Refusal: NOT_FOUND for an unknown worker.
        """
        self.expiry.expire_until(now_ms)
        worker = self.ledger.workers.get(worker_id)
        if worker is None:
            raise Refusal(Code.NOT_FOUND, f"worker {worker_id!r} is not registered")
        if not worker.stale:
            worker.stale = True
            worker.expires_at_ms = min(worker.expires_at_ms, now_ms)
            self.ledger.put(worker)
            self.expiry.worker_ended(worker, now_ms)
        return worker

    # Shards

    def create_shard(self, shard: Shard, *, now_ms: int) -> tuple[Shard, Version]:
        """Add a worker's shard of a version; the last missing slot makes the version READY.

        Raises:
            Refusal: NOT_FOUND for an unknown version; INVALID_ARGUMENT for a slot that the version
                does not expect; FAILED_PRECONDITION while the version is RELEASING or for a worker
                that is not live or of another model; ALREADY_EXISTS if the worker published a
                different shard there; RESOURCE_EXHAUSTED.
        """
        self.expiry.expire_until(now_ms)
        version = self._version(shard.version_id)
        if shard.source_slot_id not in version.body.expected_source_slots:
            raise Refusal(
                Code.INVALID_ARGUMENT,
                f"version {version.uid!r} does not expect slot {shard.source_slot_id!r}; it "
                f"expects {list_names(list(version.body.expected_source_slots)) or 'none'}",
            )
        if version.state is VersionState.RELEASING:
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"version {version.uid!r} is RELEASING ({version.reason}); it takes no shards",
            )
        self._check_worker(shard.worker_id, version, now_ms)
        shards = self.ledger.shards[version.uid]
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
        if replicas >= self.limits.max_replicas:
            raise Refusal(
                Code.RESOURCE_EXHAUSTED,
                f"slot {shard.source_slot_id!r} of version {version.uid!r} has {replicas} shards, "
                "the limit",
            )
        self.ledger.put(shard)
        self.expiry.live_shards_changed(version, now_ms)
        return shard, version

    def list_shards(self, version_id: str, *, now_ms: int) -> list[Shard]:
        """Return the shards of live workers, most recently seen workers first.

        Raises:
            Refusal: NOT_FOUND for an unknown version.
        """
        self.expiry.expire_until(now_ms)
        self._version(version_id)

        def last_seen_ms(worker_id: str) -> int:
            worker = self.ledger.workers[worker_id]
            return worker.expires_at_ms - worker.ttl_ms

        live = [
            shard
            for shard in self.ledger.shards.get(version_id, {}).values()
            if self.ledger.is_live(shard.worker_id, now_ms)
        ]
        return sorted(live, key=lambda each: (-last_seen_ms(each.worker_id), each.key))

    def delete_shard(
        self, version_id: str, source_slot_id: str, worker_id: str, *, now_ms: int
    ) -> bool:
        """Remove a worker's shard if it exists, so that the worker may reuse the memory.

        Raises:
            Refusal: NOT_FOUND; FAILED_PRECONDITION unless the version is RELEASING and not leased.
        """
        self.expiry.expire_until(now_ms)
        version = self._version(version_id)
        shard = self.ledger.shards.get(version_id, {}).get((version_id, source_slot_id, worker_id))
        if shard is None:
            return False
        if version.state is not VersionState.RELEASING:
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"version {version_id!r} is {version.state.name}; delete the version first",
            )
        holders = list(self.ledger.leases.get(version_id, {}))
        if holders:
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"version {version_id!r} is leased by {list_names(holders)}; retry when no lease "
                "remains",
            )
        self.expiry.drop_shard(shard, now_ms)
        return True

    # Leases

    def register_lease(
        self, version_id: str, worker_id: str, *, ttl_s: float, now_ms: int
    ) -> Lease:
        """Add or renew a lease: while it lasts, no shard of the version is deleted.

        Raises:
            Refusal: NOT_FOUND; FAILED_PRECONDITION unless the version is READY, or is RELEASING and
                the worker already holds a lease; INVALID_ARGUMENT; RESOURCE_EXHAUSTED.
        """
        self.expiry.expire_until(now_ms)
        ttl_ms = self._ttl_ms(ttl_s, f"lease of {worker_id!r} on version {version_id!r}")
        version = self._version(version_id)
        lease = self.ledger.leases.get(version_id, {}).get(worker_id)
        if lease is None:
            if version.state is not VersionState.READY:
                missing = self.ledger.missing_slots(version, now_ms)
                why = (
                    version.reason or f"slots without a live shard: {list_names(missing) or 'none'}"
                )
                raise Refusal(
                    Code.FAILED_PRECONDITION,
                    f"version {version_id!r} is {version.state.name} ({why}); a lease needs READY",
                )
            held = len(self.ledger.leases.get(version_id, {}))
            if held >= self.limits.max_leases:
                raise Refusal(
                    Code.RESOURCE_EXHAUSTED, f"version {version_id!r} has {held} leases, the limit"
                )
            lease = Lease(secrets.token_hex(12), version_id, worker_id, ttl_ms, now_ms + ttl_ms)
        elif now_ms + ttl_ms > lease.expires_at_ms:
            lease.ttl_ms, lease.expires_at_ms = ttl_ms, now_ms + ttl_ms
        self.ledger.put(lease)
        self.ledger.set_timer(lease.expires_at_ms, "lease", version_id, worker_id)
        return lease

    def delete_lease(self, version_id: str, lease_id: str, worker_id: str, *, now_ms: int) -> bool:
        """Release a lease; return whether it existed."""
        self.expiry.expire_until(now_ms)
        lease = self.ledger.leases.get(version_id, {}).get(worker_id)
        if lease is None or lease.lease_id != lease_id:
            return False
        self.expiry.end_lease(lease, now_ms)
        return True

    def _version(self, uid: str) -> Version:
        version = self.ledger.versions.get(uid)
        if version is None:
            raise Refusal(Code.NOT_FOUND, f"no version {uid!r}")
        return version

    def _check_worker(self, worker_id: str, version: Version, now_ms: int) -> None:
        worker = self.ledger.workers.get(worker_id)
        if worker is None or not worker.is_live(now_ms):
            status = (
                "is not registered"
                if worker is None
                else "is STALE"
                if worker.stale
                else "has expired"
            )
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"worker {worker_id!r} {status}; a shard needs a live worker",
            )
        if worker.model_name != version.body.model_name:
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"worker {worker_id!r} is of model {worker.model_name!r}; version "
                f"{version.uid!r} is of {version.body.model_name!r}",
            )

    def _ttl_ms(self, ttl_s: float, what: str) -> int:
        if not 0 < ttl_s <= self.limits.max_ttl_s:
            raise Refusal(
                Code.INVALID_ARGUMENT,
                f"{what}: time to live {ttl_s:g} s; expected more than 0 and at most "
                f"{self.limits.max_ttl_s:g}",
            )
        return max(1, int(ttl_s * 1000))


def layout_signature(body: VersionBody) -> str:
    """Return a sha256 in hex that is equal for versions of one model with the same slots."""
    layout = [body.model_name, sorted(body.expected_source_slots)]
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()


def _check_body(body: VersionBody) -> None:
    slots = body.expected_source_slots
    if len(set(slots)) != len(slots):
        raise Refusal(Code.INVALID_ARGUMENT, "expected source slots: a name is repeated")
    if (body.object_storage is None) == (not slots):
        raise Refusal(
            Code.INVALID_ARGUMENT,
            f"{len(slots)} expected source slots {'and' if slots else 'and no'} object storage; "
            "expected one of the two",
        )
    if body.state is VersionState.RELEASING or (
        body.state is VersionState.READY and body.object_storage is None
    ):
        raise Refusal(
            Code.INVALID_ARGUMENT,
            f"state {body.state.name}; a new version is STAGING, or READY if it is in object "
            "storage",
        )


def _differences(known: VersionBody, requested: VersionBody) -> str:
    fields = (
        name for name in known.__struct_fields__ if getattr(known, name) != getattr(requested, name)
    )
    return " and ".join(field.replace("_", " ") for field in fields)
