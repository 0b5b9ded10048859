"""`MxV2TrainingPublisher`: publishes this process's shards, version by version, none of them torn.

Each version is copied into an arena of its own and does not change until its shard was deleted in
the control plane, which allows that only when no receiver holds a lease. There are two arenas, so a
version can be published while the one before it is still being read.
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
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from refit_mx.arena import Arena, DoubleArena
from refit_mx.bounded_control import patiently
from refit_mx.control.client import ControlClient, VersionInfo
from refit_mx.control.connection import PreconditionError
from refit_mx.control.heartbeat import Heartbeat
from refit_mx.control.records import Shard, VersionState, WorkerRole
from refit_mx.cuts import Cut, cut_shards
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
from refit_mx.manifest import Manifest, NixlAgent, Registry, Structure, encode_table
from refit_mx.manifest_service import ManifestService
from refit_mx.offered_transports import offered_transports
from refit_mx.published_blocks import PublishedBlocks
from refit_mx.settings import MOST_COPY_THREADS, PublisherSettings
from refit_mx.shard_sources import LocalShard, Publishable, local_shards
from refit_mx.source_server import SourceServer
from refit_mx.spans import OnPhase, phase, tell_bytes
from refit_mx.staging import (
    Placement,
    StagingLayout,
    WireDtype,
    columns,
    lay_out,
    same_bytes,
    stage,
)

if TYPE_CHECKING:
    from refit_mx.transports.nixl import NixlSource

HF_RAW = Registry("hf_raw")
_ARENAS = 2
_BRIEF_BYTES = 64 << 10
"""Of a structure from which on it does not travel with each version's manifest."""


@dataclass(eq=False)
class _Held:
    """A version that fills an arena."""

    placement: Placement
    arena: Arena
    manifest: Manifest
    shard: Shard
    offered: bool = False
    in_doubt: bool = False


