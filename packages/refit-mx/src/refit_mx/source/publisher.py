"""`MxV2TrainingPublisher`: publishes this process's shards, one consistent version after another.

Each version is copied into a separate arena and does not change until its shard is deleted in the
control plane. The control plane allows this only when no receiver holds a lease. There are two
arenas, so a version can be published while the previous one is still being read.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from refit_mx.closing import Closeable
from refit_mx.control.client import ControlClient, VersionInfo
from refit_mx.control.connection import PreconditionError
from refit_mx.control.heartbeat import Heartbeat
from refit_mx.control.records import Shard, VersionState, WorkerRole
from refit_mx.control.retry import retry_idempotent
from refit_mx.deadline import Deadline
from refit_mx.errors import (
    ControlError,
    ControlUnavailableError,
    PhaseError,
    RefitConfigError,
    RefitTimeoutError,
    VersionLeasedError,
    VersionNotFoundError,
    VersionNotReadyError,
)
from refit_mx.manifest.digests import PublishedBlocks
from refit_mx.manifest.format import Manifest, NixlAgent, Registry, Structure, encode_table
from refit_mx.memory.arena import Arena, DoubleArena
from refit_mx.settings import MAX_COPY_THREADS, PublisherSettings
from refit_mx.source.manifest_service import ManifestService
from refit_mx.source.served_transports import served_transports
from refit_mx.source.server import SourceServer
from refit_mx.source.shards import Cut, LocalShard, Publishable, cut_shards, local_shards
from refit_mx.source.staging import (
    Placement,
    StagingLayout,
    WireDtype,
    holds_equal_bytes,
    lay_out,
    manifest_columns,
    stage,
)
from refit_mx.spans import OnPhase, phase, record_bytes

if TYPE_CHECKING:
    from refit_mx.transports.nixl_source import NixlSource

HF_RAW = Registry("hf_raw")
_ARENAS = 2
_POLL_S = 0.05
"""Polling interval while receivers lease a version, and between attempts to register a shard."""
_BRIEF_BYTES = 64 << 10
"""Structures of at least this size are not sent with each version's manifest."""


@dataclass(eq=False)
class _HeldVersion:
    """A version in an arena."""

    placement: Placement
    arena: Arena
    manifest: Manifest
    shard: Shard
    maybe_registered: bool = False  # True also if the control plane did not answer


