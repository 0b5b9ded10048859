"""With ``auto``, a source that NIXL cannot read from and that is well is read over TCP."""

from __future__ import annotations

import time
import types

import pytest
from refit_fixtures import World, a_world, needs_nixl, zeros
from refit_processes import same, weights

from refit_mx import transport_choice
from refit_mx.errors import SourceLostError
from refit_mx.scratch import ScratchCounts
from refit_mx.transports import nixl_lane

pytestmark = [pytest.mark.slow, needs_nixl]


class Failing:
    """An agent of NIXL that fails as often as it is told to, at one of its calls."""

    times = 0
    call = "transfer"

    def __init__(self, agent: object) -> None:
        self._agent = agent

    def __getattr__(self, name: str) -> object:
        call = getattr(self._agent, name)
        if name != Failing.call:
            return call

        def fails(*args: object) -> object:
            found = call(*args)
            if Failing.times:
                Failing.times -= 1
                raise RuntimeError("NIXL_ERR_BACKEND")  # not that of a peer that has gone
            return found

        return fails


@pytest.fixture(autouse=True)
def failing(monkeypatch):
    made = nixl_lane.Lane.__init__

    def init(self: nixl_lane.Lane, **options: int) -> None:
        made(self, **options)
        self._agent = Failing(self._agent)

    monkeypatch.setattr(nixl_lane.Lane, "__init__", init)
    monkeypatch.setattr(Failing, "call", "transfer")
    monkeypatch.setattr(Failing, "times", 0)
    monkeypatch.setenv("UCX_TLS", "tcp,self")  # so that a read is not over in the call itself


@pytest.fixture
def world():
    with a_world() as made:
        yield made


def published(world: World, count: int = 1):
    publishers = [world.publisher(transports=["nixl", "tcp"]) for _ in range(count)]
    world.version("v1")
    for publisher in publishers:
        publisher.publish("v1", weights(1))
    return publishers


def quarantined(receiver) -> ScratchCounts:
    return receiver._receiving._transports._pools["nixl"].counts()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("call", ["transfer", "check_xfer_state"])
def test_the_next_attempt_reads_over_tcp_what_nixl_could_not(world, monkeypatch, call, replicas):
    monkeypatch.setattr(Failing, "call", call)
    published(world, replicas)
    receiver = world.receiver(transport="auto")
    Failing.times = 1
    live = zeros()
    stats = receiver.refit("v1", live, timeout_s=20, attempts=2)
    assert (stats.transport, stats.attempts) == ("tcp", 2)
    assert same(live, weights(1))
    assert Failing.times == 0


def test_further_versions_come_and_the_buffer_stays_in_quarantine(world):
    """Also where NIXL is to be tried again: it cannot read from an agent that it does not let go
    of."""
    (publisher,) = published(world)
    receiver = world.receiver(transport="auto")
    Failing.times = 1
    receiver.refit("v1", zeros(), timeout_s=20)
    before = quarantined(receiver)
    assert before.quarantined
    found = []
    for number in range(2, 7):
        world.version(f"v{number}")
        publisher.publish(f"v{number}", weights(number))
        live = zeros()
        stats = receiver.refit(f"v{number}", live, timeout_s=20)
        assert same(live, weights(number))
        assert stats.attempts == 1
        assert quarantined(receiver).quarantined == before.quarantined
        found.append(stats.transport)
    # Each arena has an agent of its own.
    assert found == ["nixl", "tcp", "nixl", "tcp", "nixl"]


def test_another_process_of_the_publisher_is_read_over_nixl(world):
    (publisher,) = published(world)
    receiver = world.receiver(transport="auto")
    Failing.times = 1
    receiver.refit("v1", zeros(), timeout_s=20)
    publisher.close()
    world.version("v2")
    world.publisher(transports=["nixl", "tcp"]).publish("v2", weights(2))
    assert receiver.refit("v2", zeros(), timeout_s=20).transport == "nixl"


def test_a_source_that_answers_is_not_named_as_lost(world):
    published(world)
    receiver = world.receiver(transport="auto")
    Failing.times = 1
    with pytest.raises(SourceLostError, match="1 of 1 answer, and are read over TCP") as raised:
        receiver.refit("v1", zeros(), timeout_s=20, attempts=1)
    assert raised.value.worker_ids == ()


def test_a_source_that_has_ended_is(world):
    (publisher,) = published(world)
    receiver = world.receiver(
        transport="auto", on_phase=lambda phase: publisher.close() if phase == "transfer" else None
    )
    with pytest.raises(SourceLostError) as raised:
        receiver.refit("v1", zeros(), timeout_s=20, attempts=1)
    assert raised.value.worker_ids == (publisher.worker_id,)


def test_nixl_alone_is_not_left(world):
    published(world)
    receiver = world.receiver(transport="nixl")
    Failing.times = 1
    with pytest.raises(SourceLostError, match="reads from it are not over"):
        receiver.refit("v1", zeros(), timeout_s=20, attempts=3)


@pytest.fixture
def well_again(monkeypatch):
    """The source is lost over NIXL with nothing under way: it could be read from again."""

    def lost(self: nixl_lane.Lane, *_: object, **__: object) -> None:
        if Failing.times:
            Failing.times -= 1
            remote = next(iter(self._remotes.values()))
            raise self._lost(remote, RuntimeError("NIXL_ERR"))
        carry_out(self, *_, **__)

    carry_out = nixl_lane.Lane.carry_out
    monkeypatch.setattr(nixl_lane.Lane, "carry_out", lost)


@pytest.mark.parametrize(("later_s", "transport"), [(60.0, "tcp"), (600.0, "nixl")])
def test_nixl_is_tried_again_after_a_while(world, well_again, monkeypatch, later_s, transport):
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
