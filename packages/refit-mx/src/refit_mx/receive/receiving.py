"""One attempt to receive a version: discover, plan, fetch, verify. No live weight changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from refit_mx.concurrency import CallGroup, map_calls
from refit_mx.control.client import ControlClient
from refit_mx.control.leases import VersionLease
from refit_mx.control.retry import retry_idempotent
from refit_mx.deadline import Deadline, StallDeadline
from refit_mx.errors import (
    LayoutError,
    ProtocolError,
    RefitConfigError,
    RefitTimeoutError,
    SourceLostError,
)
from refit_mx.manifest.format import Manifest, Registry
from refit_mx.manifest.reads import ReadTable
from refit_mx.memory.arena import Arena
from refit_mx.memory.cuda import synchronize
from refit_mx.plan.planner import Plan
from refit_mx.plan.shards import ShardTable
from refit_mx.plan.target_tensors import TargetTensor
from refit_mx.receive.discovery import (
    MAX_CONCURRENT_CALLS,
    SourceFilter,
    SourceSet,
    missing_slots,
    select_sources,
)
from refit_mx.receive.received import RefitStats, timed
from refit_mx.receive.source_cache import SourceCache
from refit_mx.receive.transport_choice import Transports
from refit_mx.receive.verify import Verifier
from refit_mx.settings import ReceiverSettings
from refit_mx.spans import OnPhase, phase, record_bytes
from refit_mx.transports.base import SourceReads, Transport
from refit_mx.transports.nixl_library import has_rdma
from refit_mx.transports.source_client import SourceClient

_VERIFY_THREADS = 2
_PROBE_S = 1.0
_Result = TypeVar("_Result")


@dataclass(frozen=True, eq=False)
class Attempt:
    """The result of a successful attempt: verified tensors in scratch memory by target name.

    ``published`` has the names of all tensors that the version's sources hold. ``release`` makes
    the scratch memory available to the next receive; ``discard`` withdraws it, for tensors that may
    still be in use.
    """

    tensors: Mapping[str, torch.Tensor]
    registry: Registry | None
    published: AbstractSet[str]
    release: Callable[[], None]
    discard: Callable[[], None]


class Receiving:
    """The parts of a receiver that move bytes: transports, scratch memory and the last plan.

    Arguments are those of `refit_mx.receive.receiver.MxV2RefitReceiver`; ``max_scratch_bytes`` is
    the limit of the scratch memory of one transport.

    Raises:
        RefitConfigError: the transport is unknown or not available.
    """

    def __init__(
        self,
        model_name: str,
        control: ControlClient,
        *,
        max_scratch_bytes: int,
        transport: Transport | str,
        rank: int,
        device: torch.device,
        settings: ReceiverSettings,
        on_phase: OnPhase | None,
    ) -> None:
        self._transports = Transports(
            transport, max_scratch_bytes=max_scratch_bytes, device=device, settings=settings
        )
        self._model_name = model_name
        self._control = control
        self._rank = rank
        self._settings = settings
        self._on_phase = on_phase
        self._cache = SourceCache(seed=rank)
        self._asking = ThreadPoolExecutor(MAX_CONCURRENT_CALLS, thread_name_prefix="refit-asking")
        self._verifying = ThreadPoolExecutor(_VERIFY_THREADS, thread_name_prefix="refit-verify")

    def attempt(
        self,
        stats: RefitStats,
        targets: Sequence[TargetTensor],
        deadline: Deadline,
        lease: VersionLease,
        *,
        exclude: Collection[str],
        source_filter: SourceFilter,
    ) -> Attempt:
        """Receive once, and add to ``stats``; the caller must hold the lease during the call.

        After a failure the scratch memory is released or quarantined.

        Raises:
            RefitError: as in `refit_mx.receive.receiver.MxV2RefitReceiver.receive_weights_scratch`.
        """
        version_id = stats.version_id
        with timed(stats, "discover"), phase("discover", version_id, self._on_phase) as span:
            sources = self._discover(version_id, deadline, exclude, source_filter)
            span.set_attribute("refit.sources", len(sources.manifests))
        with timed(stats, "plan"), phase("plan", version_id, self._on_phase) as span:
            shards, unsplit = self._plan(sources, targets, deadline)
            span.set_attribute("refit.bytes", unsplit.nbytes)
            used = [shards.manifests[source] for source, _ in unsplit.source_reads]
            transport, pool = self._transports.for_sources(used)
            plan, checks = self._cache.split_at_blocks(
                shards, targets, unsplit, transport.max_read_bytes
            )
        deadline.check("planning")
        stats.transport = transport.name
        stats.sources = tuple(manifest.worker_id for manifest in used)
        scratch = pool.take(max(1, plan.scratch_bytes), deadline)
        fetch_started = time.monotonic()
        try:
            verifier = Verifier(shards, plan, checks, scratch.memory)
            self._move(stats, plan, used, transport, scratch, verifier, deadline)
            self._verify(stats, plan, used, verifier, deadline, lease, fetch_started)
        except SourceLostError as error:
            pool.release(scratch)
            lost = self._handle_loss(error, transport, used, deadline)
            if lost is error:
                raise
            raise lost from error
        except BaseException:  # an interrupt also leaves reads in progress
            pool.release(scratch)
            raise

        def release() -> None:
            # The caller's install may still be queued on the device; the next read would not wait
            # for it.
            synchronize([scratch.memory.device])
            pool.release(scratch)

        return Attempt(
            _views(targets, plan, scratch.memory),
            sources.registry,
            shards.tensor_rows.keys(),
            release,
            partial(pool.discard, scratch),
        )

    def close(self) -> None:
        """Disconnect and free the memory. May be called again."""
        self._transports.close()
        self._asking.shutdown()
        self._verifying.shutdown()
        self._cache.close()

    def _discover(
        self,
        version_id: str,
        deadline: Deadline,
        exclude: Collection[str],
        source_filter: SourceFilter,
    ) -> SourceSet:
        """Find sources from the version's shards; request the version only to explain an error."""
        shards = self._ask(lambda client: client.list_shards(version_id), deadline)
        try:
            return select_sources(
                version_id,
                shards,
                self._model_name,
                source_filter=source_filter,
                deadline=deadline,
                exclude=exclude,
                source_timeout_s=self._settings.manifest_timeout_s,
                cache=self._cache,
                threads=self._asking,
                rank=self._rank,
            )
        except SourceLostError:
            version = self._ask(lambda client: client.get_version(version_id), deadline)
            if version.model_name != self._model_name:
                raise RefitConfigError(
                    f"version {version_id} is of model {version.model_name!r}; "
                    f"this receiver's is {self._model_name!r}"
                ) from None
            raise

    def _ask(self, call: Callable[[ControlClient], _Result], deadline: Deadline) -> _Result:
        retry_s = self._settings.control_retry_s
        return retry_idempotent(self._control, call, deadline=deadline, retry_s=retry_s)

    def _plan(
        self, sources: SourceSet, targets: Sequence[TargetTensor], deadline: Deadline
    ) -> tuple[ShardTable, Plan]:
        shards = self._cache.table(sources.manifests)
        try:
            return shards, self._cache.plan(shards, targets)
        except LayoutError as error:
            version = self._ask(lambda client: client.get_version(sources.version_id), deadline)
            missing = missing_slots(version, sources.manifests)
            if not missing:
                raise
            raise SourceLostError(
                f"{error}; no source of version {sources.version_id} answers for "
                f"{len(missing)} slots: {', '.join(missing[:5])}",
                tuple(sources.excluded),
            ) from error

    def _handle_loss(
        self,
        error: SourceLostError,
        transport: Transport,
        used: Sequence[Manifest],
        deadline: Deadline,
    ) -> SourceLostError:
        """Return the error for lost sources.

        Lost sources that answer are healthy: NIXL failed, and the next attempt reads them over TCP.
        """
        if not self._transports.can_fall_back_to_tcp(transport):
            return error
        named = [source for source in used if source.worker_id in error.worker_ids]
        answering = map_calls(self._asking, lambda source: _is_answering(source, deadline), named)
        healthy = [source for source, answers in zip(named, answering, strict=True) if answers]
        if not healthy:
            return error
        self._transports.fall_back_to_tcp(healthy)
        workers = {source.worker_id for source in healthy}
        return SourceLostError(
            f"{error}; {len(healthy)} of {len(named)} answer, and are read over TCP from now on",
            tuple(worker for worker in error.worker_ids if worker not in workers),
        )

    def _move(
        self,
        stats: RefitStats,
        plan: Plan,
        used: Sequence[Manifest],
        transport: Transport,
        scratch: Arena,
        verifier: Verifier,
        deadline: Deadline,
    ) -> None:
        """Fetch, and verify what has arrived while more arrives."""
        deadline.check("waiting for scratch memory")
        stall = StallDeadline(
            deadline, self._settings.stall_timeout_s, f"fetch of version {stats.version_id}"
        )
        outstanding = [len(reads) for _, reads in plan.source_reads]
        lock = threading.Lock()
        source_reads = [
            SourceReads(manifest, reads)
            for manifest, (_, reads) in zip(used, plan.source_reads, strict=True)
        ]
        overlapped = plan.nbytes >= self._settings.min_overlapped_verify_bytes
        row_checks = CallGroup(self._verifying)
        # If this process copied the bytes by CPU, they are still in that core's cache.
        copied = scratch.memory.device.type == "cpu" and (transport.name == "shm" or not has_rdma())

        def on_done(index: int, first: int, stop: int) -> None:
            stall.record_progress()
            with lock:
                outstanding[index] -= stop - first
            if not overlapped:
                return
            if copied:
                verifier.check_rows(index, first, stop)
            else:
                row_checks.start(partial(verifier.check_rows, index, first, stop))

        try:
            transfer = phase("transfer", stats.version_id, self._on_phase)
            with timed(stats, "fetch"), transfer as span:
                read = transport.read(source_reads, scratch.memory, deadline=stall, on_done=on_done)
                record_bytes(span, read.nbytes, read.seconds)
                span.set_attribute("refit.transport", transport.name)
                span.set_attribute("refit.sources", len(used))
            stats.nbytes = read.nbytes
            stats.fetched_bytes += read.nbytes
            with timed(stats, "verify"):
                if not row_checks.join(deadline.left_s or 0.001):
                    raise deadline.error("verifying what has arrived")
                row_checks.check()
        except RefitTimeoutError as error:
            if not deadline.left_s:
                raise
            raise self._stalled(stats.version_id, used, outstanding, deadline, error) from error
        finally:
            row_checks.end()
        if not overlapped:
            with timed(stats, "verify"):
                for index, (_, reads) in enumerate(plan.source_reads):
                    verifier.check_rows(index, 0, len(reads))

    def _stalled(
        self,
        version_id: str,
        used: Sequence[Manifest],
        outstanding: Sequence[int],
        deadline: Deadline,
        error: RefitTimeoutError,
    ) -> SourceLostError:
        """Return the error for silent sources, else for those with outstanding reads."""
        answering = map_calls(self._asking, lambda source: _is_answering(source, deadline), used)
        late = [source for source, answers in zip(used, answering, strict=True) if not answers]
        why = "do not answer"
        if not late:
            late = [source for source, reads in zip(used, outstanding, strict=True) if reads > 0]
            why = "answer but send nothing"
        workers = tuple(source.worker_id for source in late)
        return SourceLostError(
            f"version {version_id}: {len(workers)} of {len(used)} sources {why}: "
            f"{', '.join(workers[:5])}; {error}",
            workers,
        )

    def _verify(
        self,
        stats: RefitStats,
        plan: Plan,
        used: Sequence[Manifest],
        verifier: Verifier,
        deadline: Deadline,
        lease: VersionLease,
        fetch_started: float,
    ) -> None:
        """Verify the remaining bytes by digests requested from the sources, and check the lease.

        Most bytes were verified while others arrived. So the recorded rate covers fetch and
        verification: all bytes over the time since ``fetch_started``, the monotonic time at which
        the fetch began.
        """
        verify = phase("verify", stats.version_id, self._on_phase)
        with timed(stats, "verify"), verify as span:
            allowed = min(self._settings.digest_timeout_s, deadline.check("verifying"))
            limit = Deadline(allowed, f"digests of version {stats.version_id}")

            def check(index: int) -> int:
                source = used[index]

                def ask(rest: ReadTable) -> bytes:
                    client = SourceClient(
                        source, connect_timeout_s=self._settings.connect_timeout_s
                    )
                    with closing(client):
                        return client.digests(rest, version_id=stats.version_id, deadline=limit)

                try:
                    return verifier.check_rest(index, ask)
                except RefitTimeoutError as error:
                    if not deadline.left_s:
                        raise
                    raise SourceLostError(str(error), (source.worker_id,)) from None

            unverified = [index for index in range(len(used)) if verifier.has_rest(index)]
            stats.source_verified_bytes = sum(map_calls(self._asking, check, unverified))
            lease.check()
            record_bytes(span, plan.nbytes, time.monotonic() - fetch_started)


def _is_answering(source: Manifest, deadline: Deadline) -> bool:
    """Return whether a source confirms within `_PROBE_S` that it holds the version."""
    allowed = Deadline(min(_PROBE_S, max(deadline.left_s, 0.001)), "asking a source")
    client = SourceClient(source, connect_timeout_s=_PROBE_S)
    try:
        with closing(client):
            client.check_held(version_id=source.version_id, deadline=allowed)
    except (SourceLostError, RefitTimeoutError, ProtocolError):
        return False
    return True


def _views(
    targets: Sequence[TargetTensor], plan: Plan, memory: torch.Tensor
) -> dict[str, torch.Tensor]:
    views = {}
    for target, offset in zip(targets, plan.offsets.tolist(), strict=True):
        part = memory[offset : offset + target.nbytes]
        views[target.name] = part.view(getattr(torch, target.dtype)).view(target.shape)
    return views
