"""A peer whose packets are dropped costs no more than the deadline, whatever is asked of it."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

import pytest
from own_network import drop, in_own_network, listening_ports, restore
from refit_fixtures import MODEL, World, a_world, needs_nixl, zeros
from refit_processes import Process, same, weights

pytestmark = pytest.mark.slow


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def published_over_nixl(stack: ExitStack, world: World) -> int:
    """v1 of a publisher in another process; the port of its NIXL agent."""
    os.environ["UCX_TLS"] = "tcp,self"  # as between two hosts
    world.version("v1")
    publisher = Process(
        "publisher", model=MODEL, control=world.server.address, transports=["nixl"], ttl_s=60
    )
    stack.callback(publisher.close)
    before = listening_ports()
    assert "done" in publisher.ask(do="publish", version="v1", seed=1)
    (port,) = listening_ports() - before
    return port


@needs_nixl
@in_own_network
def test_auto_reads_over_tcp_when_nixl_cannot_connect():
    with ExitStack() as stack:
        world = stack.enter_context(a_world())
        port = published_over_nixl(stack, world)
        receiver = world.receiver(transport="auto")
        drop(port)
        for timeout_s in (10, 2):  # the second is of another receiver, which knows of the first
            live = zeros()
            started = time.monotonic()
            stats = receiver.refit("v1", live, timeout_s=timeout_s)
            assert time.monotonic() - started < timeout_s
            assert stats.transport == "tcp"
            assert same(live, weights(1))
            assert not world.server.plane.counts().leases
            receiver.close()
            receiver = world.receiver(transport="auto")


@needs_nixl
@in_own_network
def test_nixl_avoids_a_peer_until_its_connect_returns():
    from refit_mx.errors import SourceLostError
    from refit_mx.transports.nixl_lane import abandoned_connects

    with ExitStack() as stack:
        world = stack.enter_context(a_world())
        port = published_over_nixl(stack, world)
        receiver = world.receiver(transport="nixl")
        drop(port)
        for attempt in range(2):
            started = time.monotonic()
            with pytest.raises(SourceLostError, match="over NIXL"):
                receiver.refit("v1", zeros(), timeout_s=6)
            assert time.monotonic() - started < (6 if not attempt else 2)
            assert len(abandoned_connects()) == 1
        restore()
        until = time.monotonic() + 60
        while abandoned_connects():  # the kernel resends with growing pauses
            assert time.monotonic() < until
            time.sleep(0.05)
        live = zeros()
        assert receiver.refit("v1", live, timeout_s=30).transport == "nixl"
        assert same(live, weights(1))
