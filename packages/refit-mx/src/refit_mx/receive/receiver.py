"""`MxV2RefitReceiver`: receives a version's tensors into scratch, verifies and installs them.

The order is fixed: lease, discovery, plan, fetch, digests, compile pass, and only then the first
byte of a live weight. A failure before the install leaves the old weights; a failed install fences
the worker.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager

import torch

from refit_mx.closing import Closeable
from refit_mx.compile.base import CompilePass, allocate_outputs, run_pass
from refit_mx.control.client import ControlClient
from refit_mx.control.heartbeat import Heartbeat
from refit_mx.control.records import WorkerRole
from refit_mx.control.retry import retry_idempotent
from refit_mx.deadline import Deadline
from refit_mx.errors import (
    DigestMismatchError,
    FencedError,
    PhaseError,
    RefitConfigError,
    SourceLostError,
)
from refit_mx.layout import TensorSpec
from refit_mx.manifest.format import Scalar
from refit_mx.memory.arena import PAGE_BYTES
from refit_mx.plan.target_columns import ALIGNMENT
from refit_mx.plan.target_tensors import TargetTensor
from refit_mx.receive.discovery import SourceFilter
from refit_mx.receive.install import check_install, install_tensors
from refit_mx.receive.received import OpenReceives, ReceivedWeights, RefitStats, timed
from refit_mx.receive.receiving import Receiving
from refit_mx.settings import ReceiverSettings
from refit_mx.spans import OnPhase, phase, record_bytes
from refit_mx.transports.base import Transport

Install = Callable[[Mapping[str, torch.Tensor]], None] | Mapping[str, torch.Tensor]


class MxV2RefitReceiver(Closeable):
    """Receiver of the slices that one generator rank needs.

    One thread at a time may receive. The receiver is a worker of the control plane with a
    heartbeat, so that the control plane knows the receivers. If the process ends with a lease, even
    by SIGTERM, the lease lasts until it expires (``ReceiverSettings.lease_ttl_s``). Until then its
    version stays readable.

    Args:
        model_name: model in the control plane.
        control: client of the control plane, or its address; then the receiver creates and closes
            the client.
        targets: tensors that this rank needs, with unique names.
        transport: ``nixl``, ``shm``, ``tcp``, or ``auto``: shared memory if all sources share
            theirs with this process, else NIXL if all have it, else TCP. Or an instance, which the
            caller closes.
        rank: rank among the model's receivers. Different ranks start with different replicas.
        device: device of the scratch memory, such as ``cpu`` or ``cuda:0``.
        settings: time limits and bounds.
        on_phase: callback for each phase as it begins: lease, discover, plan, transfer, verify,
            compile, install. An error that it raises ends the refit.

    Raises:
        RefitConfigError: a name is repeated, or the transport is unknown or not available.
        ControlUnavailableError: the control plane cannot be reached.
    """

    def __init__(
        self,
        model_name: str,
        *,
        control: ControlClient | str,
        targets: Sequence[TargetTensor],
        transport: Transport | str = "auto",
        rank: int = 0,
        device: torch.device | str = "cpu",
        settings: ReceiverSettings | None = None,
        on_phase: OnPhase | None = None,
    ) -> None:
        self._targets = {target.name: target for target in targets}
        if len(self._targets) != len(targets):
            raise RefitConfigError(
                f"{model_name}: two of {len(targets)} targets have the same name"
            )
        self._model_name = model_name
        self._settings = settings or ReceiverSettings()
        self._on_phase = on_phase
        self._device = torch.device(device)
        self._lock = threading.Lock()
        self._open = OpenReceives()
        self._fenced = ""
        self._closed = False
        self.worker_id = f"receiver-{rank}-{secrets.token_hex(8)}"
        with ExitStack() as stack:
            if isinstance(control, str):
                control = ControlClient(control, rpc_timeout_s=self._settings.rpc_timeout_s)
                stack.callback(control.close)
            self._control = control
            self._receiving = Receiving(
                model_name,
                control,
                max_scratch_bytes=self._settings.scratch_copies * _scratch_bytes(targets),
                transport=transport,
                rank=rank,
                device=self._device,
                settings=self._settings,
                on_phase=on_phase,
            )
            stack.callback(self._receiving.close)
            self._heartbeat = Heartbeat(
                control,
                self.worker_id,
                WorkerRole.GENERATOR,
                model_name,
                ttl_s=self._settings.heartbeat_ttl_s,
            )
            stack.callback(self._heartbeat.close)
            stack.callback(self._open.close)
            self._stack = stack.pop_all()

    @property
    def fenced(self) -> bool:
        """True if an install failed part way, so that the live weights are a mixture.

        The worker must not serve until a `refit` of all targets succeeds.
        """
        return bool(self._fenced)

    @property
    def targets(self) -> tuple[TargetTensor, ...]:
        """Tensors that this rank needs."""
        return tuple(self._targets.values())

    def receive_weights_scratch(
        self,
        version_id: str,
        *,
        compile_target_filter: AbstractSet[str] | None = None,
        required_compile_metadata: Mapping[str, Scalar] | None = None,
        names: Collection[str] | None = None,
        timeout_s: float = 60.0,
        attempts: int = 3,
    ) -> ReceivedWeights:
        """Receive a version's tensors into scratch memory and verify them; change no live weight.

        Args:
            version_id: exactly this version, which must be READY.
            compile_target_filter: accepted compile targets; None for any.
            required_compile_metadata: values that the publishers' metadata must have.
            names: only these targets; None for all.
            timeout_s: time limit of all attempts.
            attempts: number of attempts. An attempt avoids the sources that the previous attempt
                lost, and sources that have sent wrong bytes twice. If it fails only because it
                avoided lost sources, it does not count, and the next attempt uses them again.

        Returns:
            The tensors, as a context manager that releases the memory and the lease.

        Raises:
            VersionNotFoundError, VersionNotReadyError: the version cannot be read.
            CompileTargetError: no source matches the filter. No byte moved.
            LayoutError: the sources do not hold what is needed. No byte moved.
            SourceLostError: sources died, restarted or no longer hold the version.
            DigestMismatchError: received bytes differ from the published ones.
            LeaseLostError: the lease expired while bytes were moving.
            RefitTimeoutError: the time limit passed.
            ScratchExhaustedError: too much scratch memory is in use or in quarantine.
            ControlError: the control plane refused a call, or cannot be reached.
        """
        stats = RefitStats(version_id)
        with self._recorded(stats):
            return self._receive(
                stats,
                self._targets_of(names),
                Deadline(timeout_s, f"refit of version {version_id}"),
                attempts,
                SourceFilter(compile_target_filter, required_compile_metadata),
            )

    def refit(
        self,
        version_id: str,
        install: Install,
        compile_pass: CompilePass | None = None,
        *,
        compile_target_filter: AbstractSet[str] | None = None,
        required_compile_metadata: Mapping[str, Scalar] | None = None,
        names: Collection[str] | None = None,
        timeout_s: float = 60.0,
        attempts: int = 3,
    ) -> RefitStats:
        """Install a version; if this raises before the install, the weights are unchanged.

        Args:
            version_id: exactly this version.
            install: live weights by name, to copy into; or a function that gets the tensors and
                installs them. The tensors are in scratch memory that is reused afterwards.
            compile_pass: pass over the received tensors; its outputs are installed instead.
            compile_target_filter: as in `receive_weights_scratch`, but with a ``compile_pass``,
                None means the targets that the pass accepts.
            required_compile_metadata: as in `receive_weights_scratch`.
            names: only these targets, a partial refit; None for all.
            timeout_s: time limit up to the install, which is not interrupted.
            attempts: as in `receive_weights_scratch`.

        Raises:
            FencedError: the install failed part way, and the live weights are a mixture; or this is
                a partial refit of a fenced worker.
            CompileTargetError: the pass cannot produce the targets. No byte moved.
            CompileError: the pass met a value that it cannot represent. The old weights stay.
            LayoutError: the sources do not hold what is needed, or the targets do not match the
                live weights. No byte moved.
            RefitError: as in `receive_weights_scratch`. The old weights stay.
        """
        targets = self._targets_of(names)
        if self._fenced and len(targets) != len(self._targets):
            raise FencedError(
                f"{self._fenced}; only a refit of all {len(self._targets)} targets repairs this, "
                f"but this refit has {len(targets)}"
            )
        specs = [target.spec for target in targets]
        if compile_pass is not None:
            compile_pass.check(specs)
            if compile_target_filter is None:
                compile_target_filter = compile_pass.accepts
        if isinstance(install, Mapping):
            outputs = specs if compile_pass is None else compile_pass.output_specs(specs)
            check_install({spec.name: spec for spec in outputs}, install)
        source_filter = SourceFilter(compile_target_filter, required_compile_metadata)
        stats = RefitStats(version_id)
        with self._recorded(stats):
            deadline = Deadline(timeout_s, f"refit of version {version_id}")
            with self._receive(stats, targets, deadline, attempts, source_filter) as received:
                tensors: Mapping[str, torch.Tensor] = received
                if compile_pass is not None:
                    tensors = self._compile(compile_pass, specs, received, stats)
                    deadline.check("compiling")
                complete = len(targets) == len(self._targets)
                self._install(version_id, install, tensors, stats, complete=complete)
        return stats

    def close(self) -> None:
        """Mark the worker STALE, disconnect, and free the memory. May be called again.

        Do not call it while another thread receives. This also ends the leases on unreleased
        weights; their tensors stay until released.
        """
        if self._closed:
            return
        self._closed = True
        self._stack.close()

    @contextmanager
    def _recorded(self, stats: RefitStats) -> Iterator[None]:
        """Exclude other threads, and record the receive in a span and in ``stats``."""
        with self._exclusive(stats.version_id), phase("receive", stats.version_id) as span:
            started = time.monotonic()
            yield
            stats.total_seconds = time.monotonic() - started
            record_bytes(span, stats.nbytes, stats.total_seconds)
            span.set_attribute("refit.sources", len(stats.sources))
            span.set_attribute("refit.transport", stats.transport)

    @contextmanager
    def _exclusive(self, version_id: str) -> Iterator[None]:
        if self._closed:
            raise PhaseError(f"{self.worker_id} is closed")
        if not self._lock.acquire(blocking=False):
            raise PhaseError(f"{self.worker_id} is receiving in another thread; one at a time")
        try:
            self._open.end_dropped()
            if version_id in self._open:
                raise PhaseError(
                    f"version {version_id} was received and not released; close its weights first"
                )
            yield
        finally:
            self._lock.release()

    def _targets_of(self, names: Collection[str] | None) -> list[TargetTensor]:
        if names is None:
            return list(self._targets.values())
        unknown = [name for name in names if name not in self._targets]
        if unknown or not names:
            raise RefitConfigError(
                f"names: {', '.join(unknown[:5]) or 'none given'}; expected names of the "
                f"{len(self._targets)} targets, such as {', '.join(list(self._targets)[:3])}"
            )
        wanted = set(names)
        return [target for name, target in self._targets.items() if name in wanted]

    def _receive(
        self,
        stats: RefitStats,
        targets: Sequence[TargetTensor],
        deadline: Deadline,
        attempts: int,
        source_filter: SourceFilter,
    ) -> ReceivedWeights:
        if attempts < 1:
            raise RefitConfigError(f"attempts {attempts}; expected at least 1")
        version_id = stats.version_id
        ttl_s = self._settings.lease_ttl_s
        lost: set[str] = set()
        wrong: list[DigestMismatchError] = []
        try:
            with timed(stats, "lease"), phase("lease", version_id, self._on_phase):
                lease = retry_idempotent(
                    self._control,
                    lambda client: self._open.begin(
                        client.lease(version_id, self.worker_id, ttl_s=ttl_s)
                    ),
                    deadline=deadline,
                    retry_s=self._settings.control_retry_s,
                    doing="taking a lease",
                )
            while True:
                stats.attempts += 1
                # Wrong bytes once may be a transmission fault; exclude a source that sent them
                # twice.
                repeated = _workers_with_repeated_mismatches(wrong)
                try:
                    attempt = self._receiving.attempt(
                        stats,
                        targets,
                        deadline,
                        lease,
                        exclude=lost | repeated,
                        source_filter=source_filter,
                    )
                    break
                except SourceLostError as error:
                    if lost and set(error.worker_ids) <= lost:
                        stats.attempts -= 1  # only the excluded sources were missing
                    last = stats.attempts >= attempts or not deadline.left_s
                    # If only sources with wrong bytes still answer, report the wrong bytes.
                    if repeated and (last or set(error.worker_ids) <= lost | repeated):
                        raise wrong[-1] from error
                    if last:
                        raise
                    # Exclude a lost worker from one attempt only: it may be back, and perhaps no
                    # other worker has its part.
                    lost = set(error.worker_ids) - lost
                except DigestMismatchError as error:
                    if stats.attempts >= attempts or not deadline.left_s:
                        raise
                    wrong.append(error)
        except BaseException:  # end the lease also on an interrupt
            self._open.end(version_id)
            raise

        def release() -> None:
            try:
                attempt.release()
            finally:
                self._open.end(version_id)

        return ReceivedWeights(
            attempt.tensors,
            registry=attempt.registry,
            published=attempt.published,
            stats=stats,
            on_close=release,
            on_drop=self._open.dropping(version_id, attempt.discard),
        )

    def _compile(
        self,
        compile_pass: CompilePass,
        specs: Sequence[TensorSpec],
        received: Mapping[str, torch.Tensor],
        stats: RefitStats,
    ) -> dict[str, torch.Tensor]:
        started = time.monotonic()
        with timed(stats, "compile"), phase("compile", stats.version_id, self._on_phase) as span:
            compiled = allocate_outputs(compile_pass, specs, self._device)
            outputs = run_pass(compile_pass, specs, received, compiled)
            record_bytes(span, _nbytes(outputs), time.monotonic() - started)
        return outputs

    def _install(
        self,
        version_id: str,
        install: Install,
        tensors: Mapping[str, torch.Tensor],
        stats: RefitStats,
        *,
        complete: bool,
    ) -> None:
        started = time.monotonic()
        with timed(stats, "install"), phase("install", version_id, self._on_phase) as span:
            try:
                if isinstance(install, Mapping):
                    install_tensors(tensors, install)
                else:
                    install(tensors)
            except BaseException as error:  # an interrupt also leaves a mixture
                self._fenced = (
                    f"the install of version {version_id} failed part way: {type(error).__name__}"
                )
                if not isinstance(error, Exception):
                    raise
                raise FencedError(f"{self._fenced}: {error}") from error
            record_bytes(span, _nbytes(tensors), time.monotonic() - started)
            if complete:
                self._fenced = ""


def _scratch_bytes(targets: Sequence[TargetTensor]) -> int:
    """Return the bytes of one buffer for all targets, with the gaps between them."""
    return sum(-(-target.nbytes // ALIGNMENT) * ALIGNMENT for target in targets) + PAGE_BYTES


def _nbytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _workers_with_repeated_mismatches(errors: Sequence[DigestMismatchError]) -> set[str]:
    """Return the workers whose bytes were wrong more than once."""
    workers = [worker for error in errors for worker in error.worker_ids]
    return {worker for worker in workers if workers.count(worker) > 1}
