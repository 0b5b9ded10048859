"""One attempt to receive a version: discover, plan, fetch, verify. Nothing live is known here."""

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

from refit_mx.bounded_control import patiently
from refit_mx.control.client import ControlClient
from refit_mx.control.leases import VersionLease
from refit_mx.cuda_order import wait_for
from refit_mx.deadline import Deadline, StallDeadline
from refit_mx.discovery import MOST_AT_ONCE, SourceSet, answering_sources, missing_slots
from refit_mx.errors import (
    LayoutError,
    ProtocolError,
    RefitConfigError,
    RefitTimeoutError,
    SourceLostError,
)
from refit_mx.kept_plan import KeptPlan
from refit_mx.manifest import Manifest, Registry, Scalar
from refit_mx.manifest_service import ManifestClient
from refit_mx.plan.planner import Plan
from refit_mx.plan.shards import ShardTable
from refit_mx.plan.targets import TargetTensor
from refit_mx.reads import ReadTable
from refit_mx.received import RefitStats
from refit_mx.scratch import Scratch
from refit_mx.settings import ReceiverSettings
from refit_mx.side_by_side import Beside, each
from refit_mx.source_client import SourceClient
from refit_mx.spans import OnPhase, phase, tell_bytes
from refit_mx.transport_choice import Transports
from refit_mx.transports.base import Fetch, Transport
from refit_mx.transports.nixl_library import has_rdma
from refit_mx.verify import Verifier

_VERIFY_THREADS = 2
_PROBE_S = 1.0
_Found = TypeVar("_Found")


@dataclass(frozen=True, eq=False)
class Attempt:
    """What an attempt that succeeded leaves.

    Attributes:
        tensors: target name to verified tensor in scratch memory.
        registry: how the publishers prepared the bytes.
        give_back: of the scratch memory.
        discard: the scratch memory, where tensors in it may still be used.
    """

    tensors: Mapping[str, torch.Tensor]
    registry: Registry | None
    give_back: Callable[[], None]
    discard: Callable[[], None]


