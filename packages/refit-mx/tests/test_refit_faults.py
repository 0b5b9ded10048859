"""SIGKILL and SIGSTOP of publisher, receiver and control plane in each phase; see `fault_cases`."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack

import pytest
from fault_cases import (
    COLUMNS,
    PUBLISHER_PHASES,
    RECEIVER_PHASES,
    RECOVERY_S,
    SHAPES,
    SIGNALS,
    SLACK_S,
    a_publisher,
    a_receiver,
    attempt,
    live_after,
    matrix,
    zeros,
)
from refit_fixtures import MODEL, Hook, a_world
from refit_processes import Process, same, weights
from soak_processes import Control

from refit_mx import (
    ControlClient,
    ControlUnavailableError,
    Deadline,
    MxV2TrainingPublisher,
    RefitTimeoutError,
    SourceLostError,
    VersionNotReadyError,
)

pytestmark = pytest.mark.slow

LEASE_S = 5
"""Long enough that a release on a slow machine still meets the lease of a killed receiver."""


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("transport", "phase"), matrix(RECEIVER_PHASES, over_nixl=["transfer", "part", "verify"])
)
def test_refit_installs_or_raises_if_its_publisher_fails(
    stack, in_small_batches, transport, phase, number
):
    world = stack.enter_context(a_world())
    world.version("v1")
    victim = a_publisher(stack, world.server.address, transport, ttl_s=60)
    assert "done" in victim.ask(do="publish", version="v1", seed=1)
    receiver, hook = a_receiver(stack, world.server.address, transport)
    hook.at(phase, lambda: victim.signal(number))
    live = zeros(phase)
    error = attempt(receiver, "v1", live, phase)
    if phase in ("lease", "discover", "plan", "transfer") and number == signal.SIGKILL:
        assert isinstance(error, SourceLostError), error
    if phase in ("lease", "discover") or (phase == "transfer" and transport == "tcp"):
        assert isinstance(error, (SourceLostError, RefitTimeoutError)), error
    if phase in ("compile", "install"):
        assert error is None
    if error is None:
        assert same(live, live_after(1, phase))
    else:
        assert error.retryable

    if number == signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
    else:
        world.publisher(transports=[transport]).publish("v1", weights(1, SHAPES))
    again = attempt(receiver, "v1", live, phase, deadline_s=RECOVERY_S)
    assert again is None, again
    assert same(live, live_after(1, phase))


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("transport", "phase"),
    matrix(["discover", "transfer", "part", "verify"], over_nixl=["transfer", "part"]),
)
def test_replica_replaces_a_failed_source_in_the_same_call(
    stack, in_small_batches, transport, phase, number
):
    world = stack.enter_context(a_world())
    world.version("v1")
    victim = a_publisher(stack, world.server.address, transport, ttl_s=60)
    world.publisher(transports=[transport]).publish("v1", weights(1, SHAPES))
    assert "done" in victim.ask(do="publish", version="v1", seed=1)
    receiver, hook = a_receiver(
        stack, world.server.address, transport, stall_timeout_s=2.0, digest_timeout_s=2.0
    )
    hook.at(phase, lambda: victim.signal(number))
    live = zeros()
    error = attempt(receiver, "v1", live, deadline_s=RECOVERY_S)
    assert error is None, error
    assert same(live, live_after(1))


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("transport", "phase"), matrix(PUBLISHER_PHASES, over_nixl=PUBLISHER_PHASES)
)
def test_failed_publish_makes_no_version_ready(stack, transport, phase, number):
    world = stack.enter_context(a_world())
    world.version("v1")
    victim = a_publisher(stack, world.server.address, transport)
    victim.send(do="publish", version="v1", seed=1, pause=[phase])
    assert victim.answer() == {"phase": phase}
    victim.signal(number)

    receiver, _ = a_receiver(stack, world.server.address, transport)
    live = zeros()
    assert isinstance(attempt(receiver, "v1", live), VersionNotReadyError)
    with pytest.raises(RefitTimeoutError, match="fsdp-0"):
        world.control.wait_ready("v1", Deadline(0.5, "a version"))

    if number == signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
        assert "done" in victim.ask(do="go")
    else:
        world.publisher(transports=[transport]).publish("v1", weights(1, SHAPES))
    assert attempt(receiver, "v1", live, deadline_s=RECOVERY_S) is None
    assert same(live, live_after(1))


# Receivers


def a_paused_receiver(stack: ExitStack, address: str, transport: str, phase: str) -> Process:
    """Start another process that receives v1, and pause it in a phase."""
    process = Process(
        "receiver",
        model=MODEL,
        control=address,
        transport=transport,
        shapes=SHAPES,
        settings={"lease_ttl_s": LEASE_S, "heartbeat_ttl_s": 2},
        halfway=phase == "part",
        compile=phase == "compile",
        **COLUMNS,
    )
    stack.callback(process.close)
    process.send(do="refit", version="v1", pause=[phase], timeout_s=60)
    assert process.answer() == {"phase": phase}
    return process


@pytest.mark.parametrize(
    ("transport", "phase"),
    matrix(RECEIVER_PHASES, over_nixl=["discover", "transfer", "part", "verify", "install"]),
)
def test_killed_receiver_blocks_a_version_only_for_its_lease(stack, transport, phase):
    world = stack.enter_context(a_world())
    publisher = world.publish_state("v1", weights(1, SHAPES), transports=[transport])
    a_paused_receiver(stack, world.server.address, transport, phase).signal(signal.SIGKILL)
    if phase != "lease":
        with pytest.raises(RefitTimeoutError, match="leased by"):
            publisher.release("v1", timeout_s=0.2)
    publisher.release("v1", timeout_s=20)
    world.version("v2")
    publisher.publish("v2", weights(2, SHAPES))
    receiver, _ = a_receiver(stack, world.server.address, transport)
    live = zeros()
    assert attempt(receiver, "v2", live, deadline_s=RECOVERY_S) is None
    assert same(live, live_after(2))


@pytest.mark.parametrize(
    ("transport", "phase"),
    matrix(RECEIVER_PHASES, over_nixl=["discover", "plan", "transfer", "part", "verify"]),
)
def test_stopped_receiver_installs_its_version_or_nothing(stack, transport, phase):
    world = stack.enter_context(a_world())
    publisher = world.publish_state("v1", weights(1, SHAPES), transports=[transport])
    stopped = a_paused_receiver(stack, world.server.address, transport, phase)
    stopped.signal(signal.SIGSTOP)
    for number in (2, 3):  # into both arenas
        world.version(f"v{number}")
        publisher.publish(f"v{number}", weights(number, SHAPES), timeout_s=30)
    assert "v1" not in publisher.versions
    stopped.signal(signal.SIGCONT)
    answer = stopped.ask(do="go")
    # After the phase "verify", its scratch memory has all of v1.
    installs = phase in ("compile", "install")
    assert ("done" in answer) == installs, answer
    assert installs or answer["retryable"], answer
    assert stopped.ask(do="holds", seed=1) == {"same": installs}
    assert "done" in stopped.ask(do="refit", version="v3", timeout_s=30)
    assert stopped.ask(do="holds", seed=3) == {"same": True}


# The control plane


@pytest.fixture
def server(stack, tmp_path):
    return Control(stack, tmp_path, retention=2)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("transport", "phase"), matrix(RECEIVER_PHASES, over_nixl=["transfer", "part", "verify"])
)
def test_refit_installs_or_raises_if_the_control_plane_fails(
    stack, in_small_batches, server, transport, phase, number
):
    control = stack.enter_context(ControlClient(server.address))
    control.create_version(MODEL, ["fsdp-0"], idempotency_key="v1", version_id="v1")
    publisher = MxV2TrainingPublisher(
        MODEL, "fsdp-0", control=server.address, transports=[transport], heartbeat_ttl_s=60
    )
    stack.enter_context(publisher).publish("v1", weights(1, SHAPES))
    receiver, hook = a_receiver(
        stack, server.address, transport, lease_ttl_s=30, control_retry_s=RECOVERY_S
    )
    hook.at(phase, lambda: server.signal(number))
    live = zeros(phase)
    error = attempt(receiver, "v1", live, phase)
    if phase in ("lease", "discover"):
        assert isinstance(error, (ControlUnavailableError, RefitTimeoutError)), error
    else:
        # Bytes that are under way need no control plane while the lease is sure to last.
        assert error is None, error
    server.recover(number)
    control.wait_ready("v1", Deadline(20, "the control plane to be back"))
    again = attempt(receiver, "v1", live, phase, deadline_s=RECOVERY_S)
    assert again is None, again
    assert same(live, live_after(1, phase))


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(("transport", "phase"), matrix(PUBLISHER_PHASES, over_nixl=["serve"]))
def test_publish_can_be_retried_after_a_control_plane_failure(
    stack, server, transport, phase, number
):
    control = stack.enter_context(ControlClient(server.address))
    control.create_version(MODEL, ["fsdp-0"], idempotency_key="v1", version_id="v1")
    hook = Hook()
    publisher = MxV2TrainingPublisher(
        MODEL,
        "fsdp-0",
        control=server.address,
        transports=[transport],
        heartbeat_ttl_s=60,
        on_phase=hook,
    )
    stack.enter_context(publisher)
    hook.at(phase, lambda: server.signal(number))
    started = time.monotonic()
    with pytest.raises((ControlUnavailableError, RefitTimeoutError)):
        publisher.publish("v1", weights(1, SHAPES), timeout_s=2)
    assert time.monotonic() - started < 2 + SLACK_S
    server.recover(number)
    publisher.publish("v1", weights(1, SHAPES), timeout_s=20)
    control.wait_ready("v1", Deadline(20, "the version"))
    receiver, _ = a_receiver(stack, server.address, transport)
    live = zeros()
    assert attempt(receiver, "v1", live, deadline_s=RECOVERY_S) is None
    assert same(live, live_after(1))
