"""Helpers for tests of publishers and receivers.

Imports internals: skips ask what the machine supports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from refit_processes import SHAPES, fsdp_shards, targets_of, weights

from refit_mx import (
    ControlClient,
    Deadline,
    EmbeddedControlServer,
    MxV2RefitReceiver,
    MxV2TrainingPublisher,
    Transport,
)
from refit_mx.memory.mapping import shared_memory_missing
from refit_mx.transports import nixl, nixl_library, shm, tcp
from refit_mx.transports.base import ReadStats, SourceReads

MODEL = "tiny"
NIXL_MISSING = nixl_library.nixl_obstacle()
NO_SHARED_MEMORY = shared_memory_missing()
needs_nixl = pytest.mark.skipif(
    NIXL_MISSING is not None, reason=f"needs the package nixl-cu12: {NIXL_MISSING}"
)
needs_shm = pytest.mark.skipif(
    NO_SHARED_MEMORY is not None,
    reason=f"needs a Linux kernel with memfd_create, and /proc: {NO_SHARED_MEMORY}",
)
TRANSPORTS = [
    "tcp",
    pytest.param("nixl", marks=needs_nixl),
    pytest.param("shm", marks=needs_shm),
]


def new_transport(name: str, **options: Any) -> Transport:
    """Return a receiver's transport, which splits large fetches between two threads."""
    if name == "tcp":
        return tcp.TcpTransport(**options)
    if name == "nixl":
        return nixl.NixlTransport(lanes=2, **options)
    return shm.ShmTransport(lanes=2, **options)


def small_batches(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Make every transport of this process fetch in small batches, with all its threads."""
    for module in (nixl, shm, tcp):
        patch.setattr(module, "BATCH_BYTES", nbytes)
    for module in (nixl, shm):
        patch.setattr(module, "LANE_BYTES", 0)


class World:
    """A control plane, and the publishers and receivers that a test starts."""

    def __init__(self, stack: ExitStack, **server: Any) -> None:
        self._stack = stack
        self.server = stack.enter_context(EmbeddedControlServer(**server))
        self.control = stack.enter_context(ControlClient(self.server.address, rpc_timeout_s=10))

    def publisher(self, slot: str = "fsdp-0", **settings: Any) -> MxV2TrainingPublisher:
        settings = {"control": self.server.address, "transports": ["tcp"], **settings}
        return self._stack.enter_context(MxV2TrainingPublisher(MODEL, slot, **settings))

    def receiver(self, targets: Sequence[Any] | None = None, **settings: Any) -> MxV2RefitReceiver:
        settings = {"control": self.server.address, "transport": "tcp", **settings}
        wanted = targets_of() if targets is None else targets
        return self._stack.enter_context(MxV2RefitReceiver(MODEL, targets=wanted, **settings))

    def version(self, version_id: str, slots: Sequence[str] = ("fsdp-0",)) -> None:
        self.control.create_version(MODEL, slots, idempotency_key=version_id, version_id=version_id)

    def publish(
        self, publishers: Sequence[MxV2TrainingPublisher], version_id: str, seed: int
    ) -> dict[str, torch.Tensor]:
        """Create a version and publish a seed's weights like FSDP; return the full weights."""
        self.version(version_id, [f"fsdp-{rank}" for rank in range(len(publishers))])
        tensors = weights(seed)
        for rank, publisher in enumerate(publishers):
            publisher.publish(version_id, fsdp_shards(tensors, len(publishers), rank))
        return tensors

    def publish_replicas(
        self, version_id: str, state: Any, count: int, **settings: Any
    ) -> list[MxV2TrainingPublisher]:
        """Create a version of one slot, and publish all of it from new publishers."""
        self.version(version_id)
        publishers = [self.publisher(**settings) for _ in range(count)]
        for publisher in publishers:
            publisher.publish(version_id, state)
        return publishers

    def publish_state(self, version_id: str, state: Any, **settings: Any) -> MxV2TrainingPublisher:
        """Create a version of one slot, and publish all of it from a new publisher."""
        return self.publish_replicas(version_id, state, 1, **settings)[0]

    def state(self, version_id: str) -> str:
        return self.control.get_version(version_id).state.name


@contextmanager
def a_world(**server: Any) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, **server)


