"""`MxV2RefitReceiver`: one version's tensors into scratch, verified, and then into live weights.

The order is the promise: a lease, the sources that live, a plan, the bytes, their digests, compile
passes, and only then the first byte of a live weight. Whatever fails before leaves the old weights;
what fails after fences the worker.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from types import TracebackType

import torch

from refit_mx.bounded_control import patiently
from refit_mx.compile.base import CompilePass, allocate_outputs
from refit_mx.control.client import ControlClient
from refit_mx.control.heartbeat import Heartbeat
from refit_mx.control.leases import VersionLease
from refit_mx.control.records import WorkerRole
from refit_mx.deadline import Deadline
from refit_mx.errors import (
    DigestMismatchError,
    FencedError,
    PhaseError,
    RefitConfigError,
    SourceLostError,
)
from refit_mx.install import check_install, install_tensors
from refit_mx.manifest import Scalar
from refit_mx.open_receives import OpenReceives
from refit_mx.plan.targets import TargetTensor
from refit_mx.received import ReceivedWeights, RefitStats
from refit_mx.receiving import Receiving
from refit_mx.settings import ReceiverSettings
from refit_mx.spans import OnPhase, phase, tell_bytes
from refit_mx.tensor_types import TensorSpec
from refit_mx.transports.base import Transport

_RENEW_S = 2.0
"""Of one call that renews a lease: what fails is waited for, and the next one comes soon."""
_ALIGNMENT = 256
_PAGE = 4096
Install = Callable[[Mapping[str, torch.Tensor]], None] | Mapping[str, torch.Tensor]


class MxV2RefitReceiver:
    """Receives the slices that one generator rank needs.

    One thread at a time receives. It is a worker of the control plane, with a heartbeat, so that
    the control plane knows who receives. A lease that it holds when its process ends, also by
    SIGTERM, lasts until its own time is over (``ReceiverSettings.lease_ttl_s``): what it was
    reading stays as it is for so long.

    Args:
        model_name: of the control plane.
        control: a client, or the address of the control plane; then `close` closes the client too.
        targets: what this rank needs, names unique.
        transport: ``nixl``, ``shm``, ``tcp``, or ``auto``: shared memory where all sources share
            theirs with this process, else NIXL where all have it, else TCP. Or one that the caller
            made and closes.
        rank: among the receivers of the model. Different ones start with different replicas.
        device: of the scratch memory, such as ``cpu`` or ``cuda:0``.
        settings: time limits and bounds.
        on_phase: called with the name of each phase as it begins: lease, discover, plan, transfer,
            verify, compile, install. What it raises ends the refit.

    Raises:
        RefitConfigError: a name twice, an unknown transport, or one that cannot be used.
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
            raise RefitConfigError(f"{model_name}: two of {len(targets)} targets have one name")
        self._model_name = model_name
        self._settings = settings or ReceiverSettings()
        self._on_phase = on_phase
        self._device = torch.device(device)
        self._lock = threading.Lock()
        self._open = OpenReceives()
        self._fenced = ""
        self._closed = False
        self.worker_id = f"receiver-{rank}-{secrets.token_hex(8)}"
        self._own_control = isinstance(control, str)
        self._control = (
            ControlClient(control, rpc_timeout_s=self._settings.rpc_timeout_s)
            if isinstance(control, str)
            else control
        )
        try:
            self._receiving = Receiving(
                model_name,
                self._control,
                most_scratch_bytes=self._settings.scratch_copies * _scratch_bytes(targets),
                transport=transport,
                rank=rank,
                device=self._device,
                settings=self._settings,
                on_phase=on_phase,
            )
            try:
                self._heartbeat = Heartbeat(
                    self._control,
                    self.worker_id,
                    WorkerRole.GENERATOR,
                    model_name,
                    ttl_s=self._settings.heartbeat_ttl_s,
                )
            except BaseException:
                self._receiving.close()
                raise
        except BaseException:
            if self._own_control:
                self._control.close()
            raise

    @property
    def fenced(self) -> bool:
        """Whether an install failed half way, so that the live weights are a mixture: the worker
        must not serve until a `refit` of all targets succeeds."""
        return bool(self._fenced)

    @property
    def targets(self) -> tuple[TargetTensor, ...]:
        """What this rank needs."""
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
        """Bring a version's tensors into scratch memory, verified. No live weight is touched.

        Args:
            version_id: exactly this version; it has to be READY.
            compile_target_filter: the compile targets that can be taken; None for any.
            required_compile_metadata: what the publishers must say of their bytes.
            names: only these targets; None for all.
            timeout_s: for everything, all attempts included.
            attempts: after a source was lost, or bytes arrived that are not those that were
                published, the rest of the sources is tried.

        Returns:
            The tensors, as a context manager that gives the memory and the lease back.

        Raises:
            VersionNotFoundError, VersionNotReadyError: nothing can be read of this version.
            CompileTargetError: no source was prepared as asked. No byte moved.
            LayoutError: the sources do not hold what is needed. No byte moved.
            SourceLostError: sources died, were restarted or no longer hold the version.
            DigestMismatchError: what arrived is not what was published.
            LeaseLostError: the lease ran out while bytes were moving.
            RefitTimeoutError: the time is over.
            ScratchExhaustedError: too much scratch memory is in use or in quarantine.
            ControlError: the control plane refused, or cannot be reached.
        """
        stats = RefitStats(version_id)
        with self._alone(version_id), phase("receive", version_id) as span:
            started = time.monotonic()
            received = self._receive(
                stats,
                self._named(names),
                Deadline(timeout_s, f"refit of version {version_id}"),
                attempts,
                compile_target_filter,
                required_compile_metadata,
            )
            stats.total_seconds = time.monotonic() - started
            tell_bytes(span, stats.nbytes, stats.total_seconds)
            span.set_attribute("refit.sources", len(stats.sources))
            span.set_attribute("refit.transport", stats.transport)
        return received

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
        """Install a version, or raise and leave the weights as they are.

        Args:
            version_id: exactly this version.
            install: the live weights by name, which are copied into; or a function that is given
                the tensors and installs them itself. The tensors are in scratch memory, which is
                used again afterwards.
            compile_pass: run over the received tensors; its outputs are installed in their place.
            compile_target_filter: as of `receive_weights_scratch`; what the pass accepts if None.
            required_compile_metadata: as of `receive_weights_scratch`.
            names: only these targets, a partial refit; None for all.
            timeout_s: for everything up to the install; it is not cut off.
            attempts: as of `receive_weights_scratch`.

        Raises:
            FencedError: the install failed half way, the live weights are a mixture; or a partial
                refit of a worker that is fenced.
            CompileTargetError: the pass cannot make what is wanted. No byte moved.
            CompileError: the pass met a value that it cannot represent. The old weights stay.
            LayoutError: also where what comes does not fit the live weights. No byte moved.
            RefitError: as `receive_weights_scratch`. The old weights stay.
        """
        targets = self._named(names)
        if self._fenced and len(targets) != len(self._targets):
            raise FencedError(
                f"{self._fenced}; only a refit of all {len(self._targets)} targets ends that, "
                f"not one of {len(targets)}"
            )
        specs = [TensorSpec(target.name, target.dtype, target.shape) for target in targets]
        if compile_pass is not None:
            compile_pass.check(specs)
            if compile_target_filter is None:
                compile_target_filter = compile_pass.accepts
        if isinstance(install, Mapping):
            made = specs if compile_pass is None else compile_pass.output_specs(specs)
            check_install({spec.name: spec for spec in made}, install)
        stats = RefitStats(version_id)
        with self._alone(version_id), phase("receive", version_id) as span:
            started = time.monotonic()
            deadline = Deadline(timeout_s, f"refit of version {version_id}")
            with self._receive(
                stats,
                targets,
                deadline,
                attempts,
                compile_target_filter,
                required_compile_metadata,
            ) as received:
                tensors: Mapping[str, torch.Tensor] = received
                if compile_pass is not None:
                    tensors = self._compile(compile_pass, specs, received, stats)
                    deadline.check("compiling")
                whole = len(targets) == len(self._targets)
                self._install(version_id, install, tensors, stats, whole=whole)
            stats.total_seconds = time.monotonic() - started
            tell_bytes(span, stats.nbytes, stats.total_seconds)
            span.set_attribute("refit.sources", len(stats.sources))
            span.set_attribute("refit.transport", stats.transport)
        return stats

    def close(self) -> None:
        """Say STALE, disconnect, and give the memory back. May be called again.

        Not while another thread receives. Leases on what was received and not given back end with
        it; the tensors stay until they are given back.
        """
        if self._closed:
            return
        self._closed = True
        self._open.close()
        self._heartbeat.close()
        self._receiving.close()
        if self._own_control:
            self._control.close()

    def __enter__(self) -> MxV2RefitReceiver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @contextmanager
    def _alone(self, version_id: str) -> Iterator[None]:
        if self._closed:
            raise PhaseError(f"{self.worker_id} is closed")
        if not self._lock.acquire(blocking=False):
            raise PhaseError(f"{self.worker_id} is receiving in another thread; one at a time")
        try:
            self._open.end_dropped()
            if version_id in self._open:
                raise PhaseError(
                    f"version {version_id} was received and not given back; close it first"
                )
            yield
        finally:
            self._lock.release()

    def _named(self, names: Collection[str] | None) -> list[TargetTensor]:
        if names is None:
            return list(self._targets.values())
        unknown = [name for name in names if name not in self._targets]
        if unknown or not names:
            raise RefitConfigError(
                f"names {', '.join(unknown[:5]) or 'are none'}: expected some of the "
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
        compile_target_filter: AbstractSet[str] | None,
        required_compile_metadata: Mapping[str, Scalar] | None,
    ) -> ReceivedWeights:
        if attempts < 1:
            raise RefitConfigError(f"attempts {attempts}; expected at least 1")
        version_id = stats.version_id
        started = time.monotonic()
        with phase("lease", version_id, self._on_phase):
            # The lease keeps the connection that it was made with.
            made: list[ControlClient] = []

            def take(client: ControlClient) -> VersionLease:
                made[:] = [client]
                ttl_s = self._settings.lease_ttl_s
                return client.lease(version_id, self.worker_id, ttl_s=ttl_s)

            lease = patiently(
                self._control,
                take,
                deadline=deadline,
                patience_s=self._settings.control_patience_s,
                doing="taking a lease",
            )
            (control,) = made
            control.rpc_timeout_s = min(
                self._control.rpc_timeout_s, self._settings.lease_ttl_s / 3, _RENEW_S
            )
        stats.seconds["lease"] += time.monotonic() - started
        self._open.begin(lease, control)
        lost: set[str] = set()
        wrong: list[DigestMismatchError] = []
        try:
            while True:
                stats.attempts += 1
                # Bytes that were wrong once may have been changed on their way.
                twice = _repeated(wrong)
                try:
                    attempt = self._receiving.attempt(
                        stats,
                        targets,
                        deadline,
                        lease,
                        exclude=lost | twice,
                        compile_target_filter=compile_target_filter,
                        required_compile_metadata=required_compile_metadata,
                    )
                    break
                except SourceLostError as error:
                    last = stats.attempts >= attempts or not deadline.left_s
                    # Others may be gone as well; this one answers, and its bytes are wrong.
                    if twice and (last or set(error.worker_ids) <= lost | twice):
                        raise wrong[-1] from error
                    if last:
                        raise
                    # A worker is left out once: where nobody else has its part, it may be back.
                    lost = set(error.worker_ids) - lost
                except DigestMismatchError as error:
                    if stats.attempts >= attempts or not deadline.left_s:
                        raise
                    wrong.append(error)
        except BaseException:
            self._open.end(version_id)
            raise

        def give_back() -> None:
            try:
                attempt.give_back()
            finally:
                self._open.end(version_id)

        return ReceivedWeights(
            attempt.tensors,
            registry=attempt.registry,
            stats=stats,
            on_close=give_back,
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
        with phase("compile", stats.version_id, self._on_phase) as span:
            made = allocate_outputs(compile_pass, specs, self._device)
            compile_pass.run(received, made)
            unchanged = compile_pass.unchanged(specs)
            outputs = {
                spec.name: received[spec.name] if spec.name in unchanged else made[spec.name]
                for spec in compile_pass.output_specs(specs)
            }
            tell_bytes(span, _nbytes(outputs), time.monotonic() - started)
        stats.seconds["compile"] += time.monotonic() - started
        return outputs

    def _install(
        self,
        version_id: str,
        install: Install,
        tensors: Mapping[str, torch.Tensor],
        stats: RefitStats,
        *,
        whole: bool,
    ) -> None:
        started = time.monotonic()
        with phase("install", version_id, self._on_phase) as span:
            try:
                if isinstance(install, Mapping):
                    install_tensors(tensors, install)
                else:
                    install(tensors)
            except BaseException as error:
                self._fenced = (
                    f"the install of version {version_id} failed half way: {type(error).__name__}"
                )
                if not isinstance(error, Exception):
                    raise
                raise FencedError(f"{self._fenced}: {error}") from error
            tell_bytes(span, _nbytes(tensors), time.monotonic() - started)
            if whole:
                self._fenced = ""
        stats.seconds["install"] += time.monotonic() - started


def _scratch_bytes(targets: Sequence[TargetTensor]) -> int:
    """What one buffer for all targets takes, the gaps between them included."""
    return sum(-(-target.nbytes // _ALIGNMENT) * _ALIGNMENT for target in targets) + _PAGE


def _nbytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _repeated(errors: Sequence[DigestMismatchError]) -> set[str]:
    """Workers whose bytes were wrong more than once."""
    found = [worker for error in errors for worker in error.worker_ids]
    return {worker for worker in found if found.count(worker) > 1}
