"""A receiver installs exactly the requested version, verified, or changes nothing.

Some tests use internals: plans, open transports, and the call that leases.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch
from refit_fixtures import MODEL, TRANSPORTS, Meddling, needs_shm, new_transport, zeros
from refit_processes import fsdp_shards, same, slice_of, targets_of, weights

from refit_mx import (
    Deadline,
    DigestMismatchError,
    LayoutError,
    LeaseLostError,
    MxV2RefitReceiver,
    PhaseError,
    ReceiverSettings,
    RefitConfigError,
    RefitTimeoutError,
    SourceLostError,
    VersionNotFoundError,
    VersionNotReadyError,
)
from refit_mx.control import WorkerRole
from refit_mx.transports.base import SourceReads

# Receiving


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_its_slice(world, transport, axis, ranks):
    publishers = [world.publisher(f"fsdp-{rank}", transports=[transport]) for rank in range(2)]
    complete = world.publish(publishers, "v1", 1)
    for rank in range(ranks):
        layout = {"axis": axis, "ranks": ranks, "rank": rank}
        receiver = world.receiver(targets_of(**layout), transport=transport, rank=rank)
        with receiver.receive_weights_scratch("v1") as got:
            assert same(dict(got), slice_of(complete, **layout))
            assert got.stats.nbytes == sum(tensor.nbytes for tensor in got.values())


@needs_shm
def test_receiver_has_one_transport_at_a_time(world):
    receiver = world.receiver(transport="auto")
    for number, transport in enumerate(("shm", "tcp", "shm"), 1):
        with world.publisher(transports=[transport]) as publisher:
            world.version(f"v{number}")
            publisher.publish(f"v{number}", weights(number))
            live = zeros()
            assert receiver.refit(f"v{number}", live).transport == transport
            assert same(live, weights(number))
        parts = receiver._receiving._transports
        assert list(parts._open) == list(parts._pools) == [transport]


@needs_shm
def test_received_weights_outlive_a_change_of_transport(world):
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


def test_names_select_a_partial_refit(world, published):
    receiver = world.receiver()
    with receiver.receive_weights_scratch("v1", names=["embed", "scale"]) as got:
        assert list(got) == ["embed", "scale"]
        assert got.stats.nbytes == sum(published[1][name].nbytes for name in got)
    live = zeros()
    receiver.refit("v1", live, names=["layers.0.norm"])
    assert torch.equal(live["layers.0.norm"], published[1]["layers.0.norm"])
    assert not live["embed"].any()


def test_scratch_memory_is_reused(world, published):
    receiver = world.receiver()
    places = set()
    for _ in range(4):
        with receiver.receive_weights_scratch("v1") as got:
            places.add(got["embed"].data_ptr())
    assert len(places) == 1


def test_version_is_leased_until_it_is_released(world, published):
    publishers, _ = published
    receiver = world.receiver()
    with receiver.receive_weights_scratch("v1"):
        with pytest.raises(RefitTimeoutError, match=r"leased by .*receiver-0"):
            publishers[0].release("v1", timeout_s=0.2)
        with pytest.raises(PhaseError, match="not released"):
            receiver.receive_weights_scratch("v1")
    publishers[0].release("v1")


def test_failed_receive_releases_its_lease(world, published):
    publishers, _ = published
    receiver = world.receiver(targets_of({"missing": ("float32", (3,))}))
    with pytest.raises(LayoutError, match="missing"):
        receiver.receive_weights_scratch("v1")
    publishers[0].release("v1", timeout_s=5)


def test_plan_is_reused_for_any_order_of_replicas(world, monkeypatch):
    from refit_mx.receive import source_cache

    planned = []
    plan_reads = source_cache.plan_reads
    monkeypatch.setattr(
        source_cache,
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
    state = {"w": torch.randn(3000, 4)}
    publishers = world.publish_replicas("v1", state, 2)
    targets = targets_of({"w": ("float32", (3000, 4))})
    first = set()
    for rank in range(2):
        with world.receiver(targets, rank=rank).receive_weights_scratch("v1") as got:
            assert same(dict(got), state)
            first.update(got.stats.sources)
    assert first == {publisher.worker_id for publisher in publishers}


def test_different_replicas_are_never_mixed(world):
    world.publish_state("v1", weights(1))
    other = weights(1)
    other["embed"][50, 7] += 1
    world.publisher().publish("v1", other)
    live = zeros()
    with pytest.raises(DigestMismatchError, match="published different bytes of the same shards"):
        world.receiver().refit("v1", live)
    assert same(live, zeros())


def test_receiver_can_become_a_source_of_its_version(world, published):
    publishers, complete = published
    live = zeros()
    world.receiver().refit("v1", live)
    relays = [world.publisher(f"fsdp-{rank}") for rank in range(2)]
    for rank, relay in enumerate(relays):
        relay.publish("v1", fsdp_shards(live, 2, rank))
    publishers[0].close()
    publishers[1].close()
    assert world.state("v1") == "READY"
    with world.receiver().receive_weights_scratch("v1") as got:
        assert same(dict(got), complete)
        assert set(got.stats.sources) == {relay.worker_id for relay in relays}


# Refusals


@pytest.mark.parametrize(
    ("version", "error"), [("nothing", VersionNotFoundError), ("v2", VersionNotReadyError)]
)
def test_unreadable_version_is_refused(world, published, version, error):
    world.version("v2", ["fsdp-0", "fsdp-1"])
    live = zeros()
    with pytest.raises(error):
        world.receiver().refit(version, live)
    assert same(live, zeros())


def test_two_targets_with_the_same_name_are_refused(world):
    with pytest.raises(RefitConfigError, match="the same name"):
        world.receiver(targets_of() + targets_of())


@pytest.mark.parametrize("names", [[], ["nothing"], ["embed", "nothing"]])
def test_unknown_target_names_are_refused(world, published, names):
    with pytest.raises(RefitConfigError, match="expected names of the 4 targets"):
        world.receiver().receive_weights_scratch("v1", names=names)


def test_unknown_transport_is_refused(world):
    with pytest.raises(RefitConfigError, match="expected nixl, shm, tcp or auto"):
        world.receiver(transport="carrier pigeon")


def test_missing_rows_of_a_lost_slot_name_the_slot(world, published):
    publishers, _ = published
    silent = Meddling(new_transport("tcp"), before=lambda source_reads: None)
    receiver = world.receiver(transport=silent, on_phase=lambda name: at.get(name, int)())
    at = {"discover": publishers[1].close}
    with pytest.raises(SourceLostError, match="fsdp-1"):
        receiver.receive_weights_scratch("v1", timeout_s=20)
    assert silent.fetched == []


def test_silent_source_is_left_out(world):
    # Like a source behind a link that lost one connection.
    world.publish_replicas("v1", weights(1), 2)
    attempts = []

    def stall(source_reads: Sequence[SourceReads], deadline: Deadline, on_done) -> None:
        attempts.append([each.source.worker_id for each in source_reads])
        if len(attempts) == 1:
            on_done(1, 0, len(source_reads[1].reads))
            while deadline.left_s:
                time.sleep(0.01)
            raise deadline.error("reading")

    inner = Meddling(new_transport("tcp"), stalling=stall)
    receiver = world.receiver(transport=inner, settings=ReceiverSettings(stall_timeout_s=0.2))
    live = zeros()
    stats = receiver.refit("v1", live)
    assert same(live, weights(1))
    assert stats.attempts == 2
    assert len(attempts[0]) == 2
    assert attempts[1] == attempts[0][1:]
    inner.close()


def test_the_only_source_of_a_part_gets_every_attempt(world, published):
    publishers, complete = published
    worker_id = publishers[0].worker_id

    def lose(source_reads: Sequence[SourceReads]) -> None:
        if len(inner.fetched) < 3:
            raise SourceLostError("late", (worker_id,))

    inner = Meddling(new_transport("tcp"), before=lose)
    receiver = world.receiver(transport=inner)
    with pytest.raises(SourceLostError, match="late"):
        receiver.receive_weights_scratch("v1", attempts=2)
    inner.fetched.clear()
    with receiver.receive_weights_scratch("v1", attempts=3) as got:
        assert same(dict(got), complete)
        assert got.stats.attempts == 3
    inner.close()


def test_slow_fetch_with_progress_is_no_stall(world):
    state = {f"w{number}": torch.full((3,), float(number)) for number in range(6)}
    world.publish_state("v1", state)
    inner = Meddling(new_transport("tcp"), between=lambda: time.sleep(0.15))
    targets = targets_of(dict.fromkeys(state, ("float32", (3,))))
    settings = ReceiverSettings(stall_timeout_s=0.5)
    receiver = world.receiver(targets, transport=inner, settings=settings)
    with receiver.receive_weights_scratch("v1") as got:
        assert same(dict(got), state)
        assert got.stats.attempts == 1
        assert got.stats.seconds["fetch"] > 0.5
    inner.close()


def test_one_attempt_is_not_repeated(world, published):
    publishers, _ = published
    transport = Meddling(new_transport("tcp"), before=lambda source_reads: publishers[0].close())
    receiver = world.receiver(transport=transport)
    with pytest.raises(SourceLostError) as raised:
        receiver.receive_weights_scratch("v1", attempts=1)
    assert raised.value.worker_ids == (publishers[0].worker_id,)
    assert raised.value.retryable


def test_two_threads_cannot_receive_at_once(world, published):
    held, go = threading.Event(), threading.Event()

    def wait(source_reads):
        held.set()
        assert go.wait(30)

    receiver = world.receiver(transport=Meddling(new_transport("tcp"), before=wait))
    live = zeros()
    other = threading.Thread(target=receiver.refit, args=("v1", live))
    other.start()
    assert held.wait(30)
    with pytest.raises(PhaseError, match="another thread"):
        receiver.receive_weights_scratch("v1")
    go.set()
    other.join(30)
    assert same(live, published[1])


def test_closed_receiver_raises(world):
    receiver = world.receiver()
    receiver.close()
    receiver.close()
    with pytest.raises(PhaseError, match="closed"):
        receiver.receive_weights_scratch("v1")


def test_passed_deadline_is_reported(world, published):
    def slow(phase):
        if phase == "plan":
            while clock.left_s:
                pass

    receiver = world.receiver(on_phase=slow)
    clock = Deadline(0.5, "slow")
    live = zeros()
    with pytest.raises(RefitTimeoutError, match=r"refit of version v1: not done after 0.5 s"):
        receiver.refit("v1", live, timeout_s=0.5)
    assert same(live, zeros())


def test_model_name_must_match_the_control_planes(world, published):
    receiver = MxV2RefitReceiver(
        "another", control=world.server.address, targets=targets_of(), transport="tcp"
    )
    with receiver, pytest.raises(RefitConfigError, match=f"of model '{MODEL}'"):
        receiver.receive_weights_scratch("v1")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_tied_weights_are_published_and_closed_without_a_crash(world, transport):
    tied = torch.nn.Parameter(torch.randn(6, 4))
    publisher = world.publisher(transports=[transport])
    for number in range(3):
        world.version(f"v{number}")
        publisher.publish(f"v{number}", {"embed": tied, "head": tied})
    shapes = {"embed": ("float32", (6, 4)), "head": ("float32", (6, 4))}
    live = zeros(shapes)
    world.receiver(targets_of(shapes), transport=transport).refit("v2", live)
    assert same(live, {"embed": tied.detach(), "head": tied.detach()})
    publisher.close()


def test_lost_lease_installs_nothing(world):
    publisher = world.publisher()
    world.publish([publisher], "v1", 1)

    def end_lease(phase):
        if phase == "verify":
            leases[0].close()

    leases = []
    receiver = world.receiver(on_phase=end_lease)
    lease = receiver._control.lease

    def taken(*args, **settings):
        leases.append(lease(*args, **settings))
        return leases[-1]

    receiver._control.lease = taken
    live = zeros()
    with pytest.raises(LeaseLostError):
        receiver.refit("v1", live)
    assert same(live, zeros())
