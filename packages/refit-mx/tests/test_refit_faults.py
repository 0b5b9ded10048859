"""SIGKILL and SIGSTOP of publisher, receiver and control plane in each phase.

Each time: an error of ours within the deadline or the version that was asked for, never anything in
between; and the same call made again succeeds once the fault is gone. Phases are reached by a hook,
so nothing here depends on time.
"""

from __future__ import annotations

import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from refit_fixtures import (
    MODEL,
    TRANSPORTS,
    Halfway,
    Hook,
    a_world,
    new_transport,
    small_batches,
)
from refit_processes import Process, same, slice_of, targets_of, weights

from refit_mx.control.client import ControlClient
from refit_mx.deadline import Deadline
from refit_mx.errors import (
    ControlUnavailableError,
    RefitError,
    RefitTimeoutError,
    SourceLostError,
    VersionNotReadyError,
)
from refit_mx.publisher import MxV2TrainingPublisher
from refit_mx.receiver import MxV2RefitReceiver
from refit_mx.settings import ReceiverSettings

pytestmark = pytest.mark.slow

# 12 MB: more than the buffers of a connection, so that a stopped source really stops a transfer.
SHAPES = {"large": ("float32", (1500, 2000)), "norm": ("float32", (333,)), "scale": ("float32", ())}
COLUMNS = {"axis": 1, "ranks": 2, "rank": 1}
"""What has to be asked for, so that the sources are needed in the phase of verifying, too."""
DEADLINE_S = 6.0
SLACK_S = 4.0
"""For giving up, on a machine that does five other things."""
SIGNALS = [signal.SIGKILL, signal.SIGSTOP]
RECEIVER_PHASES = ["lease", "discover", "plan", "transfer", "part", "verify", "install"]


@pytest.fixture
def in_small_batches(monkeypatch):
    small_batches(monkeypatch, 1 << 18)


@pytest.fixture
def stack():
    with ExitStack() as made:
        yield made


def a_receiver(
    stack: ExitStack, address: str, transport: str, **settings: Any
) -> tuple[MxV2RefitReceiver, Hook]:
    hook = Hook()
    inner = new_transport(transport)
    stack.callback(inner.close)
    receiver = MxV2RefitReceiver(
        MODEL,
        control=address,
        targets=targets_of(SHAPES, **COLUMNS),
        transport=Halfway(inner, hook),
        settings=ReceiverSettings(manifest_timeout_s=1.0, rpc_timeout_s=3.0, **settings),
        on_phase=hook,
    )
    stack.enter_context(receiver)
    return receiver, hook


def zeros() -> dict[str, torch.Tensor]:
    return {
        target.name: torch.zeros(target.shape, dtype=getattr(torch, target.dtype))
        for target in targets_of(SHAPES, **COLUMNS)
    }


def of(seed: int) -> dict[str, torch.Tensor]:
    return slice_of(weights(seed, SHAPES), **COLUMNS)


def attempt(receiver: MxV2RefitReceiver, version: str, live: dict[str, torch.Tensor]) -> Any:
    """Refit; the error if there was one. Whatever happened, nothing is half way."""
    before = {name: tensor.clone() for name, tensor in live.items()}
    started = time.monotonic()
    error = None
    try:
        receiver.refit(version, live, timeout_s=DEADLINE_S)
    except RefitError as raised:
        error = raised
    assert time.monotonic() - started < DEADLINE_S + SLACK_S
    assert not receiver.fenced
    if error is not None:
        assert same(live, before)
    return error


# The publisher