class MxV2TrainingPublisher:
    """Publishes one source slot of a model's versions.

    It is a worker of the control plane with a heartbeat: when the process ends, is told to end
    (SIGTERM) or dies, its versions leave READY. One thread at a time publishes.

    Args:
        model_name: of the control plane.
        source_slot_id: which of a version's expected slots this process fills, such as ``fsdp-0``.
        control: a client, or the address of the control plane; then `close` closes the client too.
        wire_dtype: what floating-point tensors are cast to; by tensor name if a mapping; None
            publishes all as they are. The cast happens in the copy into the arena.
        cuts: by tensor name, how generators take it apart along another axis than its first. Reads
            of such parts are faster, and publishing is not slower. Replicas have to agree on them.
        registry: how the bytes were prepared; None says nothing, and then no receiver with a
            filter takes them.
        transports: ``nixl``, ``shm`` and ``tcp``; None for all that this process can offer. TCP is
            always there: receivers ask it for digests.
        host: to listen on for receivers. Anything but loopback is open to everybody who can reach
            it.
        advertised_host: that receivers are told; None for ``host``.
        device: of the arenas, such as ``cpu`` or ``cuda:0``.
        heartbeat_ttl_s: after this long without a sign of life the control plane takes the
            publisher for dead.
        timeout_s: of `publish` and `release` if the call gives none.
        settings: the finer time limits and bounds.
        on_phase: called with the name of each phase as it begins: stage, serve, offer. What it
            raises ends the publish.

    Raises:
        RefitConfigError: an unknown transport, one is asked for and cannot be used, or an address
            that cannot be listened on.
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
        self._held: dict[str, _Held] = {}
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
                MOST_COPY_THREADS, len(os.sched_getaffinity(0))
            )
            self._threads = ThreadPoolExecutor(copy_threads, thread_name_prefix="refit-staging")
            stack.callback(self._threads.shutdown)
            wanted = offered_transports(transports, torch.device(device))
            # Closed after NIXL's agents: a receiver takes a source whose server refuses it for
            # gone, and the memory into which it read from it for free.
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
                on_new=self._register,
                on_old=self._unregister,
            )
            stack.callback(self._arenas.close)
            self._manifests = ManifestService(
                host=host,
                advertised_host=advertised_host,
                most_bytes=self._settings.most_manifest_bytes,
            )
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
        """That fill an arena now, the oldest first."""
        return tuple(self._held)

    def publish(
        self,
        version_id: str,
        shards: Mapping[str, Publishable] | Iterable[LocalShard],
        *,
        timeout_s: float | None = None,
    ) -> Manifest:
        """Copy the shards, and offer them to receivers as this slot's part of a version.

        The tensors may change as soon as this returns. Where both arenas are filled, one is freed:
        that of a version that was given up, else that of the older one, which is released. It is
        waited for as long as a receiver holds a lease on it.

        A call that failed may be made again with the same weights, also after it had offered them.

        Args:
            version_id: which exists in the control plane and expects this slot.
            shards: a state dict of tensors, DTensors and `LocalShard`s, or the shards themselves.
            timeout_s: for everything.

        Returns:
            The manifest that receivers get.

        Raises:
            VersionNotFoundError: the control plane knows no such version.
            VersionNotReadyError: the version is being released already.
            RefitConfigError: it expects no such slot or is of another model, the shards contradict
                each other, a number does not fit the wire dtype, or this version was published with
                other weights.
            RefitTimeoutError: the time is over; names the leased versions that are in the way.
            PhaseError: closed, another thread publishes, or the process got SIGTERM.
            ControlError: the control plane refused, or cannot be reached.
        """
        deadline = Deadline(timeout_s or self._timeout_s, f"publish of version {version_id}")
        found = local_shards(shards) if isinstance(shards, Mapping) else list(shards)
        with self._alone(), phase("publish", version_id) as span:
            self._check_not_ended()
            started = time.monotonic()
            layout = lay_out(cut_shards(found, self._cuts), self._wire_dtype)
            held = self._held.get(version_id)
            if held is None:
                self._check_version(version_id, deadline)
                self._make_room(deadline)
                held = self._stage(version_id, layout, deadline)
            elif held.placement != layout.placement or not same_bytes(layout, held.arena.memory):
                raise RefitConfigError(
                    f"version {version_id} was published with other weights; versions do not change"
                )
            self._offer(version_id, held, deadline)
            tell_bytes(span, layout.payload_bytes, time.monotonic() - started)
        return held.manifest

    def release(self, version_id: str, *, timeout_s: float | None = None) -> None:
        """Release a version everywhere, and free its arena once no receiver holds a lease.

        Nothing happens if this process does not hold it.

        Raises:
            RefitTimeoutError: it is leased for longer than ``timeout_s``; it stays as it is then.
            ControlUnavailableError: the control plane cannot be reached.
        """
        deadline = Deadline(timeout_s or self._timeout_s, f"release of version {version_id}")
        with self._alone():
            if version_id in self._held:
                self._retire(version_id, deadline)

    def mark_stale(self) -> None:
        """Tell the control plane that this publisher stops: its versions leave READY, for good."""
        self._heartbeat.close()

    def close(self) -> None:
        """Say STALE, stop serving and free the memory. May be called again.

        Receivers that are reading lose this source. Memory that they have mapped stays until they
        let go of it. Not while another thread publishes.
        """
        if self._closed:
            return
        self._closed = True
        self._stack.close()
        self._held.clear()

    def __enter__(self) -> MxV2TrainingPublisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._closed:
            raise PhaseError(f"{self.worker_id} is closed")
        if not self._lock.acquire(blocking=False):
            raise PhaseError(f"{self.worker_id} is publishing in another thread; one at a time")
        try:
            yield
        finally:
            self._lock.release()

    def _register(self, arena: Arena) -> None:
        if self._nixl is not None:
            self._agents[arena.address] = self._nixl.register(arena.memory)

    def _unregister(self, arena: Arena) -> None:
        if self._nixl is not None and self._agents.pop(arena.address, None) is not None:
            self._nixl.unregister(arena.memory)

    def _check_not_ended(self) -> None:
        if self._heartbeat.said_stale_on_sigterm:
            raise PhaseError(
                f"{self.worker_id} said STALE when this process got SIGTERM, for good; "
                "PublisherSettings(stale_on_sigterm=False) is for a process that goes on"
            )

    def _check_version(self, version_id: str, deadline: Deadline) -> None:
        """Refuse before anything is copied."""
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

    def _make_room(self, deadline: Deadline) -> None:
        """Release versions until an arena is free."""
        while len(self._held) >= _ARENAS:
            oldest, *newer = self._held
            # One that nobody can read any more costs nothing; the older one may be all there is.
            over = (version for version in newer if self._is_over(version, deadline))
            self._retire(next(over, oldest), deadline)

    def _is_over(self, version_id: str, deadline: Deadline) -> bool:
        """Whether a version was given up, so that it will never be READY again."""
        try:
            return self._version(version_id, deadline).state is VersionState.RELEASING
        except VersionNotFoundError:
            return True

    def _version(self, version_id: str, deadline: Deadline) -> VersionInfo:
        return patiently(
            self._control,
            lambda client: client.get_version(version_id),
            deadline=deadline,
            patience_s=self._settings.control_patience_s,
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
                break  # forgotten, so nobody can hold a lease on it
            except VersionLeasedError as error:
                leased = f"version {version_id} fills an arena: {error}"
            except RefitTimeoutError:
                deadline.check(doing)
            except ControlUnavailableError:
                if not deadline.left_s:
                    raise
            time.sleep(min(self._settings.poll_s, deadline.left_s))
        self._drop(version_id)

    def _drop(self, version_id: str) -> None:
        self._manifests.drop(version_id, self._slot)
        self._server.drop_version(version_id)
        self._arenas.release(version_id)
        self._held.pop(version_id, None)

    def _stage(self, version_id: str, layout: StagingLayout, deadline: Deadline) -> _Held:
        with self._arenas.take(layout.nbytes, deadline=deadline) as lease:
            with phase("stage", version_id, self._on_phase):
                digests = stage(layout, lease.memory, threads=self._threads, deadline=deadline)
            with phase("serve", version_id, self._on_phase):
                manifest, digest = self._serve(version_id, layout, lease.arena, b"".join(digests))
            lease.hold(version_id)
        shard = Shard(
            version_id=version_id,
            source_slot_id=self._slot,
            worker_id=self.worker_id,
            tensor_count=layout.tensors,
            total_bytes=layout.payload_bytes,
            manifest_digest=digest,
            manifest_endpoint=self._manifests.endpoint,
        )
        held = _Held(layout.placement, lease.arena, manifest, shard)
        self._held[version_id] = held
        return held

    def _serve(
        self, version_id: str, layout: StagingLayout, arena: Arena, digests: bytes
    ) -> tuple[Manifest, str]:
        """Make the bytes and the manifest available. Nobody knows of them before the offer."""
        table, shards = columns(layout)
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
        # A small one is not worth another question.
        sent = manifest.brief() if len(structure) >= _BRIEF_BYTES else manifest
        encoded = sent.encode()
        digest = self._manifests.put(version_id, self._slot, encoded)
        try:
            blocks = PublishedBlocks(layout.offsets, layout.sizes, digests)
            self._server.serve_version(
                version_id, arena.memory, blocks, structure=structure, manifest=encoded
            )
        except BaseException:
            self._manifests.drop(version_id, self._slot)
            raise
        return manifest, digest

    def _offer(self, version_id: str, held: _Held, deadline: Deadline) -> None:
        """Register the shard. Where no answer comes it may be registered all the same, so the
        arena stays filled: the same call made again, or the release of the version, settles it."""
        with phase("offer", version_id, self._on_phase):
            pause_s = self._settings.poll_s
            forgotten = False
            while True:
                try:
                    control = self._control.within(deadline)
                    if forgotten:
                        self._heartbeat.renew(control)
                    control.create_shard(held.shard)
                    held.offered = True
                    return
                except (ControlUnavailableError, RefitTimeoutError) as error:
                    held.in_doubt = True
                    if deadline.left_s <= pause_s:
                        raise
                    reason = str(error)
                except ControlError as error:
                    # A control plane that was started again without its state, or a process that
                    # was stopped for a while: there is no need to wait for the next heartbeat.
                    if isinstance(error, PreconditionError) and not forgotten:
                        forgotten = True
                        continue
                    if not held.in_doubt and not held.offered:
                        self._drop(version_id)
                    raise
                time.sleep(min(pause_s, deadline.check(reason)))


def _nixl_source() -> NixlSource:
    from refit_mx.transports.nixl import NixlSource

    return NixlSource()
