"""SIGKILL and SIGSTOP of a publisher in each phase, its own and its receivers'; see `fault_cases`.

Of the control plane and of receivers: test_refit_faults_control.py, test_refit_faults_receiver.py.
"""

from __future__ import annotations

import signal

import pytest
from fault_cases import (
    COLUMNS,
    PUBLISHER_PHASES,
    RECEIVER_PHASES,
    SHAPES,
    SIGNALS,
    a_publisher,
    a_receiver,
    attempt,
    matrix,
    of,
    zeros,
)
from refit_fixtures import MODEL, TRANSPORTS, a_world
from refit_processes import Process, same, weights

from refit_mx.deadline import Deadline
from refit_mx.errors import RefitTimeoutError, SourceLostError, VersionNotReadyError

pytestmark = pytest.mark.slow


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
    live = zeros(phase)
    error = attempt(receiver, "v1", live, phase)
    if phase in ("lease", "discover", "plan", "transfer") and number == signal.SIGKILL:
        assert isinstance(error, SourceLostError), error
    if phase in ("lease", "discover") or (phase == "transfer" and transport == "tcp"):
        assert isinstance(error, (SourceLostError, RefitTimeoutError)), error
    if phase in ("compile", "install"):
        assert error is None
    if error is None:
        assert same(live, of(1, phase))
    else:
        assert error.retryable

    if number == signal.SIGSTOP:
        victim.signal(signal.SIGCONT)
    else:
        world.publisher(transports=[transport]).publish("v1", weights(1, SHAPES))
    again = attempt(receiver, "v1", live, phase)
    assert again is None, again
    assert same(live, of(1, phase))


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
@pytest.mark.parametrize(
    ("transport", "phase"), matrix(PUBLISHER_PHASES, over_nixl=PUBLISHER_PHASES)
)
def test_a_publisher_fails_while_it_publishes(stack, transport, phase, number):
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
    assert attempt(receiver, "v1", live) is None
    assert same(live, of(1))


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
