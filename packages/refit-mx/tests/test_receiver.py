"""A receiver brings exactly the version that was asked for, verified, or leaves all as it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch
from refit_fixtures import (
    MODEL,
    TRANSPORTS,
    Meddling,
    needs_shm,
    zeros,
)
from refit_processes import SHAPES, fsdp_shards, same, slice_of, targets_of, weights

from refit_mx.control.records import WorkerRole
from refit_mx.deadline import Deadline
from refit_mx.errors import (
    ControlUnavailableError,
    DigestMismatchError,
    LayoutError,
    LeaseLostError,
    PhaseError,
    RefitConfigError,
    RefitTimeoutError,
    SourceLostError,
    VersionNotFoundError,
    VersionNotReadyError,
)
from refit_mx.layout import TargetTPLayout
from refit_mx.plan.targets import mesh_target, tp_target
from refit_mx.receiver import MxV2RefitReceiver
from refit_mx.settings import ReceiverSettings
from refit_mx.tensor_types import TensorSpec
from refit_mx.transports.base import Fetch
from refit_mx.transports.tcp import TcpTransport
from refit_mx.transports.work import OnDone

# Receiving


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_its_slice(world, transport, axis, ranks):
    publishers = [world.publisher(f"fsdp-{rank}", transports=[transport]) for rank in range(2)]
    whole = world.publish(publishers, "v1", 1)
    for rank in range(ranks):
        layout = {"axis": axis, "ranks": ranks, "rank": rank}
        receiver = world.receiver(targets_of(**layout), transport=transport, rank=rank)
        with receiver.receive_weights_scratch("v1") as got:
            assert same(dict(got), slice_of(whole, **layout))
            assert got.stats.nbytes == sum(tensor.nbytes for tensor in got.values())


def test_a_slice_along_two_axes(world, published):
    spec = TensorSpec("embed", "float32", SHAPES["embed"][1])
    receiver = world.receiver([mesh_target(spec, [(0, 3, 1), (1, 2, 1)])])
    with receiver.receive_weights_scratch("v1") as got:
        assert torch.equal(got["embed"], published[1]["embed"][32:64, 20:40])


def test_an_auto_receiver_takes_what_the_sources_have(world, published):
    with world.receiver(transport="auto").receive_weights_scratch("v1") as got:
        assert same(dict(got), published[1])
        assert got.stats.transport == "tcp"


@needs_shm
def test_a_receiver_that_changes_its_transport_gives_up_the_other_one(world):
    receiver = world.receiver(transport="auto")
    for number, transport in enumerate(("shm", "tcp", "shm"), 1):
        with world.publisher(transports=[transport]) as publisher:
            world.version(f"v{number}")
            publisher.publish(f"v{number}", weights(number))
            live = zeros()
            assert receiver.refit(f"v{number}", live).transport == transport
            assert same(live, weights(number))
        parts = receiver._receiving._transports
        assert list(parts._made) == list(parts._pools) == [transport]


@needs_shm
def test_weights_that_came_by_another_transport_stay_until_they_are_given_back(world):
    receiver = world.receiver(transport="auto")
    publishers = [world.publisher(transports=[transport]) for transport in ("shm", "tcp")]
    for number, publisher in enumerate(publishers, 1):
        world.version(f"v{number}")
        publisher.publish(f"v{number}", weights(number))
    with receiver.receive_weights_scratch("v1") as first:
        with receiver.receive_weights_scratch("v2") as second:
            assert (first.stats.transport, second.stats.transport) == ("shm", "tcp")
            assert same(dict(second), weights(2))
        assert same(dict(first), weights(1))


def test_some_names_are_a_partial_refit(world, published):
    receiver = world.receiver()
    with receiver.receive_weights_scratch("v1", names=["embed", "scale"]) as got:
        assert list(got) == ["embed", "scale"]
        assert got.stats.nbytes == sum(published[1][name].nbytes for name in got)
    live = zeros()
    receiver.refit("v1", live, names=["layers.0.norm"])
    assert torch.equal(live["layers.0.norm"], published[1]["layers.0.norm"])
    assert not live["embed"].any()


def test_what_was_received_cannot_be_used_after_it_was_given_back(world, published):
    receiver = world.receiver()
    with receiver.receive_weights_scratch("v1") as got:
        pass
    with pytest.raises(PhaseError, match="given back"):
        got["embed"]


def test_scratch_memory_is_used_again(world, published):
    receiver = world.receiver()
    places = set()
    for _ in range(4):
        with receiver.receive_weights_scratch("v1") as got:
            places.add(got["embed"].data_ptr())
    assert len(places) == 1


def test_a_version_is_leased_until_it_is_given_back(world, published):
    publishers, _ = published
    receiver = world.receiver()
    with receiver.receive_weights_scratch("v1"):
        with pytest.raises(RefitTimeoutError, match=r"leased by .*receiver-0"):
            publishers[0].release("v1", timeout_s=0.2)
        with pytest.raises(PhaseError, match="not given back"):
            receiver.receive_weights_scratch("v1")
    publishers[0].release("v1")


def test_a_receive_that_failed_gives_its_lease_back(world, published):
    publishers, _ = published
    receiver = world.receiver(targets_of({"missing": ("float32", (3,))}))
    with pytest.raises(LayoutError, match="missing"):
        receiver.receive_weights_scratch("v1")
    publishers[0].release("v1", timeout_s=5)


def test_two_versions_can_be_in_scratch_at_once(world, published):
    publishers, whole = published
    other = world.publish(publishers, "v2", 2)
    receiver = world.receiver()
    with (
        receiver.receive_weights_scratch("v1") as one,
        receiver.receive_weights_scratch("v2") as two,
    ):
        assert same(dict(one), whole)
        assert same(dict(two), other)


def test_a_plan_is_kept_for_the_next_version_of_the_same_structure(world, published, monkeypatch):
    from refit_mx import kept_plan

    planned = []
    plan_reads = kept_plan.plan_reads

    def counted(*args, **settings):
        planned.append(args)
        return plan_reads(*args, **settings)

    monkeypatch.setattr(kept_plan, "plan_reads", counted)
    publishers, _ = published
    receiver = world.receiver()
    live = zeros()
    receiver.refit("v1", live)
    whole = world.publish(publishers, "v2", 2)
    receiver.refit("v2", live)
    assert same(live, whole)
    assert len(planned) == 1
    receiver.refit("v2", live, names=["embed"])
    assert len(planned) == 2


def test_a_plan_is_kept_whichever_replica_was_heard_last(world, monkeypatch):
    from refit_mx import kept_plan

    planned = []
    plan_reads = kept_plan.plan_reads
    monkeypatch.setattr(
        kept_plan,
        "plan_reads",
        lambda *args, **kept: (planned.append(1), plan_reads(*args, **kept))[1],
    )
    publishers = [world.publisher() for _ in range(2)]
    receiver = world.receiver()
    for number in range(1, 5):
        world.version(f"v{number}")
        for publisher in publishers:
            publisher.publish(f"v{number}", weights(number))
        last = publishers[number % 2].worker_id
        world.control.register_worker(last, WorkerRole.TRAINER, MODEL, ttl_s=600 * number)
        live = zeros()
        receiver.refit(f"v{number}", live)
        assert same(live, weights(number))
    assert len(planned) == 1


def test_replicas_share_the_work(world):
    publishers = [world.publisher() for _ in range(2)]
    world.version("v1")
    state = {"w": torch.randn(3000, 4)}
    for publisher in publishers:
        publisher.publish("v1", state)
    targets = targets_of(
        {f"w{part}": ("float32", (1, 1)) for part in ()} | {"w": ("float32", (3000, 4))}
    )
    first = set()
    for rank in range(2):
        with world.receiver(targets, rank=rank).receive_weights_scratch("v1") as got:
            assert same(dict(got), state)
            first.update(got.stats.sources)
    assert first == {publisher.worker_id for publisher in publishers}


def test_replicas_that_differ_are_never_mixed(world):
    world.version("v1")
    world.publisher().publish("v1", weights(1))
    other = weights(1)
    other["embed"][50, 7] += 1
    world.publisher().publish("v1", other)
    live = zeros()
    with pytest.raises(DigestMismatchError, match="published different bytes of the same shards"):
        world.receiver().refit("v1", live)
    assert same(live, zeros())


def test_a_receiver_that_installed_a_version_can_be_a_source_of_it(world, published):
    publishers, whole = published
    live = zeros()
    world.receiver().refit("v1", live)
    relays = [world.publisher(f"fsdp-{rank}") for rank in range(2)]
    for rank, relay in enumerate(relays):
        relay.publish("v1", fsdp_shards(live, 2, rank))
    publishers[0].close()
    publishers[1].close()
    assert world.state("v1") == "READY"
    with world.receiver().receive_weights_scratch("v1") as got:
        assert same(dict(got), whole)
        assert set(got.stats.sources) == {relay.worker_id for relay in relays}


# Refusals


@pytest.mark.parametrize(
    ("version", "error"), [("nothing", VersionNotFoundError), ("v2", VersionNotReadyError)]
)
def test_a_version_that_cannot_be_read_is_refused(world, published, version, error):
    world.version("v2", ["fsdp-0", "fsdp-1"])
    live = zeros()
    with pytest.raises(error):
        world.receiver().refit(version, live)
    assert same(live, zeros())


def test_two_targets_of_one_name_are_refused(world):
    with pytest.raises(RefitConfigError, match="one name"):
        world.receiver(targets_of() + targets_of())


@pytest.mark.parametrize("names", [[], ["nothing"], ["embed", "nothing"]])
def test_names_that_are_no_targets_are_refused(world, published, names):
    with pytest.raises(RefitConfigError, match="expected some of the 4 targets"):
        world.receiver().receive_weights_scratch("v1", names=names)


def test_an_unknown_transport_is_refused(world):
    with pytest.raises(RefitConfigError, match="expected nixl, shm, tcp or auto"):
        world.receiver(transport="carrier pigeon")


def test_missing_rows_of_a_slot_nobody_fills_are_a_lost_source(world, published):
    publishers, _ = published
    silent = Meddling(TcpTransport(), before=lambda fetches: None)
    receiver = world.receiver(transport=silent, on_phase=lambda name: at.get(name, int)())
    at = {"discover": publishers[1].close}
    with pytest.raises(SourceLostError, match="fsdp-1"):
        receiver.receive_weights_scratch("v1", timeout_s=20)
    assert silent.fetched == []


def test_a_lost_source_is_left_out_of_the_next_attempt(world):
    publishers = [world.publisher() for _ in range(2)]
    world.version("v1")
    for publisher in publishers:
        publisher.publish("v1", weights(1))

    def close_one(fetches):
        if len(transport.fetched) == 1:
            lost.append(fetches[0].source.worker_id)
            next(each for each in publishers if each.worker_id == lost[0]).close()

    lost: list[str] = []
    transport = Meddling(TcpTransport(), before=close_one)
    live = zeros()
    stats = world.receiver(transport=transport).refit("v1", live, timeout_s=30)
    assert same(live, weights(1))
    assert stats.attempts == 2
    assert lost[0] not in stats.sources


def test_a_source_that_answers_and_sends_nothing_is_left_out_for_a_replica(world):
    """As behind a link that lost one connection."""
    publishers = [world.publisher() for _ in range(2)]
    world.version("v1")
    for publisher in publishers:
        publisher.publish("v1", weights(1))
    asked = []

    def nothing_comes(fetches: Sequence[Fetch], deadline: Deadline, on_done: OnDone) -> None:
        asked.append([fetch.source.worker_id for fetch in fetches])
        if len(asked) == 1:
            on_done(1, 0, len(fetches[1].reads))
            while deadline.left_s:
                time.sleep(0.01)
            raise deadline.error("reading")

    inner = Meddling(TcpTransport(), stalling=nothing_comes)
    receiver = world.receiver(transport=inner, settings=ReceiverSettings(stall_timeout_s=0.2))
    live = zeros()
    stats = receiver.refit("v1", live)
    assert same(live, weights(1))
    assert stats.attempts == 2
    assert len(asked[0]) == 2
    assert asked[1] == asked[0][1:]
    inner.close()


def test_a_fetch_may_take_long_as_long_as_something_comes(world):
    publisher = world.publisher()
    world.version("v1")
    state = {f"w{number}": torch.full((3,), float(number)) for number in range(6)}
    publisher.publish("v1", state)
    inner = Meddling(TcpTransport(), between=lambda: time.sleep(0.15))
    targets = targets_of(dict.fromkeys(state, ("float32", (3,))))
    settings = ReceiverSettings(stall_timeout_s=0.5)
    receiver = world.receiver(targets, transport=inner, settings=settings)
    with receiver.receive_weights_scratch("v1") as got:
        assert same(dict(got), state)
        assert got.stats.attempts == 1
        assert got.stats.seconds["fetch"] > 0.5
    inner.close()


def test_one_attempt_is_one(world, published):
    publishers, _ = published
    transport = Meddling(TcpTransport(), before=lambda fetches: publishers[0].close())
    receiver = world.receiver(transport=transport)
    with pytest.raises(SourceLostError) as raised:
        receiver.receive_weights_scratch("v1", attempts=1)
    assert raised.value.worker_ids == (publishers[0].worker_id,)
    assert raised.value.retryable


def test_a_lease_that_lapsed_is_told_and_nothing_installed(world, published, monkeypatch):
    from refit_mx.control.leases import VersionLease

    def lost(lease):
        raise LeaseLostError("lapsed")

    monkeypatch.setattr(VersionLease, "check", lost)
    live = zeros()
    with pytest.raises(LeaseLostError):
        world.receiver().refit("v1", live)
    assert same(live, zeros())


def test_two_threads_cannot_receive_at_once(world, published):
    held, go = threading.Event(), threading.Event()

    def wait(fetches):
        held.set()
        assert go.wait(30)

    receiver = world.receiver(transport=Meddling(TcpTransport(), before=wait))
    live = zeros()
    other = threading.Thread(target=receiver.refit, args=("v1", live))
    other.start()
    assert held.wait(30)
    with pytest.raises(PhaseError, match="another thread"):
        receiver.receive_weights_scratch("v1")
    go.set()
    other.join(30)
    assert same(live, published[1])


def test_a_closed_receiver_says_so(world):
    receiver = world.receiver()
    receiver.close()
    receiver.close()
    with pytest.raises(PhaseError, match="closed"):
        receiver.receive_weights_scratch("v1")


def test_a_deadline_that_has_passed_is_told(world, published):
    def slow(phase):
        if phase == "plan":
            while clock.left_s:
                pass

    from refit_mx.deadline import Deadline

    receiver = world.receiver(on_phase=slow)
    clock = Deadline(0.5, "slow")
    live = zeros()
    with pytest.raises(RefitTimeoutError, match=r"refit of version v1: not done after 0.5 s"):
        receiver.refit("v1", live, timeout_s=0.5)
    assert same(live, zeros())


def test_no_control_plane_is_told_within_the_deadline(world, published):
    receiver = world.receiver(settings=ReceiverSettings(rpc_timeout_s=30))
    world.server.close()
    with pytest.raises((ControlUnavailableError, RefitTimeoutError)):
        receiver.receive_weights_scratch("v1", timeout_s=2)


def test_a_slice_with_an_uneven_edge(world):
    shapes = {"w": ("float32", (5, 3))}
    publishers = [world.publisher(f"fsdp-{rank}") for rank in range(4)]
    world.version("v1", [f"fsdp-{rank}" for rank in range(4)])
    whole = weights(1, shapes)
    for rank, publisher in enumerate(publishers):
        publisher.publish("v1", fsdp_shards(whole, 4, rank))
    spec = TensorSpec("w", "float32", (5, 3))
    for rank in range(4):
        receiver = world.receiver([tp_target(spec, TargetTPLayout(4, rank))])
        with receiver.receive_weights_scratch("v1") as got:
            assert same(dict(got), slice_of(whole, ranks=4, rank=rank))


def test_the_model_name_is_that_of_the_control_plane(world, published):
    receiver = MxV2RefitReceiver(
        "another", control=world.server.address, targets=targets_of(), transport="tcp"
    )
    with receiver, pytest.raises(RefitConfigError, match=f"of model '{MODEL}'"):
        receiver.receive_weights_scratch("v1")
