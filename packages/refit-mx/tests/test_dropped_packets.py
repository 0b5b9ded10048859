"""Calls to a peer whose packets are dropped end within their deadline.

Some tests use internals: a single connection, and the number of abandoned calls.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack

import msgspec
import pytest
from control_clients import until
from fault_cases import RECOVERY_S, a_publisher, a_receiver, attempt, live_after
from fault_cases import zeros as sliced_zeros
from own_network import drop, drop_name_service, in_own_network, listening_ports, restore
from refit_fixtures import (
    MODEL,
    TRANSPORTS,
    Hook,
    World,
    a_world,
    needs_nixl,
    small_batches,
    zeros,
)
from refit_processes import Process, fsdp_shards, same, weights

from refit_mx import ControlClient, ControlUnavailableError, Deadline, RefitError, RefitTimeoutError
from refit_mx.transports.source_client import SourceClient

pytestmark = pytest.mark.slow


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def published_over_nixl(stack: ExitStack, world: World) -> int:
    """Publish v1 from another process; return the port of its NIXL agent."""
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
        for timeout_s in (10, 5):  # the second receiver sees the blocked connect
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
    from refit_mx import SourceLostError
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
        until(lambda: not abandoned_connects())  # the kernel resends with growing pauses
        live = zeros()
        assert receiver.refit("v1", live, timeout_s=30).transport == "nixl"
        assert same(live, weights(1))


PHASES = ("discover", "transfer", "part", "verify")
SLACK_S = 4.0


@pytest.mark.parametrize("transport", TRANSPORTS)
@in_own_network
def test_refit_installs_or_raises_if_its_publisher_falls_silent(transport):
    os.environ["UCX_TLS"] = "tcp,self"
    small_batches(pytest.MonkeyPatch(), 1 << 18)
    with ExitStack() as stack:
        world = stack.enter_context(a_world())
        world.version("v1")
        before = listening_ports()
        publisher = a_publisher(stack, world.server.address, transport, ttl_s=60)
        assert "done" in publisher.ask(do="publish", version="v1", seed=1)
        ports = listening_ports() - before
        for phase in PHASES:
            receiver, hook = a_receiver(
                stack, world.server.address, transport, stall_timeout_s=1.0, digest_timeout_s=1.0
            )
            hook.at(phase, lambda: drop(*ports))
            live = sliced_zeros()
            error = attempt(receiver, "v1", live)
            assert error is None or error.retryable, error
            assert error is not None or same(live, live_after(1))
            started = time.monotonic()
            receiver.close()
            assert time.monotonic() - started < SLACK_S
            assert not world.server.plane.counts().leases
            restore()
        receiver, _ = a_receiver(stack, world.server.address, transport)
        live = sliced_zeros()
        assert attempt(receiver, "v1", live, deadline_s=RECOVERY_S) is None
        assert same(live, live_after(1))


@in_own_network
def test_silent_control_plane_cannot_delay_past_a_deadline():
    with ExitStack() as stack:
        world = stack.enter_context(a_world())
        publisher = world.publisher()
        world.publish([publisher], "v1", 1)
        world.version("v2")
        hook = Hook()
        receiver = world.receiver(on_phase=hook)
        port = port_of(world.server.address)

        def timed(call, max_s):
            started = time.monotonic()
            try:
                return call()
            except RefitError as error:
                return error
            finally:
                assert time.monotonic() - started < max_s + SLACK_S

        # At this point the lease is held, and cannot be released.
        hook.at("transfer", lambda: drop(port))
        timed(lambda: receiver.refit("v1", zeros(), timeout_s=4), 4)
        for call in (
            lambda: receiver.refit("v1", zeros(), timeout_s=2),
            lambda: publisher.publish("v2", weights(2), timeout_s=2),
            lambda: publisher.release("v1", timeout_s=2),
            lambda: world.control.wait_ready("v2", Deadline(2, "test")),
        ):
            assert isinstance(timed(call, 2), (RefitTimeoutError, ControlUnavailableError))
        timed(receiver.close, 4)
        timed(publisher.close, 4)
        timed(world.server.close, 4)


@in_own_network
def test_silent_name_server_cannot_delay_past_a_deadline():
    from refit_mx import RefitFleet

    drop_name_service()
    with ExitStack() as stack:
        world = stack.enter_context(a_world())
        publisher = world.publisher(advertised_host="trainer.example")
        world.publish([publisher], "v1", 1)
        control = stack.enter_context(ControlClient("control.example:1", rpc_timeout_s=1))
        server = msgspec.structs.replace(
            publisher.publish("v1", fsdp_shards(weights(1), 1, 0)), endpoint="trainer.example:1"
        )
        client = SourceClient(server, connect_timeout_s=1)
        fleet = RefitFleet(
            ["http://generator.example:1"],
            init_info={"control_address": "127.0.0.1:9"},
            timeout_s=1,
            cleanup_timeout_s=1,
        )
        for call in (
            lambda: world.receiver().refit("v1", zeros(), timeout_s=2),
            lambda: control.get_version("v1"),
            lambda: client.connect(Deadline(1, "test")),
            lambda: fleet.refit("v1"),
        ):
            started = time.monotonic()
            with pytest.raises(RefitError):
                call()
            assert time.monotonic() - started < 4


@in_own_network
def test_silent_fleet_or_barrier_cannot_delay_past_a_deadline():
    from torch.distributed import TCPStore

    from refit_mx import RefitFleet
    from refit_mx.fleet.barrier import PhaseBarrier, Point

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    drop(9, store.port)
    barrier = PhaseBarrier(client, rank=1, world_size=2)
    barrier.begin()
    fleet = RefitFleet(
        ["http://127.0.0.1:9"],
        init_info={"control_address": "127.0.0.1:9"},
        timeout_s=1,
        cleanup_timeout_s=1,
    )
    for call in (
        lambda: fleet.refit("v1"),
        lambda: fleet.resume(),
        lambda: barrier.meet(Point.PAUSED, Deadline(1, "test")),
        lambda: barrier.fail(Point.PAUSED, "why", timeout_s=1),
    ):
        started = time.monotonic()
        with pytest.raises(RefitError):
            call()
        assert time.monotonic() - started < 1 + SLACK_S
    os._exit(0)  # torch's destructor waits for the store
