"""A publisher fills its slot of a version, and never changes a version that may still be read.

Some tests use internals: the order in which agents and server end, and the SIGTERM handler.
"""

from __future__ import annotations

import signal
import threading

import pytest
import torch
from refit_fixtures import MODEL, World, a_world, exported, needs_nixl, verbose
from refit_processes import SHAPES, fsdp_shards, same, targets_of, weights

from refit_mx import (
    Box,
    ControlClient,
    ControlError,
    ControlUnavailableError,
    EmbeddedControlServer,
    LocalShard,
    MxV2TrainingPublisher,
    PhaseError,
    PublisherSettings,
    RefitConfigError,
    RefitTimeoutError,
    ShardTable,
    VersionNotFoundError,
    VersionNotReadyError,
)
from refit_mx.control import SqliteStore, WorkerRole, heartbeat
from refit_mx.source import publisher as publisher_module
from refit_mx.transports.nixl_source import NixlSource
from refit_mx.transports.source_client import is_gone


def received(world: World, version_id: str, **settings) -> dict[str, torch.Tensor]:
    receiver = world.receiver(**settings)
    with receiver.receive_weights_scratch(version_id, timeout_s=20) as got:
        return {name: tensor.clone() for name, tensor in got.items()}


@pytest.fixture
def handled(monkeypatch):
    """Yield a list of the SIGTERMs that this process handles without exiting."""
    monkeypatch.setattr(heartbeat, "_previous_handler", heartbeat._previous_handler)
    signals = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    yield signals
    signal.signal(signal.SIGTERM, before)


def test_manifest_describes_the_published_tensors(world):
    publisher = world.publisher()
    world.version("v1")
    manifest = publisher.publish("v1", weights(1))
    assert (manifest.model_name, manifest.version_id) == (MODEL, "v1")
    assert (manifest.worker_id, manifest.source_slot_id) == (publisher.worker_id, "fsdp-0")
    table = ShardTable.of([manifest])
    assert {name: table.spec(name).shape for name in SHAPES} == {
        name: shape for name, (_, shape) in SHAPES.items()
    }
    (shard,) = world.control.list_shards("v1")
    assert shard.tensor_count == len(SHAPES)
    assert shard.total_bytes == sum(tensor.nbytes for tensor in weights(1).values())


def test_tensors_may_change_after_publish(world):
    publisher = world.publisher()
    world.version("v1")
    state = weights(1)
    publisher.publish("v1", state)
    for tensor in state.values():
        tensor.zero_()
    assert same(received(world, "v1"), weights(1))


def test_growing_model_gets_larger_arenas(world):
    publisher = world.publisher()
    for size in (3, 5000, 70_000):
        version = f"v{size}"
        world.version(version)
        state = {"w": torch.randn(size)}
        publisher.publish(version, state)
        got = received(world, version, targets=targets_of({"w": ("float32", (size,))}))
        assert same(got, state)


def test_empty_shard_is_published_too(world):
    world.publish_state("v1", [LocalShard("w", (4, 2), Box((4, 0), (0, 2)), torch.zeros(0, 2))])
    assert world.state("v1") == "READY"


@pytest.mark.parametrize(
    ("version", "slots", "error", "says"),
    [
        ("unknown", None, VersionNotFoundError, "unknown"),
        ("other-slot", ["fsdp-7"], RefitConfigError, "does not expect slot 'fsdp-0'"),
    ],
)
def test_refused_version_copies_nothing(world, version, slots, error, says):
    copied = []
    publisher = world.publisher(on_phase=copied.append)
    if slots:
        world.version(version, slots)
    with pytest.raises(error, match=says):
        publisher.publish(version, weights(1))
    assert copied == []
    assert publisher.versions == ()


def test_version_of_another_model_is_refused(world):
    world.control.create_version("other", ["fsdp-0"], idempotency_key="x", version_id="x")
    with pytest.raises(RefitConfigError, match="is of model 'other'"):
        world.publisher().publish("x", weights(1))


def test_releasing_version_is_refused(world):
    world.version("v1")
    world.control.delete_version("v1")
    with pytest.raises(VersionNotReadyError, match="RELEASING"):
        world.publisher().publish("v1", weights(1))


def test_failed_publish_frees_its_arena(world):
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