class Receiving:
    """The parts of a receiver that move bytes: transports, scratch memory, the last plan.

    Args:
        model_name: whose versions.
        control: the control plane.
        most_scratch_bytes: of all scratch memory of one transport.
        transport: ``nixl``, ``shm``, ``tcp``, ``auto`` or one that the caller closes.
        rank: the seed of plans.
        device: of the scratch memory.
        settings: time limits and bounds.
        on_phase: called as each phase begins.

    Raises:
        RefitConfigError: an unknown transport, or one that cannot be used here.
    """

    def __init__(
        self,
        model_name: str,
        control: ControlClient,
        *,
        most_scratch_bytes: int,
        transport: Transport | str,
        rank: int,
        device: torch.device,
        settings: ReceiverSettings,
        on_phase: OnPhase | None,
    ) -> None:
        self._transports = Transports(
            transport, most_scratch_bytes=most_scratch_bytes, device=device, settings=settings
        )
        self._model_name = model_name
        self._control = control
        self._rank = rank
        self._settings = settings
        self._on_phase = on_phase
        self._kept = KeptPlan(seed=rank)
        self._manifests = ManifestClient(settings.most_manifest_bytes)
        self._asking = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="refit-asking")
        self._verifying = ThreadPoolExecutor(_VERIFY_THREADS, thread_name_prefix="refit-verify")

    def attempt(
        self,
        stats: RefitStats,
        targets: Sequence[TargetTensor],
        deadline: Deadline,
        lease: VersionLease,
        *,
        exclude: Collection[str],
        compile_target_filter: AbstractSet[str] | None,
        required_compile_metadata: Mapping[str, Scalar] | None,
    ) -> Attempt:
        """Receive once; on failure the scratch memory is given back or goes into quarantine.

        Args:
            stats: added to.
            targets: what is needed.
            deadline: for everything.
            lease: on the version, held until the caller is done.
            exclude: worker ids not to read from.
            compile_target_filter: as `discover_v2_sources_for_slice`.
            required_compile_metadata: as `discover_v2_sources_for_slice`.

        Raises:
            RefitError: as `refit_mx.receiver.MxV2RefitReceiver.receive_weights_scratch`.
        """
        version_id = stats.version_id
        started = time.monotonic()
        with phase("discover", version_id, self._on_phase) as span:
            sources = self._discover(
                version_id,
                deadline,
                exclude=exclude,
                compile_target_filter=compile_target_filter,
                required_compile_metadata=required_compile_metadata,
            )
            span.set_attribute("refit.sources", len(sources.manifests))
        stats.seconds["discover"] += time.monotonic() - started
        started = time.monotonic()
        with phase("plan", version_id, self._on_phase) as span:
            shards, whole = self._plan(sources, targets, deadline)
            span.set_attribute("refit.bytes", whole.nbytes)
            used = [shards.manifests[source] for source, _ in whole.fetches]
            transport, pool = self._transports.that_reads(used)
            plan, checks = self._kept.in_pieces(shards, targets, whole, transport.piece_bytes)
        stats.seconds["plan"] += time.monotonic() - started
        deadline.check("planning")
        stats.transport = transport.name
        stats.sources = tuple(manifest.worker_id for manifest in used)
        scratch = pool.take(max(1, plan.scratch_bytes), deadline)
        moving = time.monotonic()
        try:
            verifier = Verifier(shards, plan, checks, scratch.memory)
            self._move(stats, plan, used, transport, scratch, verifier, deadline)
            self._verify(stats, plan, used, verifier, deadline, lease, moving)
        except SourceLostError as error:
            pool.quarantine(scratch)
            told = self._lost(error, transport, used, deadline)
            if told is error:
                raise
            raise told from error
        except BaseException:
            pool.quarantine(scratch)
            raise

        def give_back() -> None:
            # An install that the caller made may be queued, and the next read does not wait for it.
            wait_for([scratch.memory.device])
            pool.give_back(scratch)

        return Attempt(
            _views(targets, plan, scratch.memory),
            sources.registry,
            give_back,
            partial(pool.discard, scratch),
        )

    def close(self) -> None:
        """Disconnect and free the memory. May be called again."""
        self._transports.close()
        self._asking.shutdown()
        self._verifying.shutdown()
        self._manifests.close()

    def _discover(
        self,
        version_id: str,
        deadline: Deadline,
        *,
        exclude: Collection[str],
        compile_target_filter: AbstractSet[str] | None,
        required_compile_metadata: Mapping[str, Scalar] | None,
    ) -> SourceSet:
        """Under a lease the shards alone are asked for, and the version only to say what is
        wrong."""
        shards = self._ask(lambda client: client.list_shards(version_id), deadline)
        try:
            return answering_sources(
                version_id,
                shards,
                self._model_name,
                compile_target_filter=compile_target_filter,
                required_compile_metadata=required_compile_metadata,
                deadline=deadline,
                exclude=exclude,
                source_timeout_s=self._settings.manifest_timeout_s,
                manifests=self._manifests,
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

    def _ask(self, call: Callable[[ControlClient], _Found], deadline: Deadline) -> _Found:
        return patiently(
            self._control,
            call,
            deadline=deadline,
            patience_s=self._settings.control_patience_s,
        )

    def _plan(
        self, sources: SourceSet, targets: Sequence[TargetTensor], deadline: Deadline
    ) -> tuple[ShardTable, Plan]:
        shards = self._kept.table_of(sources)
        try:
            return shards, self._kept.whole(shards, targets)
        except LayoutError as error:
            version = self._ask(lambda client: client.get_version(sources.version_id), deadline)
            missing = missing_slots(version, sources.manifests)
            if not missing:
                raise
            raise SourceLostError(
                f"{error}; of version {sources.version_id} no source answers for the slots "
                f"{', '.join(missing[:5])} ({len(missing)} in all)",
                tuple(sources.left_out),
            ) from error

    def _lost(
        self,
        error: SourceLostError,
        transport: Transport,
        used: Sequence[Manifest],
        deadline: Deadline,
    ) -> SourceLostError:
        """What to raise when sources were lost: those that answer are well, it is NIXL that fails,
        and the next attempt reads from them over TCP."""
        if not self._transports.may_use_tcp_instead_of(transport):
            return error
        named = [source for source in used if source.worker_id in error.worker_ids]
        answering = each(self._asking, lambda source: _is_answering(source, deadline), named)
        well = [source for source, answers in zip(named, answering, strict=True) if answers]
        if not well:
            return error
        self._transports.read_over_tcp(well)
        workers = {source.worker_id for source in well}
        return SourceLostError(
            f"{error}; {len(well)} of {len(named)} answer, and are read over TCP from now on",
            tuple(worker for worker in error.worker_ids if worker not in workers),
        )

    def _move(
        self,
        stats: RefitStats,
        plan: Plan,
        used: Sequence[Manifest],
        transport: Transport,
        scratch: Scratch,
        verifier: Verifier,
        deadline: Deadline,
    ) -> None:
        """Fetch, and verify what has arrived while more arrives."""
        deadline.check("waiting for scratch memory")
        stall = StallDeadline(
            deadline, self._settings.stall_timeout_s, f"fetch of version {stats.version_id}"
        )
        owed = [len(reads) for _, reads in plan.fetches]
        telling = threading.Lock()
        fetches = [
            Fetch(manifest, reads) for manifest, (_, reads) in zip(used, plan.fetches, strict=True)
        ]
        started = time.monotonic()
        beside = plan.nbytes >= self._settings.verify_beside_bytes
        checking = Beside(self._verifying)
        # Where a processor of ours has copied the bytes, they are still in its cache.
        copied = scratch.memory.device.type == "cpu" and (transport.name == "shm" or not has_rdma())

        def on_done(fetch: int, first: int, stop: int) -> None:
            stall.moved()
            with telling:
                owed[fetch] -= stop - first
            if not beside:
                return
            if copied:
                verifier.check_rows(fetch, first, stop)
            else:
                checking.start(partial(verifier.check_rows, fetch, first, stop))

        try:
            with phase("transfer", stats.version_id, self._on_phase) as span:
                done = transport.fetch(fetches, scratch.memory, deadline=stall, on_done=on_done)
                tell_bytes(span, done.nbytes, done.seconds)
                span.set_attribute("refit.transport", transport.name)
                span.set_attribute("refit.sources", len(used))
            stats.seconds["fetch"] += time.monotonic() - started
            stats.nbytes = done.nbytes
            started = time.monotonic()
            if not checking.join(deadline.left_s or 0.001):
                raise deadline.error("verifying what has arrived")
            checking.check()
            stats.seconds["verify"] += time.monotonic() - started
        except RefitTimeoutError as error:
            if not deadline.left_s:
                raise
            raise self._stalled(stats.version_id, used, owed, deadline, error) from error
        finally:
            checking.end()
        if not beside:
            started = time.monotonic()
            for fetch, (_, reads) in enumerate(plan.fetches):
                verifier.check_rows(fetch, 0, len(reads))
            stats.seconds["verify"] += time.monotonic() - started

    def _stalled(
        self,
        version_id: str,
        used: Sequence[Manifest],
        owed: Sequence[int],
        deadline: Deadline,
        error: RefitTimeoutError,
    ) -> SourceLostError:
        """Whom a fetch waited for: sources that do not answer, else those that owe something."""
        answering = each(self._asking, lambda source: _is_answering(source, deadline), used)
        late = [source for source, answers in zip(used, answering, strict=True) if not answers]
        why = "do not answer"
        if not late:
            late = [source for source, reads in zip(used, owed, strict=True) if reads > 0]
            why = "answer and send nothing"
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
        moving: float,
    ) -> None:
        """Ask the sources for the digests that no manifest has; and whether the lease held.

        Most bytes were verified while others arrived, so the speed that is told is that of moving
        and verifying, since the time ``moving`` of the monotonic clock.
        """
        started = time.monotonic()
        limit = self._settings.digest_timeout_s
        with phase("verify", stats.version_id, self._on_phase) as span:
            allowed = min(limit, deadline.check("verifying"))
            asking = Deadline(allowed, f"digests of version {stats.version_id}")

            def check(fetch: int) -> int:
                source = used[fetch]

                def ask(rest: ReadTable) -> bytes:
                    client = SourceClient(
                        source, connect_timeout_s=self._settings.connect_timeout_s
                    )
                    with closing(client):
                        return client.digests(rest, version_id=stats.version_id, deadline=asking)

                try:
                    return verifier.check_rest(fetch, ask)
                except RefitTimeoutError as error:
                    if not deadline.left_s:
                        raise
                    raise SourceLostError(str(error), (source.worker_id,)) from None

            unsure = [fetch for fetch in range(len(used)) if verifier.has_rest(fetch)]
            stats.asked_bytes = sum(each(self._asking, check, unsure))
            lease.check()
            tell_bytes(span, plan.nbytes, time.monotonic() - moving)
        stats.seconds["verify"] += time.monotonic() - started


def _is_answering(source: Manifest, deadline: Deadline) -> bool:
    """Whether a source says, within `_PROBE_S`, that it holds the version."""
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
