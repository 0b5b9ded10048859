"""`MxWeightTransfer`: the updates of one worker, for vLLM's engine interface.

A fetch runs in a thread while the model serves the old version. The tensors are verified and
compiled in scratch memory; only `finish` changes live weights. For vLLM's sessions see
`refit_mx.engine.vllm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from refit_mx.compile.base import CompilePass, allocate_outputs, compile_pass, run_pass
from refit_mx.concurrency import in_daemon_thread
from refit_mx.control.access import ControlAccess
from refit_mx.control.client import ControlClient
from refit_mx.deadline import Deadline
from refit_mx.engine.fence import ModelFence, gather_from_ranks
from refit_mx.engine.infos import MxInitInfo, MxUpdateInfo
from refit_mx.engine.layerwise import LayerwiseReload
from refit_mx.errors import FencedError, LayoutError, PhaseError, RefitConfigError, RefitError
from refit_mx.layout import TensorSpec
from refit_mx.manifest.format import Manifest, Scalar
from refit_mx.memory.cuda import synchronize
from refit_mx.plan.tensor_columns import TensorColumns, merge_tables
from refit_mx.receive.discovery import discover_v2_sources_for_slice
from refit_mx.receive.received import ReceivedWeights, RefitStats
from refit_mx.receive.receiver import MxV2RefitReceiver
from refit_mx.spans import phase

_MAX_NAMED = 5
_RANKS_S = 120.0
"""Time limit for the other ranks to finish the same step."""


@dataclass(frozen=True)
class _Sources:
    """The sources to fetch from, and the pass to run on what they publish."""

    compiler: CompilePass
    targets: frozenset[str]
    metadata: Mapping[str, Scalar] | None


@dataclass
class _Layout:
    """The tensors that this rank fetches; a dropped fetch that still runs keeps its layout."""

    sources: _Sources
    receiver: MxV2RefitReceiver
    attempts: int
    published: frozenset[str]
    """Names that were published when the layout was derived."""
    compiled: dict[str, torch.Tensor] = field(default_factory=dict)
    """Memory for the outputs of the pass, which all versions reuse."""


@dataclass(frozen=True)
class _Fetched:
    """A version in scratch memory, ready to be installed."""

    received: ReceivedWeights
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Fetch:
    """A running or finished fetch of a version."""

    version_id: str
    deadline: Deadline
    future: Future[_Fetched]

    @property
    def succeeded(self) -> bool:
        """True if it has received the version."""
        return self.future.done() and self.future.exception() is None

    @property
    def failed(self) -> bool:
        """True if it has failed."""
        return self.future.done() and self.future.exception() is not None

    @property
    def success_text(self) -> str:
        """Description of the fetch once it has succeeded."""
        return f"version {self.version_id}"

    def __str__(self) -> str:
        """Describe the state; equal on all ranks if all have received the version."""
        if self.succeeded:
            return self.success_text
        if self.failed:
            return f"version {self.version_id} has failed: {_text(self.future.exception())}"
        return f"version {self.version_id} is still being fetched"

    def drop(self) -> None:
        """Release what it received, or will receive."""
        self.future.add_done_callback(_close_fetched)


class MxWeightTransfer:
    """Updates of one worker, called in the worker's thread only."""

    # Any: vLLM's objects.
    def __init__(self, model: Any, model_config: Any, *, rank: int, device: torch.device) -> None:
        self._served_name: str = model_config.model
        self._rank = rank
        self._device = device
        self._reload = LayerwiseReload(model, model_config)
        self._fence = ModelFence(model, lambda: self.fenced or "an install is in progress")
        self._info: MxInitInfo | None = None
        self._sources: _Sources | None = None
        self._control: ControlClient | None = None
        self._layout: _Layout | None = None
        self._fetch: _Fetch | None = None
        self._dropped: Future[None] | None = None
        self._status_only = False
        self._error: str | None = None
        self.version_id: str | None = None
        """Version of the live weights; None for those of the launch."""
        self.fenced: str | None = None
        """Reason why the worker must not serve; None if it may."""
        self.stats: RefitStats | None = None
        """Statistics of the last successful fetch; None if there was none."""

    def init(self, info: MxInitInfo) -> None:
        """Connect to a control plane; do nothing if connected with the same info.

        With a different info, for example of a restarted trainer, drop the fetch and reconnect. The
        live weights and the fence stay.

        Raises:
            RefitConfigError: a value is wrong, or the token or the certificates cannot be read.
            RefitError: another rank failed.
        """
        if info == self._info:
            return
        self._status_only = info.errors == "status"
        # Unset until all ranks succeed: after a failure, the next call must reconnect on all ranks.
        self._info = None
        with self._raise_on_all_ranks("init_transfer_engine"):
            sources = self._choose_sources(info)
            # The info has no certificates or token: a caller of the engine's routes must not choose
            # which certificates to trust, or which file or variable to read and send.
            control = ControlAccess.from_environment().connect(info.control_address)
            self.release()
            self._sources = sources
            self._control = control
        self._info = None if self._error else info

    def begin(self, info: MxUpdateInfo) -> None:
        """Begin to fetch a version, unless that version is being or has been fetched.

        The layout is derived here, in the worker's thread, since deriving it runs the model's
        loaders. A failure is in `status`, and `join` raises it.
        """
        fetching = self._fetch
        if fetching is not None and fetching.version_id == info.version_id and not fetching.failed:
            return
        previous = self.drop()
        init = self._info
        deadline = Deadline(self._timeout_of(info), f"update to version {info.version_id}")

        def fetch(layout: _Layout) -> _Fetched:
            if previous is not None:
                wait([previous], deadline.check("waiting for the previous fetch"))
            return self._receive(layout, info.version_id, deadline)

        try:
            if init is None:
                raise PhaseError("update_weights: call init_weight_transfer_engine first")
            if self._layout is None:
                self._layout = self._derive_layout(init, info.version_id, deadline)
            future = in_daemon_thread("refit-fetch", partial(fetch, self._layout))
        except Exception as error:  # noqa: BLE001 - `join` raises it, on all ranks
            future = Future()
            future.set_exception(error)
        self._fetch = _Fetch(info.version_id, deadline, future)

    def _timeout_of(self, info: MxUpdateInfo) -> float:
        return info.timeout_s or (self._info or MxInitInfo).timeout_s

    def join(self, info: MxUpdateInfo) -> None:
        """Wait until all ranks have fetched a version; begin if needed. Collective.

        Raises:
            RefitError: the fetch failed on this or another rank. No live weight has changed.
        """
        # A rank that has the version waits for the fetches of the others.
        limit_s = self._timeout_of(info) + _RANKS_S
        with self._raise_on_all_ranks(f"the fetch of version {info.version_id}", limit_s):
            self.begin(info)
            fetch = self._fetch
            assert fetch is not None
            try:
                fetch.future.result(fetch.deadline.left_s)
            except TimeoutError:
                if fetch.failed:
                    raise
                raise fetch.deadline.error("fetching") from None

    def finish(self) -> None:
        """Install the fetched version on all ranks; do nothing without a fetch. Collective.

        Raises:
            PhaseError: a rank has not received its version, or the ranks have received different
                versions. No live weight has changed.
            FencedError: the install failed on a rank. No rank serves until an update succeeds.
            RefitError: a rank did not answer, so this rank installed nothing.
        """
        fetch = self._fetch
        state = "no fetch" if fetch is None else str(fetch)  # read once: the fetch may complete
        try:
            try:
                states = gather_from_ranks(state, _RANKS_S)
            except RefitError as error:
                self._error = _text(error)
                if self._status_only:
                    return
                raise
            if len(set(states)) > 1 or (fetch is not None and state != fetch.success_text):
                with self._raise_on_all_ranks("finish_weight_update"):
                    each = "; ".join(dict.fromkeys(states))
                    raise PhaseError(f"nothing was installed; states of the ranks: {each}")
            elif fetch is not None:
                self._install(fetch.version_id, fetch.future.result().tensors)
        finally:
            self.drop()

    def _install(self, version_id: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self._fence.close()
        self.fenced = f"the install of version {version_id} is in progress"
        try:
            with self._raise_on_all_ranks("the install", always=True), phase("install", version_id):
                self._reload.install(tensors)
                synchronize([self._device])
        except Exception as error:  # vLLM's loaders raise anything
            self.fenced = f"the install of version {version_id} failed part way: {self._error}"
            if self._status_only:
                return
            raise FencedError(self.fenced) from error
        self.version_id, self.fenced = version_id, None
        self._fence.open()

    @contextmanager
    def _raise_on_all_ranks(
        self, what: str, timeout_s: float = _RANKS_S, *, always: bool = False
    ) -> Iterator[None]:
        """Make all ranks raise if the block fails on one of them; collective.

        With ``errors: status`` a failure is only recorded, on the rank where it happens, unless
        ``always`` is set. The other ranks have ``timeout_s`` to reach the end of the block.

        Raises:
            RefitError: this rank's failure, or an error that names the failed or missing ranks.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below, on all ranks
            failure = error
        self._error = None if failure is None else _text(failure)
        if self._status_only and not always:
            return
        answers: Sequence[str] = ()
        try:
            answers = gather_from_ranks(self._error or "", timeout_s)
        except RefitError as error:
            failure = failure or error
            self._error = _text(failure)
        if failure is not None:
            raise failure
        failed = {rank: answer for rank, answer in enumerate(answers) if answer}
        if failed:
            named = "; ".join(f"rank {rank}: {answer}" for rank, answer in failed.items())
            self._error = f"{what} failed on {len(failed)} of {len(answers)} ranks: {named}"
            raise RefitError(self._error)

    def drop(self) -> Future[None] | None:
        """Drop the fetch, and keep the weights.

        Returns:
            A future for the end of the last dropped fetch, which may still run; None if no fetch
            was ever dropped.
        """
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            if fetch.failed:
                # The published layout may have changed: derive it again. An earlier fetch may still
                # use the old one.
                self._drop_layout(self._dropped)
            fetch.drop()
            ended = self._dropped = Future()
            fetch.future.add_done_callback(lambda _: ended.set_result(None))
        return self._dropped

    def release(self) -> None:
        """Drop the fetch and close all connections; `init` may follow. Weights and fence stay."""
        running = self.drop()
        self._drop_layout(running)
        self._error = None
        self._info = None
        control, self._control = self._control, None
        if control is not None:
            _after(running, control.close)

    def status(self) -> dict[str, Any]:
        """Return the state of this rank in JSON types; see `refit_mx.engine.status`."""
        return {
            "rank": self._rank,
            "initialized": self._info is not None,
            "fenced": self.fenced,
            "error": self._error,
            "version_id": self.version_id,
            "fetch": None if self._fetch is None else _fetch_status(self._fetch),
        }

    @staticmethod
    def _choose_sources(info: MxInitInfo) -> _Sources:
        compiler = compile_pass(info.compile_target, **info.compile_options)
        metadata: Mapping[str, Scalar] | None = dict(info.source_metadata) or None
        if info.source_target is None:
            targets = compiler.accepts
        elif info.source_target in compiler.accepts:
            targets = frozenset({info.source_target})
        elif info.source_target == compiler.name:
            # The trainer has run the pass, so its output must match the pass's metadata.
            targets = frozenset({compiler.name})
            metadata = {**compiler.metadata, **info.source_metadata}
            compiler = compile_pass("hf_raw")
        else:
            raise RefitConfigError(
                f"init_info: source_target {info.source_target!r}; "
                f"{compiler.name} can be compiled from {', '.join(sorted(compiler.accepts))}, "
                f"or received as {compiler.name}"
            )
        return _Sources(compiler, targets, metadata)

    def _derive_layout(self, init: MxInitInfo, version_id: str, deadline: Deadline) -> _Layout:
        """Derive what this rank needs, and create a receiver for it.

        Raises:
            RefitError: no source matches, or its tensors do not fit the pass or the model.
        """
        sources, control = self._sources, self._control
        assert sources is not None
        assert control is not None
        discovered = discover_v2_sources_for_slice(
            control,
            version_id,
            compile_target_filter=sources.targets,
            required_compile_metadata=sources.metadata,
            deadline=deadline,
        )
        published = published_specs(discovered.manifests)
        targets = self._reload.trace(published)
        specs = [target.spec for target in targets]
        sources.compiler.check(specs)
        self._reload.check({spec.name: spec for spec in sources.compiler.output_specs(specs)})
        receiver = MxV2RefitReceiver(
            init.model_name or self._served_name,
            control=control,
            targets=targets,
            transport=init.transport,
            rank=init.rank_offset + self._rank,
            device=self._device,
            settings=init.settings(),
        )
        names = frozenset(spec.name for spec in published)
        return _Layout(sources, receiver, init.attempts, names)

    def _receive(self, layout: _Layout, version_id: str, deadline: Deadline) -> _Fetched:
        """Fetch, verify and compile; in a thread."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        received = layout.receiver.receive_weights_scratch(
            version_id,
            compile_target_filter=layout.sources.targets,
            required_compile_metadata=layout.sources.metadata,
            timeout_s=deadline.check("receiving"),
            attempts=layout.attempts,
        )
        try:
            unknown = sorted(received.published - layout.published)
            if unknown:
                raise LayoutError(
                    f"{len(unknown)} tensors were not published when the layout was derived, and "
                    f"are not loaded: {', '.join(unknown[:_MAX_NAMED])}; the next update derives "
                    "the layout again"
                )
            tensors = self._compile(layout, received)
            deadline.check("compiling")
        except BaseException:  # release the scratch memory in any case
            received.close()
            raise
        self.stats = received.stats
        return _Fetched(received, tensors)

    def _compile(self, layout: _Layout, received: ReceivedWeights) -> dict[str, torch.Tensor]:
        compiler = layout.sources.compiler
        specs = [
            TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in received.items()
        ]
        compiler.check(specs)
        if not layout.compiled:
            layout.compiled = allocate_outputs(compiler, specs, self._device)
        outputs = run_pass(compiler, specs, received, layout.compiled)
        if layout.compiled:
            synchronize([self._device])
        return outputs

    def _drop_layout(self, running: Future[None] | None) -> None:
        layout, self._layout = self._layout, None
        if layout is not None:
            _after(running, layout.receiver.close)


