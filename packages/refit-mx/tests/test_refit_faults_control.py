"""SIGKILL and SIGSTOP of the control plane in each phase of a receiver and of a publisher; see
`fault_cases`."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from fault_cases import (
    PUBLISHER_PHASES,
    RECEIVER_PHASES,
    SHAPES,
    SIGNALS,
    SLACK_S,
    a_receiver,
    attempt,
    matrix,
    of,
    zeros,
)
from ports import held_port
from refit_fixtures import MODEL, Hook
from refit_processes import Process, same, weights

from refit_mx.control.client import ControlClient
from refit_mx.deadline import Deadline
from refit_mx.errors import ControlUnavailableError, RefitTimeoutError
from refit_mx.publisher import MxV2TrainingPublisher

pytestmark = pytest.mark.slow


class Server:
    """A control plane in a process, which keeps its port and its state."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._state = str(folder / "state")
        self._port = stack.enter_context(held_port())
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
@pytest.mark.parametrize(
    ("transport", "phase"), matrix(RECEIVER_PHASES, over_nixl=["transfer", "part", "verify"])
)
def test_the_control_plane_fails_while_a_receiver_reads(
    stack, in_small_batches, server, transport, phase, number
):
    control = stack.enter_context(ControlClient(server.address))
    control.create_version(MODEL, ["fsdp-0"], idempotency_key="v1", version_id="v1")
    publisher = MxV2TrainingPublisher(
        MODEL, "fsdp-0", control=server.address, transports=[transport], heartbeat_ttl_s=60
    )
    stack.enter_context(publisher).publish("v1", weights(1, SHAPES))
    receiver, hook = a_receiver(stack, server.address, transport, lease_ttl_s=30)
    hook.at(phase, lambda: server.process.signal(number))
    live = zeros(phase)
    error = attempt(receiver, "v1", live, phase)
    if phase in ("lease", "discover"):
        assert isinstance(error, (ControlUnavailableError, RefitTimeoutError)), error
    else:
        # Bytes that are under way need no control plane while the lease is sure to last.
        assert error is None, error
    server.mend(number)
    control.wait_ready("v1", Deadline(20, "the control plane to be back"))
    again = attempt(receiver, "v1", live, phase)
    assert again is None, again
    assert same(live, of(1, phase))


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(("transport", "phase"), matrix(PUBLISHER_PHASES, over_nixl=["serve"]))
def test_the_control_plane_fails_while_a_publisher_publishes(
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
    hook.at(phase, lambda: server.process.signal(number))
    started = time.monotonic()
    with pytest.raises((ControlUnavailableError, RefitTimeoutError)):
        publisher.publish("v1", weights(1, SHAPES), timeout_s=2)
    assert time.monotonic() - started < 2 + SLACK_S
    server.mend(number)
    publisher.publish("v1", weights(1, SHAPES), timeout_s=20)
    control.wait_ready("v1", Deadline(20, "the version"))
    receiver, _ = a_receiver(stack, server.address, transport)
    live = zeros()
    assert attempt(receiver, "v1", live) is None
    assert same(live, of(1))
