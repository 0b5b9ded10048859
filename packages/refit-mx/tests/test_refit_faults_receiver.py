"""SIGKILL and SIGSTOP of a receiver in each of its phases; see `fault_cases`."""

from __future__ import annotations

import signal
from contextlib import ExitStack

import pytest
from fault_cases import (
    COLUMNS,
    RECEIVER_PHASES,
    SHAPES,
    a_receiver,
    attempt,
    matrix,
    of,
    zeros,
)
from refit_fixtures import MODEL, a_world
from refit_processes import Process, same, weights

from refit_mx.errors import RefitTimeoutError

pytestmark = pytest.mark.slow


def a_paused_receiver(stack: ExitStack, address: str, transport: str, phase: str) -> Process:
    """Another process that is in a phase of receiving v1."""
    process = Process(
        "receiver",
        model=MODEL,
        control=address,
        transport=transport,
        shapes=SHAPES,
        settings={"lease_ttl_s": 2, "heartbeat_ttl_s": 2},
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
def test_a_killed_receiver_holds_nobody_up_for_longer_than_its_lease(stack, transport, phase):
    world = stack.enter_context(a_world())
    publisher = world.publisher(transports=[transport])
    world.version("v1")
    publisher.publish("v1", weights(1, SHAPES))
    a_paused_receiver(stack, world.server.address, transport, phase).signal(signal.SIGKILL)
    if phase != "lease":
        with pytest.raises(RefitTimeoutError, match="leased by"):
            publisher.release("v1", timeout_s=0.2)
    publisher.release("v1", timeout_s=20)
    world.version("v2")
    publisher.publish("v2", weights(2, SHAPES))
    receiver, _ = a_receiver(stack, world.server.address, transport)
    live = zeros()
    assert attempt(receiver, "v2", live) is None
    assert same(live, of(2))


@pytest.mark.parametrize(
    ("transport", "phase"),
    matrix(RECEIVER_PHASES, over_nixl=["discover", "plan", "transfer", "part", "verify"]),
)
def test_a_receiver_that_was_stopped_while_its_version_was_replaced_installs_it_whole_or_not(
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
    # Behind verifying, its scratch memory has all of v1.
    installs = phase in ("compile", "install")
    assert ("done" in answer) == installs, answer
    assert installs or answer["retryable"], answer
    assert stopped.ask(do="holds", seed=1) == {"same": installs}
    assert "done" in stopped.ask(do="refit", version="v3", timeout_s=30)
    assert stopped.ask(do="holds", seed=3) == {"same": True}