def _after(running: Future[None] | None, close: Callable[[], None]) -> None:
    """Close something that a running fetch may use, after the fetch."""
    if running is None or running.done():
        close()
    else:
        running.add_done_callback(lambda _: close())


def _close_fetched(future: Future[_Fetched]) -> None:
    if future.exception() is None:
        future.result().received.close()


def _fetch_status(fetch: _Fetch) -> dict[str, Any]:
    status: dict[str, Any] = {"version_id": fetch.version_id, "state": "running", "error": None}
    if fetch.succeeded:
        stats = fetch.future.result().received.stats
        status |= {"state": "received", "bytes": stats.nbytes, "seconds": stats.seconds}
    elif fetch.failed:
        error = fetch.future.exception()
        assert error is not None
        retryable = bool(getattr(error, "retryable", False))
        status |= {"state": "failed", "error": _text(error), "retryable": retryable}
    return status


def _text(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


def published_specs(manifests: Iterable[Manifest]) -> Sequence[TensorSpec]:
    """Return the global tensors of sources, each once, in the order of their tables.

    Raises:
        ProtocolError: a table cannot be decoded.
        LayoutError: two sources disagree about a tensor.
    """
    distinct = {manifest.table_digest: manifest for manifest in manifests}.values()
    workers = [manifest.worker_id for manifest in distinct]
    tables = [TensorColumns.decode(manifest.table, manifest.worker_id) for manifest in distinct]
    tensors, _, _ = merge_tables(tables, workers)
    return [tensors.spec(row) for row in range(len(tensors.names))]
