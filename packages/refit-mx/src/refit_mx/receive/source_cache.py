"""`SourceCache`: what a receiver retains about its sources between versions.

While the sources and their layout stay the same, later versions cost a fraction of the first:

    retained                    by                    saves
    connection to a publisher   endpoint              a gRPC call (one frame replaces it)
    structure of a manifest     its digest            megabytes of names and boxes per source
    plan and its row checks     structure, targets    planning

Everything retained is checked: a manifest has the digest in the control plane, a structure has the
digest in its manifest, and a plan is for exactly these structures.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import msgspec

from refit_mx.control.records import Shard
from refit_mx.deadline import Deadline
from refit_mx.errors import (
    DigestMismatchError,
    ProtocolError,
    RefitError,
    RefitTimeoutError,
    SourceLostError,
)
from refit_mx.manifest.format import Manifest, Structure, manifest_digest
from refit_mx.plan.block_splits import split_at_blocks
from refit_mx.plan.planner import Plan, plan_reads
from refit_mx.plan.shards import ShardTable
from refit_mx.plan.target_tensors import TargetTensor
from refit_mx.receive.manifests import request_manifest
from refit_mx.receive.verify import RowChecks, row_checks
from refit_mx.transports.source_client import SourceClient

_MAX_IDLE_S = 60.0
"""A connection idle for longer is reopened: a device in between may have dropped it."""
_MAX_CONNECTIONS = 256
"""Limit of retained connections to publishers."""


@dataclass(frozen=True, eq=False)
class _Planned:
    """The last plan, unsplit and split, with what it depends on."""

    shards: ShardTable
    names: tuple[str, ...]
    unsplit: Plan
    max_read_bytes: int
    plan: Plan
    checks: tuple[RowChecks, ...]


class SourceCache:
    """Retained connections, structures and the last plan of one receiver.

    Any thread may request manifests. Tables and plans are for one thread at a time. The seed of
    plans spreads receivers over replicas.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        # Clients and the monotonic time of their last use, by endpoint of the manifests; the least
        # recently used first.
        self._clients: dict[str, tuple[SourceClient, float]] = {}
        self._structures: dict[bytes, Structure] = {}
        self._tables: dict[bytes, bytes] = {}
        self._planned: _Planned | None = None

    def manifest(
        self, shard: Shard, *, model_name: str, deadline: Deadline, timeout_s: float
    ) -> Manifest:
        """Request the complete manifest of a shard from its publisher.

        The call ends after ``timeout_s``, so that a stopped publisher costs no more.

        Raises:
            SourceLostError: no answer came in time, or the publisher no longer holds the version.
            ProtocolError: the answer is too large, or is not what the control plane lists.
            RefitTimeoutError: the deadline passed.
        """
        endpoint = shard.manifest_endpoint
        timeout_s = min(timeout_s, deadline.check(f"asking {endpoint} for a manifest"))
        limit = Deadline(timeout_s, "a manifest")
        # Half of the time, so that a new connection gets the rest: the publisher at the end of a
        # retained connection may be busy, or may have been replaced.
        half = Deadline(timeout_s / 2, "a manifest over a retained connection")
        data = self._over_connection(endpoint, shard.version_id, half)
        if data is None or manifest_digest(data) != shard.manifest_digest:
            data = request_manifest(
                endpoint,
                shard.version_id,
                shard.source_slot_id,
                digest=shard.manifest_digest,
                deadline=limit,
            )
        manifest = Manifest.decode(data)
        actual = (
            manifest.model_name,
            manifest.version_id,
            manifest.source_slot_id,
            manifest.worker_id,
        )
        expected = (model_name, shard.version_id, shard.source_slot_id, shard.worker_id)
        if actual != expected:
            raise ProtocolError(
                f"{endpoint}: a manifest of {actual}; the control plane lists {expected}"
            )
        try:
            manifest = self._completed(manifest, limit)
        except RefitTimeoutError as error:
            raise SourceLostError(str(error), (shard.worker_id,)) from None
        self._retain_client(endpoint, manifest)
        return manifest

    def retain_only(self, manifests: Iterable[Manifest]) -> None:
        """Forget the structures of all other manifests."""
        digests = {manifest.structure_digest for manifest in manifests}
        with self._lock:
            self._structures = {
                digest: structure
                for digest, structure in self._structures.items()
                if digest in digests
            }
            tables = {structure.table_digest for structure in self._structures.values()}
            self._tables = {
                digest: table for digest, table in self._tables.items() if digest in tables
            }

    def table(self, manifests: Sequence[Manifest]) -> ShardTable:
        """Merge the manifests of a version's sources.

        Sources are sorted, so that plans are the same from version to version; discovery lists the
        most recently seen sources first.

        Raises:
            SourceLostError: manifests are malformed; the error has their worker ids.
            DigestMismatchError: replicas published different bytes.
            RefitError: for the reasons of `ShardTable.of`.
        """
        manifests = sorted(manifests, key=lambda each: (each.source_slot_id, each.worker_id))
        try:
            last = self._planned
            same = last.shards.for_next_version(manifests) if last is not None else None
            shards = same or ShardTable.of(manifests)
        except ProtocolError as error:
            malformed = [each.worker_id for each in manifests if not _is_well_formed(each)]
            if not malformed:
                raise
            raise SourceLostError(
                f"version {manifests[0].version_id}: {len(malformed)} of {len(manifests)} "
                f"manifests cannot be used: {error}",
                tuple(malformed),
            ) from error
        _check_replicas(shards)
        return shards

    def plan(self, shards: ShardTable, targets: Sequence[TargetTensor]) -> Plan:
        """Return the plan of the targets, with reads of any length.

        Raises:
            LayoutError: a target is not published.
        """
        last = self._planned
        if last is not None and (last.shards.structure, last.names) == (
            shards.structure,
            _names(targets),
        ):
            return last.unsplit
        return plan_reads(shards, targets, seed=self._seed)

    def split_at_blocks(
        self,
        shards: ShardTable,
        targets: Sequence[TargetTensor],
        unsplit: Plan,
        max_read_bytes: int,
    ) -> tuple[Plan, tuple[RowChecks, ...]]:
        """Return a plan from `plan` split at blocks, with its row checks; retain both."""
        last = self._planned
        if last is None or last.unsplit is not unsplit or last.max_read_bytes != max_read_bytes:
            plan = split_at_blocks(shards, unsplit, max_read_bytes)
            checks = row_checks(shards, plan)
            last = _Planned(shards, _names(targets), unsplit, max_read_bytes, plan, checks)
            self._planned = last
        return last.plan, last.checks

    def close(self) -> None:
        """Disconnect. May be called again; the cache may be used again."""
        with self._lock:
            clients = list(self._clients.values())
            self._clients.clear()
        for client, _ in clients:
            client.close()

    def _over_connection(self, endpoint: str, version_id: str, deadline: Deadline) -> bytes | None:
        """Request a manifest over a retained connection; return None if that is not possible.

        A connection that fails is dropped.
        """
        with self._lock:
            # Removed, so that no other thread uses the connection meanwhile.
            client, last_use = self._clients.pop(endpoint, (None, 0.0))
        if client is None:
            return None
        if time.monotonic() - last_use > _MAX_IDLE_S:
            client.close()
        try:
            data = client.get("manifest", version_id=version_id, deadline=deadline)
        except RefitError:
            client.close()
            return None
        self._put_client(endpoint, client, time.monotonic())
        return data

    def _retain_client(self, endpoint: str, manifest: Manifest) -> None:
        with self._lock:
            if endpoint in self._clients:
                return
        # Identity of the publisher, without its table, shards and digests.
        identity = msgspec.structs.replace(manifest.brief(), digests=b"")
        self._put_client(endpoint, SourceClient(identity), 0.0)

    def _put_client(self, endpoint: str, client: SourceClient, last_use: float) -> None:
        with self._lock:
            replaced = self._clients.pop(endpoint, None)
            self._clients[endpoint] = (client, last_use)
            # Restarted publishers have other ports; the oldest connection is dropped first.
            full = len(self._clients) > _MAX_CONNECTIONS
            oldest = self._clients.pop(next(iter(self._clients))) if full else None
        for unused in (replaced, oldest):
            if unused is not None:
                unused[0].close()

    def _completed(self, manifest: Manifest, deadline: Deadline) -> Manifest:
        """Return a manifest with its table and shards, requested from its source if necessary."""
        if not manifest.is_brief:
            return manifest
        with self._lock:
            structure = self._structures.get(manifest.structure_digest)
        if structure is not None:
            return manifest.completed(structure)
        with closing(SourceClient(manifest)) as client:
            data = client.get("structure", version_id=manifest.version_id, deadline=deadline)
        if hashlib.sha256(data).digest() != manifest.structure_digest:
            raise ProtocolError(
                f"source {manifest.worker_id!r} at {manifest.endpoint}: its structure of version "
                f"{manifest.version_id!r} does not match its manifest"
            )
        structure = Structure.decode(data)
        with self._lock:
            # Sources of one model have equal tables, so one copy is enough. A forged digest must
            # not replace a table.
            table = self._tables.setdefault(structure.table_digest, structure.table)
            if table == structure.table:
                structure = Structure(structure.table_digest, table, structure.shards)
            structure = self._structures.setdefault(manifest.structure_digest, structure)
        return manifest.completed(structure)


def _names(targets: Sequence[TargetTensor]) -> tuple[str, ...]:
    return tuple(target.name for target in targets)


def _is_well_formed(manifest: Manifest) -> bool:
    try:
        ShardTable.of([manifest])
    except ProtocolError:
        return False
    return True


def _check_replicas(shards: ShardTable) -> None:
    """Check that sources with the same boxes published the same bytes.

    Otherwise reads from several of them would mix two models.

    Raises:
        DigestMismatchError: replicas differ.
    """
    first: dict[int, Manifest] = {}
    for manifest, held in zip(shards.manifests, shards.held_of_source, strict=True):
        other = first.setdefault(held, manifest)
        if other.digests != manifest.digests:
            raise DigestMismatchError(
                f"version {manifest.version_id}: workers {other.worker_id} and "
                f"{manifest.worker_id} published different bytes of the same shards; "
                "replicas must be equal byte for byte"
            )
