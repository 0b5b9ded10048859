"""A publisher fills its slot of a version, and never changes what may still be read."""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from refit_fixtures import MODEL, TRANSPORTS, World, a_world, exported, needs_nixl, verbose
from refit_processes import SHAPES, fsdp_shards, same, targets_of, weights

from refit_mx.control import heartbeat
from refit_mx.control.client import ControlClient
from refit_mx.control.embedded import EmbeddedControlServer
from refit_mx.control.records import WorkerRole
from refit_mx.control.store import SqliteStore
from refit_mx.errors import (
    ControlError,
    ControlUnavailableError,
    PhaseError,
    RefitConfigError,
    RefitTimeoutError,
    VersionNotFoundError,
    VersionNotReadyError,
)
from refit_mx.manifest import decode_table
from refit_mx.publisher import MxV2TrainingPublisher
from refit_mx.settings import PublisherSettings
from refit_mx.shard_sources import LocalShard
from refit_mx.source_client import is_gone
from refit_mx.tensor_types import Box
from refit_mx.transports.nixl_source import NixlSource


def received(world: World, version_id: str, **settings) -> dict[str, torch.Tensor]:
    receiver = world.receiver(**settings)
    with receiver.receive_weights_scratch(version_id, timeout_s=20) as got:
        return {name: tensor.clone() for name, tensor in got.items()}


@pytest.fixture
def handled(monkeypatch):
    """The SIGTERMs that this process handled, and went on."""
    monkeypatch.setattr(heartbeat, "_earlier", heartbeat._earlier)
    signals = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    yield signals
    signal.signal(signal.SIGTERM, before)


def test_a_version_is_ready_once_every_slot_is_published(world):
    publishers = [world.publisher(f"fsdp-{rank}") for rank in range(2)]
    world.version("v1", ["fsdp-0", "fsdp-1"])
    whole = weights(1)
    publishers[0].publish("v1", fsdp_shards(whole, 2, 0))
    assert world.state("v1") == "STAGING"
    publishers[1].publish("v1", fsdp_shards(whole, 2, 1))
    assert world.state("v1") == "READY"


def test_the_manifest_says_what_was_published(world):
    publisher = world.publisher()
    world.version("v1")
    manifest = publisher.publish("v1", weights(1))
    assert (manifest.model_name, manifest.version_id) == (MODEL, "v1")
    assert (manifest.worker_id, manifest.source_slot_id) == (publisher.worker_id, "fsdp-0")
    assert decode_table(manifest.table).names == list(SHAPES)
    (shard,) = world.control.list_shards("v1")
    assert shard.tensor_count == len(SHAPES)
    assert shard.total_bytes == sum(tensor.nbytes for tensor in weights(1).values())


def test_tensors_may_change_as_soon_as_publish_returned(world):
    publisher = world.publisher()
    world.version("v1")
    state = weights(1)
    publisher.publish("v1", state)
    for tensor in state.values():
        tensor.zero_()
    assert same(received(world, "v1"), weights(1))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_wire_dtype_reaches_the_receiver(world, transport):
    publisher = world.publisher(
        wire_dtype={"embed": "bfloat16", "layers.0.up": "float8_e4m3fn"}, transports=[transport]
    )
    world.version("v1")
    publisher.publish("v1", weights(1))
    shapes = SHAPES | {
        "embed": ("bfloat16", SHAPES["embed"][1]),
        "layers.0.up": ("float8_e4m3fn", SHAPES["layers.0.up"][1]),
    }
    got = received(world, "v1", targets=targets_of(shapes), transport=transport)
    expected = {
        name: tensor.to(getattr(torch, shapes[name][0])) for name, tensor in weights(1).items()
    }
    assert same(got, expected)


def test_tied_weights_are_published_under_both_names_and_close_is_clean(world):
    tied = torch.randn(5, 3)
    publisher = world.publisher()
    world.version("v1")
    publisher.publish("v1", {"embed": tied, "lm_head": tied})
    shapes = {"embed": ("float32", (5, 3)), "lm_head": ("float32", (5, 3))}
    assert same(received(world, "v1", targets=targets_of(shapes)), {"embed": tied, "lm_head": tied})
    publisher.close()


def test_a_model_that_grows_gets_larger_arenas(world):
    publisher = world.publisher()
    for size in (3, 5000, 70_000):
        version = f"v{size}"
        world.version(version)
        state = {"w": torch.randn(size)}
        publisher.publish(version, state)
        got = received(world, version, targets=targets_of({"w": ("float32", (size,))}))
        assert same(got, state)


def test_an_empty_shard_is_published_too(world):
    publisher = world.publisher()
    world.version("v1")
    publisher.publish("v1", [LocalShard("w", (4, 2), Box((4, 0), (0, 2)), torch.zeros(0, 2))])
    assert world.state("v1") == "READY"


