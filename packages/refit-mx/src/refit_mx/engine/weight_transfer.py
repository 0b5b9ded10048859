"""`MxWeightTransfer`: what a worker does in each phase of an update, in whichever engine it is.

Two halves, as a two-phase commit: `receive` brings a version into scratch, verified and compiled,
and touches nothing live; `finish` copies it over the live weights, which needs nobody else. So a
fleet can wait for all of its workers in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from refit_mx.compile.base import CompilePass, allocate_outputs, compile_pass
from refit_mx.control.access import ControlAccess
from refit_mx.control.client import ControlClient
from refit_mx.cuda_order import wait_for
from refit_mx.deadline import Deadline
from refit_mx.discovery import discover_v2_sources_for_slice
from refit_mx.engine.fence import ModelFence
from refit_mx.engine.infos import MxInitInfo, MxUpdateInfo
from refit_mx.engine.mla import check_mla_weights, refresh_mla_weights
from refit_mx.engine.model_install import ModelInstall, model_install
from refit_mx.engine.phases import Phase, Step, UpdatePhases
from refit_mx.errors import FencedError, LayoutError, PhaseError, RefitConfigError
from refit_mx.install import install_tensors
from refit_mx.manifest import Manifest, Scalar, decode_table
from refit_mx.plan.targets import replicated_target
from refit_mx.received import ReceivedWeights, RefitStats
from refit_mx.receiver import MxV2RefitReceiver
from refit_mx.tensor_types import TensorSpec

LoadWeights = Callable[[list[tuple[str, torch.Tensor]]], object]
"""Takes whole tensors by their checkpoint names, and does the rest itself."""


@dataclass
class _Staged:
    """A version beside the live weights."""

    version_id: str
    received: ReceivedWeights
    tensors: Mapping[str, torch.Tensor]


class MxWeightTransfer:
    """One worker's updates.

    Args:
        model: this rank's; None if weights are given to a function instead, as whole tensors.
        model_name: that is served.
        rank: of this worker in its server.
        device: of the weights, where scratch memory is taken too.
    """

    def __init__(
        self,
        *,
        model: nn.Module | None,
        model_name: str | None,
        rank: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self._model = model
        self._served_name = model_name
        self._rank = rank
        self._device = torch.device(device)
        self._phases = UpdatePhases()
        self._fence = None if model is None else ModelFence(model, self._why_fenced)
        self._info: MxInitInfo | None = None
        self._compiler: CompilePass | None = None
        self._source_targets: frozenset[str] = frozenset()
        self._source_metadata: Mapping[str, Scalar] | None = None
        self._control: ControlClient | None = None
        self._receiver: MxV2RefitReceiver | None = None
        self._install: ModelInstall | None = None
        self._made: dict[str, torch.Tensor] = {}
        self._staged: _Staged | None = None
        self._version_id: str | None = None
        self._stats: RefitStats | None = None

    @property
    def phase(self) -> Phase:
        """Where the worker stands."""
        return self._phases.phase

    @property
    def fenced(self) -> str | None:
        """Why the worker must not serve; None if it may."""
        return self._phases.fenced

    @property
    def version_id(self) -> str | None:
        """The version whose weights are live; None for those of the launch. A partial update leaves
        the others at what they were."""
        return self._version_id

    @property
    def stats(self) -> RefitStats | None:
        """Of the last receive; None if there was none."""
        return self._stats

    def init(self, info: MxInitInfo) -> None:
        """Connect to the control plane. Again with the same info does nothing, so that a caller who
        got no answer can ask again.

        Raises:
            PhaseError: it was initialised with another info, or is shut down.
            RefitConfigError: a wrong value.
        """
        if info == self._info and self._phases.phase not in (Phase.IDLE, Phase.CLOSED):
            return
        with self._phases.step(Step.INIT):
            if not (info.model_name or self._served_name):
                raise RefitConfigError("init_info: model_name is missing, and the engine has none")
            self._choose_compiler(info)
            # Not of the info: who calls the engine's routes must not choose whom it trusts, nor
            # which file or variable it reads and sends.
            self._control = ControlAccess.from_environment().connect(info.control_address)
            self._info = info

    def start(self) -> None:
        """Begin an update.

        Raises:
            PhaseError: not initialised, or an update is under way.
        """
        with self._phases.step(Step.START):
            pass

    def receive(self, info: MxUpdateInfo) -> None:
        """Bring a version into scratch, verified and compiled. Nothing live changes.

        Raises:
            PhaseError: no update was started.
            FencedError: a partial update of a fenced worker.
            RefitError: as `MxV2RefitReceiver.receive_weights_scratch`, and `CompileError`. The
                update has ended then, and the old weights stay.
        """
        if info.abort:
            self.abort()
            return
        if info.check:
            self.check(info.version_id)
            return
        with self._phases.step(Step.RECEIVE):
            if self._phases.fenced is not None and info.names is not None:
                raise FencedError(f"{self._phases.fenced}; only an update of all weights ends that")
            self._staged = self._receive(info)

    def finish(self) -> None:
        """Install what was received.

        Raises:
            PhaseError: nothing was received.
            FencedError: the install failed half way; the worker must not serve until an update
                succeeds. A model that was given refuses to compute until then.
        """
        with self._phases.step(Step.FINISH):
            self._finish(self._install_into_model)

    def receive_into(self, info: MxUpdateInfo, load_weights: LoadWeights) -> None:
        """A whole update in one call, for engines that have no other phases.

        Raises:
            PhaseError, RefitError: as `receive` and `finish`.
        """
        if info.abort or info.check:
            self.receive(info)
            return
        self.start()
        self.receive(info)
        with self._phases.step(Step.FINISH):
            self._finish(lambda tensors: load_weights(list(tensors.items())))

    def check(self, version_id: str) -> None:
        """See that the worker may serve, and that its weights are those of a version.

        Also where it was not initialised: then they are those of its launch.

        Args:
            version_id: empty for the weights of the launch.

        Raises:
            FencedError: the live weights are a mixture.
            PhaseError: they are of another version, a step is under way, or it is shut down.
        """
        self._phases.check()
        if (self._version_id or "") != version_id:
            found, expected = (
                f"version {each}" if each else "the weights of its launch"
                for each in (self._version_id, version_id)
            )
            raise PhaseError(f"check: the worker holds {found}; expected {expected}")

    def abort(self) -> None:
        """End an update, if there is one, and keep the weights.

        Raises:
            PhaseError: not initialised, or a step is under way.
        """
        with self._phases.step(Step.ABORT):
            self._drop()

    def shutdown(self) -> None:
        """Give everything back. May be called again.

        Raises:
            PhaseError: a step is under way.
        """
        with self._phases.step(Step.SHUTDOWN):
            try:
                self._drop()
            finally:
                self._close()

    def _choose_compiler(self, info: MxInitInfo) -> None:
        """What to ask sources for, and the pass that runs over it."""
        compiler = compile_pass(info.compile_target, **info.compile_options)
        self._source_metadata = dict(info.source_metadata) or None
        if info.source_target is None:
            self._source_targets = compiler.accepts
        elif info.source_target in compiler.accepts:
            self._source_targets = frozenset({info.source_target})
        elif info.source_target == compiler.name:
            # The trainer has run the pass; what it promises of its output must match.
            self._source_targets = frozenset({compiler.name})
            self._source_metadata = {**compiler.metadata, **info.source_metadata}
            compiler = compile_pass("hf_raw")
        else:
            raise RefitConfigError(
                f"init_info: source_target {info.source_target!r}; "
                f"{compiler.name} can be made of {', '.join(sorted(compiler.accepts))}, "
                f"or received as {compiler.name}"
            )
        self._compiler = compiler

    def _receive(self, info: MxUpdateInfo) -> _Staged:
        init = self._info
        assert init is not None
        deadline = Deadline(
            info.timeout_s or init.timeout_s, f"update to version {info.version_id}"
        )
        fresh = self._receiver is None
        while True:
            if self._receiver is None:
                self._receiver = self._make_receiver(info.version_id, deadline)
            try:
                received = self._receiver.receive_weights_scratch(
                    info.version_id,
                    compile_target_filter=self._source_targets,
                    required_compile_metadata=self._source_metadata,
                    names=info.names,
                    timeout_s=deadline.check("receiving"),
                    attempts=init.attempts,
                )
                break
            except LayoutError:
                if fresh:
                    raise
                # Another layout than the last version's, perhaps: derived once more.
                self._close_receiver()
                fresh = True
        try:
            tensors = self._compile(received)
            deadline.check("compiling")
        except BaseException:
            received.close()
            raise
        self._stats = received.stats
        return _Staged(info.version_id, received, tensors)

    def _make_receiver(self, version_id: str, deadline: Deadline) -> MxV2RefitReceiver:
        init, compiler = self._info, self._compiler
        assert init is not None
        assert compiler is not None
        assert self._control is not None
        sources = discover_v2_sources_for_slice(
            self._control,
            version_id,
            compile_target_filter=self._source_targets,
            required_compile_metadata=self._source_metadata,
            deadline=deadline,
        )
        published = published_specs(sources.manifests)
        if self._model is None:
            compiler.check(published)
            targets = tuple(replicated_target(spec) for spec in published)
        else:
            check_mla_weights(self._model)  # what could not be derived anew is refused here
            self._install = model_install(self._model, published, compiler)
            targets = self._install.targets
        self._made = {}
        return MxV2RefitReceiver(
            init.model_name or self._served_name or "",
            control=self._control,
            targets=targets,
            transport=init.transport,
            rank=init.rank_offset + self._rank,
            device=self._device,
            settings=init.settings(),
        )

    def _compile(self, received: ReceivedWeights) -> dict[str, torch.Tensor]:
        """Into memory that is kept from version to version."""
        assert self._compiler is not None
        specs = [
            TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in received.items()
        ]
        self._compiler.check(specs)
        outputs = self._compiler.output_specs(specs)
        unchanged = self._compiler.unchanged(specs)
        wanted = [spec.name for spec in outputs if spec.name not in unchanged]
        if any(name not in self._made for name in wanted):
            self._made.update(allocate_outputs(self._compiler, specs, self._device))
        made = {name: self._made[name] for name in wanted}
        if made:
            self._compiler.run(received, made)
            wait_for([self._device])
        return {
            spec.name: received[spec.name] if spec.name in unchanged else made[spec.name]
            for spec in outputs
        }

    def _finish(self, install: Callable[[Mapping[str, torch.Tensor]], object]) -> None:
        staged = self._staged
        assert staged is not None
        try:
            self._phases.touch_live_weights()
            if self._fence is not None:
                self._fence.close()
            try:
                install(staged.tensors)
            except Exception as error:
                raise FencedError(
                    f"the install of version {staged.version_id} failed half way: "
                    f"{type(error).__name__}: {error}"
                ) from error
            if self._fence is not None:
                self._fence.open()
            self._version_id = staged.version_id
        finally:
            self._drop()

    def _why_fenced(self) -> str:
        return self._phases.fenced or "an install is under way"

    def _install_into_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        assert self._install is not None
        assert self._model is not None
        install_tensors(tensors, self._install.live)
        refresh_mla_weights(self._model)

    def _drop(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.received.close()

    def _close_receiver(self) -> None:
        receiver, self._receiver = self._receiver, None
        self._install = None
        if receiver is not None:
            receiver.close()

    def _close(self) -> None:
        self._made = {}
        self._close_receiver()
        control, self._control = self._control, None
        if control is not None:
            control.close()


def published_specs(manifests: Iterable[Manifest]) -> Sequence[TensorSpec]:
    """The global tensors of some sources, each once, in the order of their tables.

    Raises:
        ProtocolError: a table is not one.
        LayoutError: two sources disagree about a tensor.
    """
    specs: dict[str, TensorSpec] = {}
    for table in {manifest.table_digest: manifest.table for manifest in manifests}.values():
        decoded = decode_table(table)
        for name, dtype, shape in zip(decoded.names, decoded.dtypes, decoded.shapes, strict=True):
            spec = TensorSpec(name, dtype, tuple(shape))
            if specs.setdefault(name, spec) != spec:
                raise LayoutError(
                    f"{name}: one source publishes {dtype} of shape {tuple(shape)}, another one "
                    f"{specs[name].dtype} of shape {specs[name].shape}"
                )
    return tuple(specs.values())
