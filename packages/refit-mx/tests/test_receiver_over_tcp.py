"""Fallback of ``auto`` to TCP for live sources that NIXL cannot read.

These tests use internals: NIXL itself must fail at one of its calls.
"""

from __future__ import annotations

import time
import types

import pytest
from refit_fixtures import World, needs_nixl, zeros
from refit_processes import same, weights

from refit_mx import SourceLostError
from refit_mx.receive import transport_choice
from refit_mx.transports import nixl_lane

pytestmark = [pytest.mark.slow, needs_nixl]


class Failing:
    """An agent of NIXL whose method ``call`` fails ``times`` times."""

    times = 0
    call = "transfer"

    def __init__(self, agent: object) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> object:
        call = getattr(self._agent, name)
        if name != Failing.call:
            return call

        def fails(*args: object) -> object:
            result = call(*args)
            if Failing.times:
                Failing.times -= 1
                raise RuntimeError("NIXL_ERR_BACKEND")  # a dead peer gives another error
            return result

        return fails


@pytest.fixture(autouse=True)
def failing(monkeypatch):
    original = nixl_lane.Lane.__init__

    def init(self: nixl_lane.Lane) -> None:
        original(self)
        self._agent = Failing(self._agent)

    monkeypatch.setattr(nixl_lane.Lane, "__init__", init)
    monkeypatch.setattr(Failing, "call", "transfer")
    monkeypatch.setattr(Failing, "times", 0)
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # a read must not complete within its call


def published(world: World, count: int = 1):
    return world.publish_replicas("v1", weights(1), count, transports=["nixl", "tcp"])


def quarantined(receiver) -> list[object]:
    return list(receiver._receiving._transports._pools["nixl"]._quarantined)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("call", ["transfer", "check_xfer_state"])
def test_next_attempt_after_a_nixl_failure_uses_tcp(world, monkeypatch, call, replicas):
    monkeypatch.setattr(Failing, "call", call)
    published(world, replicas)
    receiver = world.receiver(transport="auto")
    Failing.times = 1
    live = zeros()
    stats = receiver.refit("v1", live, timeout_s=20, attempts=2)
    assert (stats.transport, stats.attempts) == ("tcp", 2)
    assert same(live, weights(1))
    assert Failing.times == 0


def test_later_versions_arrive_despite_a_quarantined_buffer(world):
    # NIXL is tried again for each new agent, but cannot read from an agent with an abandoned read.
    (publisher,) = published(world)
    receiver = world.receiver(transport="auto")
    Failing.times = 1
    receiver.refit("v1", zeros(), timeout_s=20)
    before = quarantined(receiver)
    assert before
    transports = []
    for number in range(2, 7):
        world.version(f"v{number}")
        publisher.publish(f"v{number}", weights(number))
        live = zeros()
        stats = receiver.refit(f"v{number}", live, timeout_s=20)
        assert same(live, weights(number))
        assert stats.attempts == 1
        assert quarantined(receiver) == before
        transports.append(stats.transport)
    # Each of the two arenas has a separate agent.
    assert transports == ["nixl", "tcp", "nixl", "tcp", "nixl"]


def test_restarted_publisher_is_read_over_nixl(world):
    (publisher,) = published(world)
    receiver = world.receiver(transport="auto")
    Failing.times = 1
    receiver.refit("v1", zeros(), timeout_s=20)
    publisher.close()
    world.publish_state("v2", weights(2), transports=["nixl", "tcp"])
    assert receiver.refit("v2", zeros(), timeout_s=20).transport == "nixl"


def test_live_source_is_not_named_as_lost(world):
    published(world)
    receiver = world.receiver(transport="auto")
    Failing.times = 1
    with pytest.raises(SourceLostError, match="1 of 1 answer, and are read over TCP") as raised:
        receiver.refit("v1", zeros(), timeout_s=20, attempts=1)
    assert raised.value.worker_ids == ()


def test_closed_source_is_named_as_lost(world):
    (publisher,) = published(world)
    receiver = world.receiver(
        transport="auto", on_phase=lambda phase: publisher.close() if phase == "transfer" else None
    )
    with pytest.raises(SourceLostError) as raised:
        receiver.refit("v1", zeros(), timeout_s=20, attempts=1)
    assert raised.value.worker_ids == (publisher.worker_id,)


def test_nixl_transport_does_not_fall_back(world):
    published(world)
    receiver = world.receiver(transport="nixl")
    Failing.times = 1
    with pytest.raises(SourceLostError, match="reads still in progress"):
        receiver.refit("v1", zeros(), timeout_s=20, attempts=3)


@pytest.fixture
def lost_without_reads(monkeypatch):
    """Report a source as lost over NIXL without pending reads, so that NIXL can be tried again."""

    def lost(self: nixl_lane.Lane, *_: object, **__: object) -> None:
        if Failing.times:
            Failing.times -= 1
            remote = next(iter(self._remotes.values()))
            raise self._lost(remote, RuntimeError("NIXL_ERR"))
        read_batches(self, *_, **__)

    read_batches = nixl_lane.Lane.read_batches
    monkeypatch.setattr(nixl_lane.Lane, "read_batches", lost)


@pytest.mark.parametrize(("later_s", "transport"), [(60.0, "tcp"), (600.0, "nixl")])
def test_nixl_is_tried_again_after_a_while(
    world, lost_without_reads, monkeypatch, later_s, transport
):
    published(world)
    receiver = world.receiver(transport="auto")
    monkeypatch.setattr(Failing, "call", "")
    Failing.times = 1
    assert receiver.refit("v1", zeros(), timeout_s=20).transport == "tcp"
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + later_s)
    monkeypatch.setattr(transport_choice, "time", clock)
    live = zeros()
    stats = receiver.refit("v1", live, timeout_s=20)
    assert (stats.transport, stats.attempts) == (transport, 1)
    assert same(live, weights(1))