class MxV2TrainingPublisher(Closeable):
    """Publisher of one source slot of a model's versions.

    It is a worker of the control plane with a heartbeat. When the process exits, gets SIGTERM or
    dies, its versions are no longer READY, unless a replica serves the same slot. One thread at a
    time may publish.

    Args:
        model_name: model in the control plane.
        source_slot_id: slot that this process fills in each version, such as ``fsdp-0``.
        control: client of the control plane, or its address; then the publisher creates and closes
            the client.
        wire_dtype: dtype to which floating-point tensors are cast, or a mapping by tensor name;
            None publishes all unchanged. The cast is part of the copy into the arena.
        cuts: by tensor name, how generators divide a tensor along an axis other than the first.
            They then read their parts faster, and publishing is no slower. All replicas must use
            the same cuts.
        registry: how the bytes were prepared. After a compile pass ``p``, pass
            ``Registry(p.name, dict(p.metadata))``. None leaves it unstated, and receivers with a
            filter then ignore the source.
        transports: ``nixl``, ``shm`` and ``tcp``; None for all available ones. The TCP server runs
            in any case: receivers request digests from it.
        host: host to listen on. Every machine that can connect to it can read the weights.
        advertised_host: host that receivers connect to; None for ``host``.
        device: device of the arenas, such as ``cpu`` or ``cuda:0``.
        heartbeat_ttl_s: time after which a silent publisher counts as dead.
        timeout_s: default time limit of `publish` and `release`.
        settings: further time limits and bounds.
        on_phase: callback for each phase as it begins: stage, serve, register. An error that it
            raises ends the publish.

    Raises:
        RefitConfigError: a transport is unknown or, if requested, not available, or the publisher
            cannot listen on the address.
        ControlUnavailableError: the control plane cannot be reached.
    """

    def __init__(
        self,
        model_name: str,
        source_slot_id: str,
        *,
        control: ControlClient | str,
        wire_dtype: WireDtype = None,
        cuts: Mapping[str, Cut] | None = None,
        registry: Registry | None = HF_RAW,
        transports: Sequence[str] | None = None,
        host: str = "127.0.0.1",
        advertised_host: str | None = None,
        device: torch.device | str = "cpu",
        heartbeat_ttl_s: float = 15.0,
        timeout_s: float = 60.0,
        settings: PublisherSettings | None = None,
        on_phase: OnPhase | None = None,
    ) -> None:
        self._settings = settings or PublisherSettings()
        self._model_name = model_name
        self._slot = source_slot_id
        self._wire_dtype = wire_dtype
        self._cuts = dict(cuts or {})
        self._registry = registry
        self._timeout_s = timeout_s
        self._on_phase = on_phase
        self._held: dict[str, _HeldVersion] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._stack = ExitStack()
        self.incarnation = secrets.token_hex(16)
        self.worker_id = f"publisher-{source_slot_id}-{secrets.token_hex(8)}"
        with ExitStack() as stack:
            if isinstance(control, str):
                control = ControlClient(control, rpc_timeout_s=self._settings.rpc_timeout_s)
                stack.callback(control.close)
            self._control = control
            copy_threads = self._settings.copy_threads or min(
                MAX_COPY_THREADS, len(os.sched_getaffinity(0))
            )
            self._threads = ThreadPoolExecutor(copy_threads, thread_name_prefix="refit-staging")
            stack.callback(self._threads.shutdown)
            wanted = served_transports(transports, torch.device(device))
            # Close this after NIXL's agents: a receiver whose connection is refused concludes that
            # the source is gone, and that no read still writes into the receiver's memory.
            self._server = SourceServer(
                host=host,
                advertised_host=advertised_host,
                incarnation=self.incarnation,
                timeout_s=self._settings.source_timeout_s,
                max_connections=self._settings.max_connections,
            )
            stack.callback(self._server.close)
            self._nixl = _nixl_source() if "nixl" in wanted else None
            if self._nixl is not None:
                stack.callback(self._nixl.close)
            self._agents: dict[int, NixlAgent] = {}
            self._arenas = DoubleArena(
                device=str(device),
                shared="shm" in wanted,
                on_new=self._register_arena,
                on_old=self._unregister_arena,
            )
            stack.callback(self._arenas.close)
            self._manifests = ManifestService(host=host, advertised_host=advertised_host)
            stack.callback(self._manifests.close)
            self._heartbeat = Heartbeat(
                control,
                self.worker_id,
                WorkerRole.TRAINER,
                model_name,
                ttl_s=heartbeat_ttl_s,
                on_sigterm=self._settings.stale_on_sigterm,
            )
            stack.callback(self._heartbeat.close)
            self._stack = stack.pop_all()

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions currently held, oldest first."""
        return tuple(self._held)

    def publish(
        self,
        version_id: str,
        shards: Mapping[str, Publishable] | Iterable[LocalShard],
        *,
        timeout_s: float | None = None,
    ) -> Manifest:
        """Copy the shards, and register them as this slot's part of a version.

        The tensors may change as soon as this returns. If both arenas are in use, the call first
        releases the older version, or the newer version if that is already being released. It
        waits until no receiver leases that version.

        A failed call may be repeated with the same weights, even if it had registered the shard.

        Args:
            version_id: version that exists in the control plane and expects this slot.
            shards: state dict of tensors, DTensors and `LocalShard`s, or the shards themselves.
            timeout_s: time limit; None for that of the publisher.

        Returns:
            The manifest that receivers get.

        Raises:
            VersionNotFoundError: the control plane knows no such version.
            VersionNotReadyError: the version is already being released.
            RefitConfigError: the version does not expect this slot or is of another model, the
                shards are inconsistent, a value does not fit the wire dtype, or this version was
                published with other weights.
            RefitTimeoutError: the time limit passed. If a leased version still uses an arena, the
                message names it.
            PhaseError: the publisher is closed, another thread publishes, or SIGTERM has come.
            ControlError: the control plane refused the call, or cannot be reached.
        """
        deadline = self._deadline(timeout_s, f"publish of version {version_id}")
        given = local_shards(shards) if isinstance(shards, Mapping) else list(shards)
        with self._exclusive(), phase("publish", version_id) as span:
            self._check_not_stale()
            started = time.monotonic()
            layout = lay_out(cut_shards(given, self._cuts), self._wire_dtype)
            held = self._held.get(version_id)
            if held is None:
                self._check_version(version_id, deadline)
                self._free_arena(deadline)
                held = self._stage(version_id, layout, deadline)
            elif held.placement != layout.placement or not holds_equal_bytes(
                layout, held.arena.memory
            ):
                raise RefitConfigError(
                    f"version {version_id} was published with other weights; versions do not change"
                )
            self._register_shard(version_id, held, deadline)
            record_bytes(span, layout.payload_bytes, time.monotonic() - started)
        return held.manifest

    def release(self, version_id: str, *, timeout_s: float | None = None) -> None:
        """Release a version, and free its arena once no receiver holds a lease.

        Do nothing if this process does not hold it.

        Raises:
            RefitTimeoutError: the version is leased for longer than ``timeout_s``; it stays held.
            ControlUnavailableError: the control plane cannot be reached.
        """
        deadline = self._deadline(timeout_s, f"release of version {version_id}")
        with self._exclusive():
            if version_id in self._held:
                self._retire(version_id, deadline)

    def mark_stale(self) -> None:
        """Mark this publisher STALE in the control plane, so that receivers read other replicas.

        A version without another replica of this slot is no longer READY.
        """
        self._heartbeat.close()

    def close(self) -> None:
        """Mark the publisher STALE, stop serving and free the memory. May be called again.

        Receivers lose this source, even while they read. Memory that they have mapped stays until
        they unmap it. Do not call it while another thread publishes.
        """
        if self._closed:
            return
        self._closed = True
        self._stack.close()
        self._held.clear()

    def _deadline(self, timeout_s: float | None, what: str) -> Deadline:
        return Deadline(self._timeout_s if timeout_s is None else timeout_s, what)

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._closed:
            raise PhaseError(f"{self.worker_id} is closed")
        if not self._lock.acquire(blocking=False):
            raise PhaseError(f"{self.worker_id} is publishing in another thread; one at a time")
        try:
            yield
        finally:
            self._lock.release()

    def _register_arena(self, arena: Arena) -> None:
        if self._nixl is not None:
            self._agents[arena.address] = self._nixl.register(arena.memory)

    def _unregister_arena(self, arena: Arena) -> None:
        if self._nixl is not None and self._agents.pop(arena.address, None) is not None:
            self._nixl.unregister(arena.memory)

    def _check_not_stale(self) -> None:
        if self._heartbeat.stale_by_sigterm:
            raise PhaseError(
                f"{self.worker_id} became STALE for good when this process got SIGTERM; set "
                "PublisherSettings(stale_on_sigterm=False) in a process that continues after it"
            )

    def _check_version(self, version_id: str, deadline: Deadline) -> None:
        """Check a version before anything is copied."""
        version = self._version(version_id, deadline)
        if version.model_name != self._model_name:
            raise RefitConfigError(
                f"version {version_id} is of model {version.model_name!r}; "
                f"this publisher's is {self._model_name!r}"
            )
        if self._slot not in version.expected_source_slots:
            raise RefitConfigError(
                f"version {version_id} does not expect slot {self._slot!r}; it expects "
                f"{', '.join(version.expected_source_slots[:5])}"
            )
        if version.state is VersionState.RELEASING:
            raise VersionNotReadyError(f"version {version_id} is RELEASING; it takes no shards")

    def _free_arena(self, deadline: Deadline) -> None:
        """Release versions until an arena is free."""
        while len(self._held) >= _ARENAS:
            oldest, *newer = self._held
            # Prefer an abandoned version: the oldest may be the only READY version.
            abandoned = (version for version in newer if self._is_abandoned(version, deadline))
            self._retire(next(abandoned, oldest), deadline)

    def _is_abandoned(self, version_id: str, deadline: Deadline) -> bool:
        """Return whether a version is released or forgotten, so that it is never READY again."""
        try:
            return self._version(version_id, deadline).state is VersionState.RELEASING
        except VersionNotFoundError:
            return True

    def _version(self, version_id: str, deadline: Deadline) -> VersionInfo:
        return retry_idempotent(
            self._control,
            lambda client: client.get_version(version_id),
            deadline=deadline,
            retry_s=self._settings.control_retry_s,
        )

    def _retire(self, version_id: str, deadline: Deadline) -> None:
        leased = ""
        while True:
            doing = leased or f"releasing version {version_id}, which fills an arena"
            try:
                self._control.within(deadline, doing).delete_version(version_id)
                control = self._control.within(deadline, doing)
                control.delete_shard(version_id, self._slot, self.worker_id)
                break
            except VersionNotFoundError:
                break  # forgotten, so it has no leases
            except VersionLeasedError as error:
                leased = f"version {version_id} fills an arena: {error}"
            except RefitTimeoutError:
                deadline.check(doing)
            except ControlUnavailableError:
                if not deadline.left_s:
                    raise
            time.sleep(min(_POLL_S, deadline.left_s))
        self._drop(version_id)

    def _drop(self, version_id: str) -> None:
        self._manifests.drop(version_id, self._slot)
        self._server.drop_version(version_id)
        self._arenas.release(version_id)
        self._held.pop(version_id, None)

    def _stage(self, version_id: str, layout: StagingLayout, deadline: Deadline) -> _HeldVersion:
        arena = self._arenas.take(layout.nbytes)
        with phase("stage", version_id, self._on_phase):
            digests = stage(layout, arena.memory, threads=self._threads, deadline=deadline)
        try:
            with phase("serve", version_id, self._on_phase):
                manifest, digest = self._serve(version_id, layout, arena, b"".join(digests))
            self._arenas.hold(arena, version_id)
            shard = Shard(
                version_id=version_id,
                source_slot_id=self._slot,
                worker_id=self.worker_id,
                tensor_count=layout.tensors,
                total_bytes=layout.payload_bytes,
                manifest_digest=digest,
                manifest_endpoint=self._manifests.endpoint,
            )
            held = _HeldVersion(layout.placement, arena, manifest, shard)
            self._held[version_id] = held
        except BaseException:  # stop serving it, and free the arena, also on an interrupt
            self._drop(version_id)
            raise
        return held

    def _serve(
        self, version_id: str, layout: StagingLayout, arena: Arena, digests: bytes
    ) -> tuple[Manifest, str]:
        """Make the bytes and the manifest available; receivers find them through the shard."""
        table, shards = manifest_columns(layout)
        table_digest, table_bytes = encode_table(table)
        structure = Structure(table_digest, table_bytes, shards).encode()
        manifest = Manifest(
            model_name=self._model_name,
            version_id=version_id,
            source_slot_id=self._slot,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            endpoint=self._server.endpoint,
            registry=self._registry,
            arena_address=arena.address,
            arena_bytes=arena.nbytes,
            nixl=self._agents.get(arena.address),
            shm=arena.shared,
            table_digest=table_digest,
            table=table_bytes,
            shards=shards,
            digests=digests,
            structure_digest=hashlib.sha256(structure).digest(),
        )
        # A small structure is not worth another request.
        sent = manifest.brief() if len(structure) >= _BRIEF_BYTES else manifest
        encoded = sent.encode()
        digest = self._manifests.put(version_id, self._slot, encoded)
        blocks = PublishedBlocks(layout.offsets, layout.sizes, digests)
        self._server.serve_version(
            version_id, arena.memory, blocks, structure=structure, manifest=encoded
        )
        return manifest, digest

    def _register_shard(self, version_id: str, held: _HeldVersion, deadline: Deadline) -> None:
        """Register the shard in the control plane.

        Without an answer, the shard may still be registered, so the arena stays in use until the
        call is repeated or the version is released.
        """
        with phase("register", version_id, self._on_phase):
            reregistered = False
            while True:
                try:
                    control = self._control.within(deadline)
                    if reregistered:
                        self._heartbeat.renew(control)
                    control.create_shard(held.shard)
                    held.maybe_registered = True
                    return
                except (ControlUnavailableError, RefitTimeoutError) as error:
                    held.maybe_registered = True
                    if deadline.left_s <= _POLL_S:
                        raise
                    reason = str(error)
                except ControlError as error:
                    # The control plane lost its state, or this process was suspended: register the
                    # worker again instead of waiting for the next heartbeat.
                    if isinstance(error, PreconditionError) and not reregistered:
                        reregistered = True
                        continue
                    if not held.maybe_registered:
                        self._drop(version_id)
                    raise
                time.sleep(min(_POLL_S, deadline.check(reason)))


def _nixl_source() -> NixlSource:
    from refit_mx.transports.nixl_source import NixlSource

    return NixlSource()