class Wrapped:
    """A real transport whose subclasses replace ``read``."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        for attribute in ("name", "max_read_bytes", "register", "unregister", "busy", "close"):
            setattr(self, attribute, getattr(inner, attribute))


class Meddling(Wrapped):
    """A transport that calls functions of a test before, during and after a fetch."""

    def __init__(
        self,
        inner: Transport,
        *,
        before: Callable[[Sequence[SourceReads]], None] | None = None,
        after: Callable[[torch.Tensor, Sequence[SourceReads]], None] | None = None,
        stalling: Callable[[Sequence[SourceReads], Deadline, Any], None] | None = None,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(inner)
        self._before, self._after = before, after
        self._stalling, self._between = stalling, between
        self.fetched: list[tuple[str, ...]] = []
        self.nbytes = 0

    def read(
        self,
        source_reads: Sequence[SourceReads],
        scratch: torch.Tensor,
        *,
        deadline: Deadline,
        on_done: Callable[[int, int, int], None],
    ) -> ReadStats:
        self.fetched.append(tuple(each.source.worker_id for each in source_reads))
        if self._before is not None:
            self._before(source_reads)
        if self._stalling is not None:
            self._stalling(source_reads, deadline, on_done)
        stats = self._inner.read(source_reads, scratch, deadline=deadline)
        self.nbytes += stats.nbytes
        if self._after is not None:
            self._after(scratch, source_reads)
        for index, each in enumerate(source_reads):
            for row in range(len(each.reads)):
                self._between()
                deadline.check("receiving")
                on_done(index, row, row + 1)
        return stats


class Halfway(Wrapped):
    """A transport that calls back when the first batch of a fetch has arrived."""

    def __init__(self, inner: Any, reached: Callable[[str], None]) -> None:
        super().__init__(inner)
        self._reached = reached

    def read(
        self,
        source_reads: Sequence[SourceReads],
        scratch: torch.Tensor,
        *,
        deadline: Deadline,
        on_done: Callable[[int, int, int], None],
    ) -> ReadStats:
        lock, first_part = threading.Lock(), iter(["part"])

        def arrived(index: int, first: int, stop: int) -> None:
            with lock:  # other batches wait while the first one is reported
                for phase in first_part:
                    self._reached(phase)
            on_done(index, first, stop)

        return self._inner.read(source_reads, scratch, deadline=deadline, on_done=arrived)


class Hook:
    """A phase hook that calls an action once, at one phase."""

    def __init__(self) -> None:
        self.phase = ""
        self.action: Callable[[], None] = lambda: None

    def at(self, phase: str, action: Callable[[], None]) -> None:
        self.phase, self.action = phase, action

    def __call__(self, phase: str) -> None:
        if phase == self.phase:
            self.phase = ""
            self.action()


def zeros(shapes: dict[str, tuple[str, tuple[int, ...]]] = SHAPES) -> dict[str, torch.Tensor]:
    """Return live weights before the first refit."""
    return {
        name: torch.zeros(shape, dtype=getattr(torch, dtype))
        for name, (dtype, shape) in shapes.items()
    }


@contextmanager
def exported() -> Iterator[Callable[[], Sequence[Any]]]:
    """Collect the spans that end during the block; skip the test without the SDK."""
    pytest.importorskip("opentelemetry.sdk", reason="needs the package opentelemetry-sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        trace.set_tracer_provider(TracerProvider())
    provider = trace.get_tracer_provider()
    assert isinstance(provider, TracerProvider)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield exporter.get_finished_spans
    exporter.shutdown()


@contextmanager
def verbose() -> Iterator[None]:
    """Request a span for every phase."""
    from opentelemetry import baggage, context

    token = context.attach(baggage.set_baggage("rl.verbose", "1"))
    try:
        yield
    finally:
        context.detach(token)