@pytest.mark.parametrize(
    ("version", "slots", "error", "says"),
    [
        ("unknown", None, VersionNotFoundError, "unknown"),
        ("other-slot", ["fsdp-7"], RefitConfigError, "does not expect slot 'fsdp-0'"),
    ],
)
def test_a_version_that_cannot_be_filled_is_refused_before_anything_is_copied(
    world, version, slots, error, says
):
    copied = []
    publisher = world.publisher(on_phase=copied.append)
    if slots:
        world.version(version, slots)
    with pytest.raises(error, match=says):
        publisher.publish(version, weights(1))
    assert copied == []
    assert publisher.versions == ()


def test_a_version_of_another_model_is_refused(world):
    world.control.create_version("other", ["fsdp-0"], idempotency_key="x", version_id="x")
    with pytest.raises(RefitConfigError, match="is of model 'other'"):
        world.publisher().publish("x", weights(1))


def test_a_version_that_is_being_released_is_refused(world):
    world.version("v1")
    world.control.delete_version("v1")
    with pytest.raises(VersionNotReadyError, match="RELEASING"):
        world.publisher().publish("v1", weights(1))


def test_a_publish_that_failed_leaves_its_arena_free(world):
    def refuse(phase):
        if phase == fail_at:
            raise RuntimeError(phase)

    publisher = world.publisher(on_phase=refuse)
    for fail_at in ("stage", "serve"):
        world.version(fail_at)
        for _ in range(3):
            with pytest.raises(RuntimeError, match=fail_at):
                publisher.publish(fail_at, weights(1))
    fail_at = None
    assert publisher.versions == ()
    publisher.publish("stage", weights(1))
    assert same(received(world, "stage"), weights(1))


def test_publishing_the_same_weights_again_changes_nothing(world):
    publisher = world.publisher()
    world.version("v1")
    first = publisher.publish("v1", weights(1))
    assert publisher.publish("v1", weights(1)) == first
    assert len(world.control.list_shards("v1")) == 1


def test_other_weights_under_a_published_version_are_refused(world):
    publisher = world.publisher()
    world.version("v1")
    publisher.publish("v1", weights(1))
    with pytest.raises(RefitConfigError, match="published with other weights"):
        publisher.publish("v1", weights(2))
    assert same(received(world, "v1"), weights(1))


def test_the_oldest_version_makes_room_for_the_third(world):
    publisher = world.publisher()
    for number in (1, 2, 3):
        world.publish([publisher], f"v{number}", number)
    assert publisher.versions == ("v2", "v3")
    assert world.state("v1") == "RELEASING"
    assert same(received(world, "v3"), weights(3))


@pytest.mark.parametrize("leased", [False, True])
def test_a_version_that_was_given_up_makes_room_before_one_that_can_be_read(world, leased):
    publishers = [world.publisher(f"fsdp-{rank}") for rank in range(2)]
    world.publish(publishers, "v1", 1)
    slots = ["fsdp-0", "fsdp-1"]
    world.version("v2", slots)
    publishers[0].publish("v2", fsdp_shards(weights(2), 2, 0))
    world.control.delete_version("v2")
    world.version("v3", slots)
    lease = world.control.lease("v1", "reader", ttl_s=30) if leased else None
    publishers[0].publish("v3", fsdp_shards(weights(3), 2, 0), timeout_s=10)
    assert publishers[0].versions == ("v1", "v3")
    assert world.state("v1") == "READY"
    if lease is not None:
        lease.close()


def test_a_third_version_waits_for_the_lease_on_the_first(world):
    publisher = world.publisher()
    for number in (1, 2):
        world.publish([publisher], f"v{number}", number)
    lease = world.control.lease("v1", "reader", ttl_s=30)
    world.version("v3")
    with pytest.raises(RefitTimeoutError, match=r"v1.*leased by"):
        publisher.publish("v3", weights(3), timeout_s=0.5)
    assert publisher.versions == ("v1", "v2")
    done = threading.Thread(target=publisher.publish, args=("v3", weights(3)))
    done.start()
    lease.close()
    done.join(30)
    assert publisher.versions == ("v2", "v3")


def test_release_frees_the_arena_once_nobody_holds_a_lease(world):
    publisher = world.publisher()
    world.publish([publisher], "v1", 1)
    with world.control.lease("v1", "reader", ttl_s=30):
        with pytest.raises(RefitTimeoutError, match="leased by"):
            publisher.release("v1", timeout_s=0.3)
        assert publisher.versions == ("v1",)
    publisher.release("v1")
    publisher.release("v1")
    assert publisher.versions == ()
    assert world.control.list_shards("v1") == []


@pytest.mark.parametrize("end", ["close", "mark_stale"])
def test_the_versions_of_a_publisher_that_ends_leave_ready(world, end):
    publisher = world.publisher()
    world.publish([publisher], "v1", 1)
    getattr(publisher, end)()
    assert world.state("v1") == "RELEASING"


@needs_nixl
def test_the_source_server_of_a_publisher_outlives_its_nixl_agents(world, monkeypatch):
    publisher = world.publisher(transports=["nixl"])
    world.version("v1")
    manifest = publisher.publish("v1", weights(1))
    gone = []
    unregister = NixlSource.unregister

    def unregistering(source: NixlSource, memory: torch.Tensor) -> None:
        unregister(source, memory)
        gone.append(is_gone(manifest, 5))

    monkeypatch.setattr(NixlSource, "unregister", unregistering)
    publisher.close()
    assert gone == [False]
    assert is_gone(manifest, 5)


