"""The rules of the control plane: a state machine without I/O, threads or a clock of its own.

Time is an argument of every call, in milliseconds of Unix time, and must not go back. Each call
first lets lapse what has lapsed, so an answer never depends on when a sweep last ran. What a call
changed is collected for the store (`ControlState.take_changes`); a call that is refused changed
nothing but what lapsed.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterable

from refit_mx.control.lapses import Lapses
from refit_mx.control.ledger import Changes, Ledger, Record, some
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
    """Versions, workers, shards and leases, and all that may be done with them.

    Args:
        limits: what is kept, and for how long.
        new_id: makes unique ids of versions and leases.
    """

    def __init__(
        self, limits: Limits | None = None, *, new_id: Callable[[], str] | None = None
    ) -> None:
        self.limits = limits or Limits()
        self.ledger = Ledger()
        self._lapses = Lapses(self.ledger, self.limits)
        self._new_id = new_id or (lambda: secrets.token_hex(12))

    def load(self, records: Iterable[Record], *, now_ms: int, grace_s: float) -> None:
        """Take in what a store kept; see `Lapses.load`."""
        self._lapses.load(records, now_ms=now_ms, grace_s=grace_s)

    def excuse(self, since_ms: int, *, now_ms: int, grace_s: float) -> None:
        """The server did not run between the two moments; see `Lapses.excuse`."""
        self._lapses.excuse(since_ms, now_ms, grace_s=grace_s)

    def take_changes(self) -> Changes:
        """What changed since the last call; see `Ledger.take_changes`."""
        return self.ledger.take_changes()

    def expire(self, *, now_ms: int) -> None:
        """Let lapse what has lapsed by ``now_ms``."""
        self._lapses.pass_to(now_ms)

    # Versions

    def create_version(self, body: VersionBody, *, now_ms: int) -> Version:
        """A new version, or the one that the same body made before.

        Raises:
            Refusal: INVALID_ARGUMENT for a body that makes no sense; ALREADY_EXISTS where the
                idempotency key or the uid stands for another; RESOURCE_EXHAUSTED.
        """
        self._lapses.pass_to(now_ms)
        _check_body(body)
        known = self.ledger.by_idempotency.get((body.model_name, body.idempotency_key))
        if known is not None:
            version = self.ledger.versions[known]
            if version.body != body:
                raise Refusal(
                    Code.ALREADY_EXISTS,
                    f"idempotency key {body.idempotency_key!r} of model {body.model_name!r} made "
                    f"version {known!r} with another {_differences(version.body, body)}",
                )
            return version
        if body.uid is not None and body.uid in self.ledger.versions:
            raise Refusal(Code.ALREADY_EXISTS, f"version {body.uid!r} exists already")
        if len(self.ledger.versions) >= self.limits.most_versions:
            raise Refusal(
                Code.RESOURCE_EXHAUSTED,
                f"{len(self.ledger.versions)} versions are kept; delete some and their shards",
            )
        version = Version(
            uid=body.uid or self._new_id(),
            body=body,
            state=body.state,
            order=self.ledger.order + 1,
            created_at_ms=now_ms,
        )
        self.ledger.put(version)
        self._lapses.started(version)
        return version

    def get_version(self, uid: str, *, now_ms: int) -> Version:
        """The version as it is now.

        Raises:
            Refusal: NOT_FOUND.
        """
        self._lapses.pass_to(now_ms)
        return self._version(uid)

    def update_version_state(self, uid: str, state: VersionState, *, now_ms: int) -> Version:
        """Move a version forward: to READY if it is complete, or to RELEASING.

        Raises:
            Refusal: NOT_FOUND; FAILED_PRECONDITION for a move back, or while slots are missing.
        """
        self._lapses.pass_to(now_ms)
        version = self._version(uid)
        if state is VersionState.RELEASING:
            self._lapses.release(version, "it was asked for", now_ms)
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
                    f"{some(missing)}",
                )
            self._lapses.make_ready(version, now_ms)
        return version

    def delete_version(self, uid: str, *, now_ms: int) -> Version:
        """Move a version to RELEASING; its leases stay until they end.

        Raises:
            Refusal: NOT_FOUND.
        """
        return self.update_version_state(uid, VersionState.RELEASING, now_ms=now_ms)

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
        self._lapses.pass_to(now_ms)
        ttl_ms = self._ttl_ms(ttl_s, f"worker {worker_id!r}")
        worker = self.ledger.workers.get(worker_id)
        returned = False
        if worker is None:
            if len(self.ledger.workers) >= self.limits.most_workers:
                raise Refusal(
                    Code.RESOURCE_EXHAUSTED, f"{len(self.ledger.workers)} workers are registered"
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
                f"worker {worker_id!r} said STALE; a new process takes a new id",
            )
        else:
            worker.ttl_ms, worker.expires_at_ms = ttl_ms, now_ms + ttl_ms
            returned, worker.lapsed = worker.lapsed, False
        self.ledger.put(worker)
        self._lapses.worker_registered(worker, now_ms, returned=returned)
        return worker

    def mark_stale(self, worker_id: str, *, now_ms: int) -> Worker:
        """The worker stops: for good, it is not read from any more.

        Raises:
            Refusal: NOT_FOUND.
        """
        self._lapses.pass_to(now_ms)
        worker = self.ledger.workers.get(worker_id)
        if worker is None:
            raise Refusal(Code.NOT_FOUND, f"worker {worker_id!r} is not registered")
        if not worker.stale:
            worker.stale = True
            worker.expires_at_ms = min(worker.expires_at_ms, now_ms)
            self.ledger.put(worker)
            self._lapses.worker_ended(worker, now_ms)
        return worker

    # Shards

    def create_shard(self, shard: Shard, *, now_ms: int) -> tuple[Shard, Version]:
        """A worker serves a slot of a version. The version becomes READY with its last slot.

        Raises:
            Refusal: NOT_FOUND for an unknown version; INVALID_ARGUMENT for a slot that the version
                does not expect; FAILED_PRECONDITION while the version is RELEASING or for a worker
                that is not live or of another model; ALREADY_EXISTS where the worker published
                something else there; RESOURCE_EXHAUSTED.
        """
        self._lapses.pass_to(now_ms)
        version = self._version(shard.version_id)
        if shard.source_slot_id not in version.body.expected_source_slots:
            raise Refusal(
                Code.INVALID_ARGUMENT,
                f"version {version.uid!r} does not expect slot {shard.source_slot_id!r}; it "
                f"expects {some(list(version.body.expected_source_slots)) or 'none'}",
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
        if replicas >= self.limits.most_replicas:
            raise Refusal(
                Code.RESOURCE_EXHAUSTED,
                f"slot {shard.source_slot_id!r} of version {version.uid!r} has {replicas} shards",
            )
        self.ledger.put(shard)
        self._lapses.covering_changed(version, now_ms)
        return shard, version

    def list_shards(self, version_id: str, *, now_ms: int) -> list[Shard]:
        """The shards of live workers, those of the workers heard last first.

        Raises:
            Refusal: NOT_FOUND.
        """
        self._lapses.pass_to(now_ms)
        self._version(version_id)

        def heard_at(worker_id: str) -> int:
            worker = self.ledger.workers[worker_id]
            return worker.expires_at_ms - worker.ttl_ms

        live = [
            shard
            for shard in self.ledger.shards.get(version_id, {}).values()
            if self.ledger.is_live(shard.worker_id, now_ms)
        ]
        return sorted(live, key=lambda each: (-heard_at(each.worker_id), each.key))

    def delete_shard(
        self, version_id: str, source_slot_id: str, worker_id: str, *, now_ms: int
    ) -> bool:
        """The worker stops to serve a slot; afterwards it may use the memory again.

        Returns:
            Whether there was such a shard.

        Raises:
            Refusal: NOT_FOUND; FAILED_PRECONDITION unless the version is RELEASING and not leased.
        """
        self._lapses.pass_to(now_ms)
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
                f"version {version_id!r} is leased by {some(holders)}; its shards stay",
            )
        self._lapses.drop_shard(shard, now_ms)
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
        self._lapses.pass_to(now_ms)
        ttl_ms = self._ttl_ms(ttl_s, f"lease of {worker_id!r} on version {version_id!r}")
        version = self._version(version_id)
        lease = self.ledger.leases.get(version_id, {}).get(worker_id)
        if lease is None:
            if version.state is not VersionState.READY:
                missing = self.ledger.missing_slots(version, now_ms)
                why = version.reason or f"slots without a live shard: {some(missing) or 'none'}"
                raise Refusal(
                    Code.FAILED_PRECONDITION,
                    f"version {version_id!r} is {version.state.name} ({why}); a lease needs READY",
                )
            held = len(self.ledger.leases.get(version_id, {}))
            if held >= self.limits.most_leases:
                raise Refusal(Code.RESOURCE_EXHAUSTED, f"version {version_id!r} has {held} leases")
            lease = Lease(self._new_id(), version_id, worker_id, ttl_ms, now_ms + ttl_ms)
        elif now_ms + ttl_ms > lease.expires_at_ms:
            lease.ttl_ms, lease.expires_at_ms = ttl_ms, now_ms + ttl_ms
        self.ledger.put(lease)
        self.ledger.at(lease.expires_at_ms, "lease", version_id, worker_id)
        return lease

    def delete_lease(self, version_id: str, lease_id: str, worker_id: str, *, now_ms: int) -> bool:
        """Give a lease back.

        Returns:
            Whether there was such a lease.
        """
        self._lapses.pass_to(now_ms)
        lease = self.ledger.leases.get(version_id, {}).get(worker_id)
        if lease is None or lease.lease_id != lease_id:
            return False
        self._lapses.end_lease(lease, now_ms)
        return True

    def _version(self, uid: str) -> Version:
        version = self.ledger.versions.get(uid)
        if version is None:
            raise Refusal(Code.NOT_FOUND, f"no version {uid!r}")
        return version

    def _check_worker(self, worker_id: str, version: Version, now_ms: int) -> None:
        worker = self.ledger.workers.get(worker_id)
        if worker is None or not worker.is_live(now_ms):
            found = (
                "is not registered"
                if worker is None
                else "said STALE"
                if worker.stale
                else "has not registered again in time"
            )
            raise Refusal(
                Code.FAILED_PRECONDITION, f"worker {worker_id!r} {found}; a shard needs a live one"
            )
        if worker.model_name != version.body.model_name:
            raise Refusal(
                Code.FAILED_PRECONDITION,
                f"worker {worker_id!r} is of model {worker.model_name!r}; version "
                f"{version.uid!r} is of {version.body.model_name!r}",
            )

    def _ttl_ms(self, ttl_s: float, what: str) -> int:
        if not 0 < ttl_s <= self.limits.most_ttl_s:
            raise Refusal(
                Code.INVALID_ARGUMENT,
                f"{what}: time to live {ttl_s:g} s; expected more than 0 and at most "
                f"{self.limits.most_ttl_s:g}",
            )
        return max(1, int(ttl_s * 1000))


def layout_signature(body: VersionBody) -> str:
    """The same for versions of one model with the same slots: sha256, in hex."""
    layout = [body.model_name, sorted(body.expected_source_slots)]
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()


def _check_body(body: VersionBody) -> None:
    slots = body.expected_source_slots
    if len(set(slots)) != len(slots):
        raise Refusal(Code.INVALID_ARGUMENT, "expected source slots: one is named twice")
    if (body.object_storage is None) == (not slots):
        raise Refusal(
            Code.INVALID_ARGUMENT,
            f"{len(slots)} expected source slots {'and' if slots else 'and no'} object storage; "
            "a version has either",
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
    fields = (
        name for name in known.__struct_fields__ if getattr(known, name) != getattr(asked, name)
    )
    return " and ".join(field.replace("_", " ") for field in fields)