def test_interrupted_publish_frees_its_arena(world, monkeypatch):
    publisher = world.publisher()

    def interrupt(**_):
        raise KeyboardInterrupt

    for number in (1, 2, 3):
        world.version(f"v{number}")
        with monkeypatch.context() as patch:
            patch.setattr(publisher_module, "Shard", interrupt)
            with pytest.raises(KeyboardInterrupt):
                publisher.publish(f"v{number}", weights(number))
        assert publisher.versions == ()
    publisher.publish("v3", weights(3))
    assert same(received(world, "v3"), weights(3))


def test_time_limit_of_zero_is_refused(world):
    world.version("v1")
    publisher = world.publisher()
    with pytest.raises(ValueError, match="timeout_s 0"):
        publisher.publish("v1", weights(1), timeout_s=0)
    with pytest.raises(ValueError, match="timeout_s 0"):
        publisher.release("v1", timeout_s=0)


def test_publishing_the_same_weights_again_changes_nothing(world):
    publisher = world.publisher()
    world.version("v1")
    first = publisher.publish("v1", weights(1))
    assert publisher.publish("v1", weights(1)) == first
    assert len(world.control.list_shards("v1")) == 1


def test_other_weights_under_a_published_version_are_refused(world):
    publisher = world.publish_state("v1", weights(1))
    with pytest.raises(RefitConfigError, match="published with other weights"):
        publisher.publish("v1", weights(2))
    assert same(received(world, "v1"), weights(1))


def test_third_version_replaces_the_oldest(world):
    publisher = world.publisher()
    for number in (1, 2, 3):
        world.publish([publisher], f"v{number}", number)
    assert publisher.versions == ("v2", "v3")
    assert world.state("v1") == "RELEASING"
    assert same(received(world, "v3"), weights(3))


@pytest.mark.parametrize("leased", [False, True])
def test_released_version_is_replaced_first(world, leased):
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


def test_release_frees_the_arena_after_the_last_lease(world):
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
def test_versions_of_a_closed_publisher_leave_ready(world, end):
    publisher = world.publisher()
    world.publish([publisher], "v1", 1)
    getattr(publisher, end)()
    assert world.state("v1") == "RELEASING"


@needs_nixl
def test_source_server_outlives_the_nixl_agents(world, monkeypatch):
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


def test_closed_publisher_raises(world):
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
def test_unknown_transport_is_refused(world, transports):
    with pytest.raises(RefitConfigError, match="expected nixl, shm and tcp"):
        world.publisher(transports=transports)


def test_without_a_control_plane_nothing_starts():
    with EmbeddedControlServer() as server:
        address = server.address
    with pytest.raises((ControlUnavailableError, RefitTimeoutError)):
        MxV2TrainingPublisher(MODEL, "fsdp-0", control=address, transports=["tcp"])


def test_publish_succeeds_once_the_control_plane_is_back(tmp_path, port):
    state = tmp_path / "state"
    server = EmbeddedControlServer(port=port, store=SqliteStore(state))

    def away(phase):
        if phase == "register" and not failed:
            failed.append(phase)
            server.close()

    failed = []
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


def test_forgotten_publisher_registers_again(port):
    server = EmbeddedControlServer(port=port)
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


def test_registration_of_a_stale_worker_is_refused(world):
    publisher = world.publisher()
    world.version("v1")
    world.control.mark_stale(publisher.worker_id, WorkerRole.TRAINER, MODEL)
    with pytest.raises(ControlError, match="is STALE"):
        publisher.publish("v1", weights(1))
    assert publisher.versions == ()


def test_stale_on_sigterm_can_be_switched_off(world, handled):
    publisher = world.publisher(settings=PublisherSettings(stale_on_sigterm=False))
    ended = world.publisher("fsdp-1")
    world.version("v1", ["fsdp-0", "fsdp-1"])
    signal.raise_signal(signal.SIGTERM)
    assert handled == [signal.SIGTERM]
    publisher.publish("v1", weights(1))
    with pytest.raises(PhaseError, match=r"got SIGTERM.*stale_on_sigterm=False"):
        ended.publish("v1", weights(1))


def test_verbose_spans_have_bytes_and_every_phase():
    with exported() as spans, a_world() as world, verbose():
        publisher = world.publisher()
        world.publish([publisher], "v1", 1)
        by_name = {span.name: span for span in spans()}
    assert by_name["refit.publish"].attributes["refit.bytes"] == sum(
        tensor.nbytes for tensor in weights(1).values()
    )
    for name in ("refit.stage", "refit.serve", "refit.register"):
        assert by_name[name].parent.span_id == by_name["refit.publish"].context.span_id