def test_a_closed_publisher_says_so(world):
    publisher = world.publisher()
    publisher.close()
    publisher.close()
    with pytest.raises(PhaseError, match="closed"):
        publisher.publish("v1", weights(1))


def test_two_threads_cannot_publish_at_once(world):
    held, go = threading.Event(), threading.Event()

    def wait(phase):
        if phase == "stage":
            held.set()
            assert go.wait(30)

    publisher = world.publisher(on_phase=wait)
    world.version("v1")
    other = threading.Thread(target=publisher.publish, args=("v1", weights(1)))
    other.start()
    assert held.wait(30)
    with pytest.raises(PhaseError, match="another thread"):
        publisher.publish("v1", weights(1))
    go.set()
    other.join(30)


@pytest.mark.parametrize("transports", [["rdma"], ["tcp", "file"]])
def test_an_unknown_transport_is_refused(world, transports):
    with pytest.raises(RefitConfigError, match="expected nixl, shm and tcp"):
        world.publisher(transports=transports)


def test_without_a_control_plane_nothing_starts():
    with EmbeddedControlServer() as server:
        address = server.address
    with pytest.raises((ControlUnavailableError, RefitTimeoutError)):
        MxV2TrainingPublisher(MODEL, "fsdp-0", control=address, transports=["tcp"])


def test_an_offer_is_made_again_after_the_control_plane_was_away(tmp_path):
    state = tmp_path / "state"
    server = EmbeddedControlServer(store=SqliteStore(state))
    port = int(server.address.rpartition(":")[2])

    def away(phase):
        if phase == "offer" and not offered:
            offered.append(phase)
            server.close()

    offered = []
    with ControlClient(server.address) as control:
        control.create_version(MODEL, ["fsdp-0"], idempotency_key="v1", version_id="v1")
        with MxV2TrainingPublisher(
            MODEL, "fsdp-0", control=server.address, transports=["tcp"], on_phase=away
        ) as publisher:
            with pytest.raises((ControlUnavailableError, RefitTimeoutError)):
                publisher.publish("v1", weights(1), timeout_s=1.5)
            with EmbeddedControlServer(port=port, store=SqliteStore(state)):
                with pytest.raises(RefitConfigError, match="other weights"):
                    publisher.publish("v1", weights(2), timeout_s=20)
                publisher.publish("v1", weights(1), timeout_s=20)
                assert control.get_version("v1").state.name == "READY"


def test_a_control_plane_that_forgot_everything_is_told_of_the_publisher_with_the_next_offer():
    server = EmbeddedControlServer()
    port = int(server.address.rpartition(":")[2])
    without_a_beat = {"heartbeat_ttl_s": 600}
    with (
        server,
        ControlClient(server.address) as control,
        MxV2TrainingPublisher(
            MODEL, "fsdp-0", control=server.address, transports=["tcp"], **without_a_beat
        ) as publisher,
    ):
        server.close()
        with EmbeddedControlServer(port=port):
            control.create_version(MODEL, ["fsdp-0"], idempotency_key="v1", version_id="v1")
            publisher.publish("v1", weights(1), timeout_s=20)
            assert control.get_version("v1").state.name == "READY"


def test_an_offer_of_a_worker_that_said_stale_is_refused(world):
    publisher = world.publisher()
    world.version("v1")
    world.control.mark_stale(publisher.worker_id, WorkerRole.TRAINER, MODEL)
    with pytest.raises(ControlError, match="said STALE"):
        publisher.publish("v1", weights(1))
    assert publisher.versions == ()


def test_a_process_that_goes_on_after_sigterm_publishes_on_if_it_was_set_so(world, handled):
    publisher = world.publisher(settings=PublisherSettings(stale_on_sigterm=False))
    ended = world.publisher("fsdp-1")
    world.version("v1", ["fsdp-0", "fsdp-1"])
    signal.raise_signal(signal.SIGTERM)
    assert handled == [signal.SIGTERM]
    publisher.publish("v1", weights(1))
    with pytest.raises(PhaseError, match=r"got SIGTERM.*stale_on_sigterm=False"):
        ended.publish("v1", weights(1))


def test_a_refused_offer_leaves_the_arena_free(world):
    def release(phase):
        if phase == "offer":
            world.control.delete_version("v1")

    publisher = world.publisher(on_phase=release)
    world.version("v1")
    with pytest.raises(ControlError):
        publisher.publish("v1", weights(1))
    assert publisher.versions == ()


def test_spans_tell_bytes_and_each_phase_if_asked_for():
    with exported() as spans, a_world() as world, verbose():
        publisher = world.publisher()
        world.publish([publisher], "v1", 1)
        found = {span.name: span for span in spans()}
    assert found["refit.publish"].attributes["refit.bytes"] == sum(
        tensor.nbytes for tensor in weights(1).values()
    )
    for name in ("refit.stage", "refit.serve", "refit.offer"):
        assert found[name].parent.span_id == found["refit.publish"].context.span_id
