"""What the tests of publishers and receivers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from refit_processes import SHAPES, fsdp_shards, targets_of, weights

from refit_mx.control.client import ControlClient
from refit_mx.control.embedded import EmbeddedControlServer
from refit_mx.deadline import Deadline
from refit_mx.publisher import MxV2TrainingPublisher
from refit_mx.receiver import MxV2RefitReceiver
from refit_mx.shared_memory import shared_memory_missing
from refit_mx.spans import VERBOSE
from refit_mx.transports import nixl, shm, tcp
from refit_mx.transports.base import Fetch, FetchStats, Transport
from refit_mx.transports.nixl import NixlTransport, nixl_available
from refit_mx.transports.shm import ShmTransport
from refit_mx.transports.tcp import TcpTransport

MODEL = "tiny"
NIXL_MISSING = nixl_available()
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
    """A receiver's, which carries out large fetches in two threads."""
    if name == "tcp":
        return TcpTransport(**options)
    if name == "nixl":
        return NixlTransport(lanes=2, **options)
    return ShmTransport(lanes=2, **options)


def small_batches(patch: pytest.MonkeyPatch, nbytes: int) -> None:
    """Let every transport of this process bring few bytes at a time, in all its threads."""
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
        """Create a version and publish the weights of a seed, as FSDP does."""
        self.version(version_id, [f"fsdp-{rank}" for rank in range(len(publishers))])
        whole = weights(seed)
        for rank, publisher in enumerate(publishers):
            publisher.publish(version_id, fsdp_shards(whole, len(publishers), rank))
        return whole

    def state(self, version_id: str) -> str:
        return self.control.get_version(version_id).state.name


@contextmanager
def a_world(**server: Any) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack, **server)


class Meddling:
    """A real transport, with something done to the scratch memory behind it, or before it."""

    def __init__(
        self,
        inner: Transport,
        *,
        before: Callable[[Sequence[Fetch]], None] | None = None,
        after: Callable[[torch.Tensor, Sequence[Fetch]], None] | None = None,
        stalling: Callable[[Sequence[Fetch], Deadline, Any], None] | None = None,
        between: Callable[[], None] | None = None,
    ) -> None:
        self._inner = inner
        self._before = before
        self._after = after
        self._stalling = stalling
        self._between = between
        self.name = inner.name
        self.piece_bytes = inner.piece_bytes
        self.fetched: list[tuple[str, ...]] = []
        self.nbytes = 0

    def register(self, scratch: torch.Tensor) -> None:
        self._inner.register(scratch)

    def unregister(self, scratch: torch.Tensor) -> None:
        self._inner.unregister(scratch)

    def busy(self, scratch: torch.Tensor) -> bool:
        return self._inner.busy(scratch)

    def close(self) -> None:
        self._inner.close()

    def fetch(
        self,
        fetches: Sequence[Fetch],
        scratch: torch.Tensor,
        *,
        deadline: Deadline,
        on_done: Callable[[int, int, int], None] | None = None,
    ) -> FetchStats:
        self.fetched.append(tuple(fetch.source.worker_id for fetch in fetches))
        if self._before is not None:
            self._before(fetches)
        if self._stalling is not None:
            self._stalling(fetches, deadline, on_done)
        stats = self._inner.fetch(fetches, scratch, deadline=deadline)
        self.nbytes += stats.nbytes
        if self._after is not None:
            self._after(scratch, fetches)
        for index, fetch in enumerate(fetches):
            for row in range(len(fetch.reads)) if on_done is not None else ():
                if self._between is not None:
                    self._between()
                    deadline.check("receiving")
                on_done(index, row, row + 1)
        return stats


class Halfway:
    """A real transport of small batches; calls back when the first of them has arrived."""

    def __init__(self, inner: Any, reached: Callable[[str], None]) -> None:
        self._inner = inner
        self._reached = reached
        self.name = inner.name
        self.piece_bytes = inner.piece_bytes
        for method in ("register", "unregister", "busy", "close"):
            setattr(self, method, getattr(inner, method))

    def fetch(
        self,
        fetches: Sequence[Fetch],
        scratch: torch.Tensor,
        *,
        deadline: Deadline,
        on_done: Callable[[int, int, int], None] | None = None,
    ) -> FetchStats:
        told = []

        def arrived(fetch: int, first: int, stop: int) -> None:
            if not told:
                told.append(fetch)
                self._reached("part")
            if on_done is not None:
                on_done(fetch, first, stop)

        return self._inner.fetch(fetches, scratch, deadline=deadline, on_done=arrived)


class Hook:
    """Does something once, at one phase."""

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
    """Live weights before the first refit."""
    return {
        name: torch.zeros(shape, dtype=getattr(torch, dtype))
        for name, (dtype, shape) in shapes.items()
    }


@contextmanager
def exported() -> Iterator[Callable[[], Sequence[Any]]]:
    """Collects the spans that end meanwhile; skips the test where there is no SDK."""
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
    """Asks for the span of every phase."""
    from opentelemetry import baggage, context

    token = context.attach(baggage.set_baggage(VERBOSE, "1"))
    try:
        yield
    finally:
        context.detach(token)