def a_publisher(stack: ExitStack, control: str, transport: str, **options: Any) -> Process:
    """A publisher in a process, which a test may stop or kill."""
    made = Process(
        "publisher",
        model=MODEL,
        control=control,
        transports=[transport],
        shapes=SHAPES,
        **options,
    )
    stack.callback(made.close)
    return made


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("phase", RECEIVER_PHASES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_publisher_fails_while_it_is_read_from(stack, in_small_batches, transport, phase, number):
    world = stack.enter_context(a_world())
    world.version("v1")
    victim = a_publisher(stack, world.server.address, transport, ttl_s=60)
    assert "done" in victim.ask(do="publish", version="v1", seed=1)
    receiver, hook = a_receiver(stack, world.server.address, transport)
    hook.at(phase, lambda: victim.signal(number))
    live = zeros()
    error = attempt(receiver, "v1", live)
    if phase in ("lease", "discover", "plan", "transfer") and number == signal.SIGKILL:
        assert isinstance(error, SourceLostError), error
    if phase in ("lease", "discover") or (phase == "transfer" and transport == "tcp"):
        assert isinstance(error, (SourceLostError, RefitTimeoutError)), error
    if phase == "install":
        assert error is None
    if error is None:
        assert same(live, of(1))
    else:
        assert error.retryable

    if number == signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
    else:
        world.publisher(transports=[transport]).publish("v1", weights(1, SHAPES))
    again = attempt(receiver, "v1", live)
    assert again is None, again
    assert same(live, of(1))


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("phase", ["discover", "transfer", "part", "verify"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_replica_takes_over_within_the_same_call(
    stack, in_small_batches, transport, phase, number
):
    world = stack.enter_context(a_world())
    world.version("v1")
    victim = a_publisher(stack, world.server.address, transport, ttl_s=60)
    world.publisher(transports=[transport]).publish("v1", weights(1, SHAPES))
    assert "done" in victim.ask(do="publish", version="v1", seed=1)
    receiver, hook = a_receiver(
        stack, world.server.address, transport, stall_timeout_s=1.0, digest_timeout_s=1.0
    )
    hook.at(phase, lambda: victim.signal(number))
    live = zeros()
    error = attempt(receiver, "v1", live)
    assert error is None, error
    assert same(live, of(1))


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("phase", ["stage", "serve", "offer"])
def test_a_publisher_fails_while_it_publishes(stack, phase, number):
    world = stack.enter_context(a_world())
    world.version("v1")
    victim = a_publisher(stack, world.server.address, "tcp")
    victim.send(do="publish", version="v1", seed=1, pause=[phase])
    assert victim.answer() == {"phase": phase}
    victim.signal(number)

    receiver, _ = a_receiver(stack, world.server.address, "tcp")
    live = zeros()
    assert isinstance(attempt(receiver, "v1", live), VersionNotReadyError)
    with pytest.raises(RefitTimeoutError, match="fsdp-0"):
        world.control.wait_ready("v1", Deadline(0.5, "a version"))

    if number == signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
        assert "done" in victim.ask(do="go")
    else:
        world.publisher().publish("v1", weights(1, SHAPES))
    assert attempt(receiver, "v1", live) is None
    assert same(live, of(1))


# The control plane


class Server:
    """A control plane in a process, which keeps its port and its state."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._state = str(folder / "state")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self.start()
        self.address = self.process.ready["address"]

    def start(self) -> None:
        self.process = Process("control", port=self._port, state=self._state)
        self._stack.callback(self.process.close)

    def mend(self, number: signal.Signals) -> None:
        if number == signal.SIGSTOP:
            self.process.signal(signal.SIGCONT)
        else:
            self.start()


@pytest.fixture
def server(stack, tmp_path):
    return Server(stack, tmp_path)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("phase", RECEIVER_PHASES)
def test_the_control_plane_fails_while_a_receiver_reads(
    stack, in_small_batches, server, phase, number
):
    control = stack.enter_context(ControlClient(server.address))
    control.create_version(MODEL, ["fsdp-0"], idempotency_key="v1", version_id="v1")
    publisher = MxV2TrainingPublisher(
        MODEL, "fsdp-0", control=server.address, transports=["tcp"], heartbeat_ttl_s=60
    )
    stack.enter_context(publisher).publish("v1", weights(1, SHAPES))
    receiver, hook = a_receiver(stack, server.address, "tcp", lease_ttl_s=30)
    hook.at(phase, lambda: server.process.signal(number))
    live = zeros()
    error = attempt(receiver, "v1", live)
    if phase in ("lease", "discover"):
        assert isinstance(error, (ControlUnavailableError, RefitTimeoutError)), error
    else:
        # Bytes that are under way need no control plane while the lease is sure to last.
        assert error is None, error
    server.mend(number)
    control.wait_ready("v1", Deadline(20, "the control plane to be back"))
    again = attempt(receiver, "v1", live)
    assert again is None, again
    assert same(live, of(1))


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("phase", ["stage", "serve", "offer"])
def test_the_control_plane_fails_while_a_publisher_publishes(stack, server, phase, number):
    control = stack.enter_context(ControlClient(server.address))
    control.create_version(MODEL, ["fsdp-0"], idempotency_key="v1", version_id="v1")
    hook = Hook()
    publisher = MxV2TrainingPublisher(
        MODEL,
        "fsdp-0",
        control=server.address,
        transports=["tcp"],
        heartbeat_ttl_s=60,
        on_phase=hook,
    )
    stack.enter_context(publisher)
    hook.at(phase, lambda: server.process.signal(number))
    started = time.monotonic()
    with pytest.raises((ControlUnavailableError, RefitTimeoutError)):
        publisher.publish("v1", weights(1, SHAPES), timeout_s=2)
    assert time.monotonic() - started < 2 + SLACK_S
    server.mend(number)
    publisher.publish("v1", weights(1, SHAPES), timeout_s=20)
    control.wait_ready("v1", Deadline(20, "the version"))
    receiver, _ = a_receiver(stack, server.address, "tcp")
    live = zeros()
    assert attempt(receiver, "v1", live) is None
    assert same(live, of(1))


# The receiver


def a_paused_receiver(stack: ExitStack, address: str, transport: str, phase: str) -> Process:
    """Another process that is in a phase of receiving v1."""
    process = Process(
        "receiver",
        model=MODEL,
        control=address,
        transport=transport,
        shapes=SHAPES,
        settings={"lease_ttl_s": 2, "heartbeat_ttl_s": 2},
        **COLUMNS,
    )
    stack.callback(process.close)
    process.send(do="refit", version="v1", pause=[phase], timeout_s=60)
    assert process.answer() == {"phase": phase}
    return process


@pytest.mark.parametrize("phase", ["discover", "transfer", "verify", "install"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_receiver_holds_nobody_up_for_longer_than_its_lease(stack, transport, phase):
    world = stack.enter_context(a_world())
    publisher = world.publisher(transports=[transport])
    world.version("v1")
    publisher.publish("v1", weights(1, SHAPES))
    a_paused_receiver(stack, world.server.address, transport, phase).signal(signal.SIGKILL)
    with pytest.raises(RefitTimeoutError, match="leased by"):
        publisher.release("v1", timeout_s=0.2)
    publisher.release("v1", timeout_s=20)
    world.version("v2")
    publisher.publish("v2", weights(2, SHAPES))
    receiver, _ = a_receiver(stack, world.server.address, transport)
    live = zeros()
    assert attempt(receiver, "v2", live) is None
    assert same(live, of(2))


@pytest.mark.parametrize("phase", ["discover", "plan", "transfer", "verify"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_receiver_that_was_stopped_while_its_version_was_replaced_installs_nothing(
    stack, transport, phase
):
    world = stack.enter_context(a_world())
    publisher = world.publisher(transports=[transport])
    world.version("v1")
    publisher.publish("v1", weights(1, SHAPES))
    stopped = a_paused_receiver(stack, world.server.address, transport, phase)
    stopped.signal(signal.SIGSTOP)
    for number in (2, 3):  # into both arenas
        world.version(f"v{number}")
        publisher.publish(f"v{number}", weights(number, SHAPES), timeout_s=30)
    assert "v1" not in publisher.versions
    stopped.signal(signal.SIGCONT)
    answer = stopped.ask(do="go")
    assert answer["retryable"], answer
    assert stopped.ask(do="holds", seed=1) == {"same": False}
    assert "done" in stopped.ask(do="refit", version="v3", timeout_s=30)
    assert stopped.ask(do="holds", seed=3) == {"same": True}


# Two processes, nothing failing


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_publishers_and_a_receiver_in_processes_of_their_own(stack, transport):
    world = stack.enter_context(a_world())
    publishers = [
        Process(
            "publisher",
            model=MODEL,
            control=world.server.address,
            transports=[transport],
            slot=f"fsdp-{rank}",
            shapes=SHAPES,
            ranks=2,
            rank=rank,
        )
        for rank in range(2)
    ]
    receiver = Process(
        "receiver",
        model=MODEL,
        control=world.server.address,
        transport=transport,
        shapes=SHAPES,
        **COLUMNS,
    )
    for process in (*publishers, receiver):
        stack.callback(process.close)
    for number in (1, 2, 3, 4):
        world.version(f"v{number}", ["fsdp-0", "fsdp-1"])
        for publisher in publishers:
            publisher.send(do="publish", version=f"v{number}", seed=number)
        for publisher in publishers:
            assert "done" in publisher.answer()
        answer = receiver.ask(do="refit", version=f"v{number}")
        assert answer["nbytes"] == sum(tensor.nbytes for tensor in of(number).values())
        assert receiver.ask(do="holds", seed=number) == {"same": True}
    assert "done" in publishers[0].ask(do="close")
    assert world.state("v4") == "RELEASING"
    # NIXL's libraries may end a process that exits with a SIGSEGV.
    assert [process.end() for process in (*publishers, receiver)] == [0, 0, 0]


def test_a_publisher_that_is_told_to_end_says_so(stack):
    world = stack.enter_context(a_world())
    process = Process(
        "publisher", model=MODEL, control=world.server.address, transports=["tcp"], ttl_s=60
    )
    stack.callback(process.close)
    world.version("v1")
    assert "done" in process.ask(do="publish", version="v1", seed=1)
    process.signal(signal.SIGTERM)
    process.wait()
    assert world.state("v1") == "RELEASING"
    assert world.control.list_shards("v1") == []
