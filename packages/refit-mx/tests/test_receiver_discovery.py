"""Sources are publishers that answer now, with what the control plane names, prepared as asked."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from refit_fixtures import MODEL, World, a_world, zeros
from refit_processes import fsdp_shards, same, weights

from refit_mx.control.records import Shard, WorkerRole
from refit_mx.deadline import Deadline
from refit_mx.discovery import SourceSet, discover_v2_sources_for_slice
from refit_mx.errors import (
    CompileTargetError,
    LayoutError,
    RefitConfigError,
    RefitTimeoutError,
    SourceLostError,
    VersionNotFoundError,
)
from refit_mx.layout import TargetTPLayout
from refit_mx.manifest import Manifest, Registry
from refit_mx.manifest_service import ManifestClient, ManifestService

SLOTS = [f"fsdp-{rank}" for rank in range(4)]


@pytest.fixture
def world():
    with a_world() as made:
        yield made


def discover(world: World, version: str = "v1", **settings) -> SourceSet:
    return discover_v2_sources_for_slice(
        world.control, version, deadline=Deadline(20, "discovery"), **settings
    )


@pytest.fixture
def ranks(world):
    """v1 from four FSDP ranks."""
    publishers = [world.publisher(slot) for slot in SLOTS]
    world.publish(publishers, "v1", 1)
    return publishers


def test_threads_that_are_busy_at_first_are_waited_for(world, ranks, monkeypatch):
    listed = threading.Event()
    list_shards = world.control.list_shards

    def listing(version_id):
        found = list_shards(version_id)
        listed.set()
        return found

    monkeypatch.setattr(world.control, "list_shards", listing)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(listed.wait, 10)
        assert len(discover(world, threads=pool).manifests) == 4


def workers(found: SourceSet) -> list[str]:
    return [manifest.worker_id for manifest in found.manifests]


def test_all_live_sources_are_found_in_the_order_of_slots(world, ranks):
    found = discover(world)
    assert [manifest.source_slot_id for manifest in found.manifests] == SLOTS
    assert (found.left_out, found.missing_slots) == ({}, ())
    assert found.registry == Registry("hf_raw")


def test_receivers_of_different_ranks_ask_other_sources_first_and_find_the_same(
    world, ranks, monkeypatch
):
    monkeypatch.setattr("refit_mx.discovery.MOST_AT_ONCE", 1)
    asked = []
    fetch = ManifestClient.fetch

    def asking(client, endpoint, version_id, slot, **kept):
        asked.append(slot)
        return fetch(client, endpoint, version_id, slot, **kept)

    monkeypatch.setattr(ManifestClient, "fetch", asking)
    first = workers(discover(world))
    order, asked[:] = list(asked), []
    assert workers(discover(world, rank=5)) == first
    assert asked == [*order[1:], *order[:1]]


def test_replicas_come_behind_one_source_of_each_slot(world, ranks):
    replica = world.publisher("fsdp-2")
    replica.publish("v1", fsdp_shards(weights(1), 4, 2))
    found = discover(world)
    assert [manifest.source_slot_id for manifest in found.manifests] == [*SLOTS, "fsdp-2"]


def test_the_freshest_of_a_slot_comes_first(world, ranks):
    replica = world.publisher("fsdp-2")
    replica.publish("v1", fsdp_shards(weights(1), 4, 2))
    control = world.control
    control.register_worker(replica.worker_id, WorkerRole.TRAINER, MODEL, ttl_s=600)
    assert workers(discover(world))[2] == replica.worker_id
    control.register_worker(ranks[2].worker_id, WorkerRole.TRAINER, MODEL, ttl_s=900)
    assert workers(discover(world))[2] == ranks[2].worker_id


@pytest.mark.parametrize(
    ("layout", "slots"),
    [
        (None, SLOTS),
        (TargetTPLayout(8, 3), ["fsdp-1"]),  # half of one source's shard
        (TargetTPLayout(2, 1), ["fsdp-2", "fsdp-3"]),
        (TargetTPLayout(2, 0, shard_axis=1), SLOTS),
        (TargetTPLayout(200, 199), []),  # no rows are left for this rank
    ],
)
def test_a_slice_needs_only_the_sources_that_hold_a_part_of_it(world, ranks, layout, slots):
    found = discover(world, tensor="embed", layout=layout)
    assert [manifest.source_slot_id for manifest in found.manifests] == slots
    assert len(found.left_out) == 4 - len(slots)


def test_a_tensor_without_axes_has_one_source(world, ranks):
    assert [each.source_slot_id for each in discover(world, tensor="scale").manifests] == ["fsdp-0"]


def test_a_tensor_that_is_not_published_is_named(world, ranks):
    with pytest.raises(LayoutError, match="'nothing' is not published"):
        discover(world, tensor="nothing")


def test_a_layout_needs_a_tensor(world, ranks):
    with pytest.raises(RefitConfigError, match="needs a tensor"):
        discover(world, layout=TargetTPLayout(2, 0))


def test_excluded_workers_are_not_asked(world, ranks):
    found = discover(world, exclude={ranks[1].worker_id})
    assert ranks[1].worker_id not in workers(found)
    assert found.missing_slots == ("fsdp-1",)


def test_an_unknown_version_is_told(world):
    with pytest.raises(VersionNotFoundError):
        discover(world, "nothing")


def test_a_deadline_that_has_passed_is_told(world, ranks):
    deadline = Deadline(1e-9, "discovery")
    while deadline.left_s:
        pass
    with pytest.raises(RefitTimeoutError):
        discover_v2_sources_for_slice(world.control, "v1", deadline=deadline)


def test_a_version_without_sources_is_lost(world):
    world.version("v1")
    with pytest.raises(SourceLostError, match="none of its 0 sources"):
        discover(world)


# Manifests that are not believed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"worker_id": "somebody"}, "the control plane lists"),
        ({"version_id": "v0"}, "the control plane lists"),
        ({"model_name": "another"}, "the control plane lists"),
        ({"source_slot_id": "fsdp-9"}, "the control plane lists"),
    ],
)
def test_a_manifest_of_something_else_is_left_out(world, ranks, change, says):
    true = discover(world).manifests[0]
    fields = {name: getattr(true, name) for name in Manifest.__struct_fields__}
    leave_out(world, Manifest(**fields | {"worker_id": "liar"} | change).encode(), says)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", bytes(1000)])
def test_garbage_is_left_out(world, ranks, data):
    leave_out(world, data, "manifest: ")


def test_a_manifest_that_contradicts_itself_loses_its_worker_and_the_others_serve(world, ranks):
    true = discover(world).manifests[0]
    fields = {name: getattr(true, name) for name in Manifest.__struct_fields__}
    with contextlib.closing(ManifestService()) as service:
        world.control.register_worker("liar", WorkerRole.TRAINER, MODEL, ttl_s=600)
        # Half a digest, so that a shard has too few.
        lie = Manifest(**fields | {"worker_id": "liar", "digests": true.digests[:-8]})
        digest = service.put("v1", "fsdp-0", lie.encode())
        world.control.create_shard(Shard("v1", "fsdp-0", "liar", 1, 1, digest, service.endpoint))
        assert "liar" in workers(discover(world))
        receiver = world.receiver()
        with pytest.raises(SourceLostError, match="1 of 5 manifests cannot be used") as lost:
            receiver.refit("v1", zeros(), attempts=1)
        assert lost.value.worker_ids == ("liar",)
        live = zeros()
        stats = receiver.refit("v1", live)
        assert same(live, weights(1))
        assert stats.attempts == 2


def leave_out(world: World, data: bytes, says: str) -> None:
    service = ManifestService()
    try:
        world.control.register_worker("liar", WorkerRole.TRAINER, MODEL, ttl_s=60)
        digest = service.put("v1", "fsdp-0", data)
        shard = Shard("v1", "fsdp-0", "liar", 1, 1, digest, service.endpoint)
        world.control.create_shard(shard)
        found = discover(world)
        assert "liar" not in workers(found)
        assert says in found.left_out["liar"]
        assert len(found.manifests) == 4
    finally:
        service.close()


def test_a_publisher_that_was_restarted_on_its_port_is_not_taken_for_the_old_one(world, ranks):
    """The control plane still lists the old one: its time to live is not over."""
    old = next(each for each in world.control.list_shards("v1") if each.source_slot_id == "fsdp-0")
    port = int(old.manifest_endpoint.rpartition(":")[2])
    ranks[0]._manifests.close()
    service = ManifestService(port=port)
    try:
        service.put("v1", "fsdp-0", b"of the next life")
        found = discover(world)
        assert "its manifest of v1 has the digest" in found.left_out[old.worker_id]
        assert found.missing_slots == ("fsdp-0",)
    finally:
        service.close()


# Compile targets

PUBLISHED = {
    "fsdp-0": Registry("hf_raw"),
    "fsdp-1": Registry("deep_gemm_fp8", {"block": 128, "major": "row"}),
    "fsdp-2": Registry("deep_gemm_fp8", {"block": 64, "major": "row"}),
    "fsdp-3": None,
}


@pytest.fixture
def mixed(world):
    world.version("v1", SLOTS)
    for slot, registry in PUBLISHED.items():
        world.publisher(slot, registry=registry).publish("v1", {"w": torch.ones(4)})


@pytest.mark.parametrize(
    ("targets", "metadata", "slots"),
    [
        ({"hf_raw"}, None, ["fsdp-0"]),
        ({"deep_gemm_fp8"}, {"block": 128}, ["fsdp-1"]),
        ({"deep_gemm_fp8", "hf_raw"}, {"block": 64, "major": "row"}, ["fsdp-2"]),
        (None, {"block": 128}, ["fsdp-1"]),
    ],
)
def test_only_sources_prepared_as_asked_are_taken(world, mixed, targets, metadata, slots):
    found = discover(world, compile_target_filter=targets, required_compile_metadata=metadata)
    assert [manifest.source_slot_id for manifest in found.manifests] == slots


@pytest.mark.parametrize(
    ("targets", "metadata"),
    [
        ({"cutlass_fp8"}, None),
        ({"hf_raw"}, {"block": 128}),
        ({"deep_gemm_fp8"}, {"block": 128.0}),  # equal in Python, another promise
        ({"deep_gemm_fp8"}, {"block": 128, "scale": "float32"}),
    ],
)
def test_what_nobody_published_is_refused_with_what_was(world, mixed, targets, metadata):
    with pytest.raises(CompileTargetError, match=r"asked for .*; published is .*hf_raw"):
        discover(world, compile_target_filter=targets, required_compile_metadata=metadata)


def test_a_source_that_names_no_target_is_refused_as_soon_as_a_filter_is_set(world):
    publisher = world.publisher(registry=None)
    world.version("v1")
    publisher.publish("v1", {"w": torch.ones(4)})
    assert discover(world).registry is None
    with pytest.raises(CompileTargetError, match="no compile target"):
        discover(world, compile_target_filter={"hf_raw"})
    with pytest.raises(CompileTargetError, match="no compile target"):
        discover(world, required_compile_metadata={"block": 128})


def test_sources_of_two_targets_are_never_mixed(world, mixed):
    found = discover(world, compile_target_filter={"hf_raw", "deep_gemm_fp8"})
    assert len({repr(manifest.registry) for manifest in found.manifests}) == 1


def test_an_empty_filter_is_refused(world, ranks):
    with pytest.raises(RefitConfigError, match="empty"):
        discover(world, compile_target_filter=set())


def test_a_receiver_of_another_model_is_told_so(world, ranks):
    receiver = world.receiver()
    receiver._receiving._model_name = "another"
    with pytest.raises(RefitConfigError, match=r"is of model .*; this receiver's is 'another'"):
        receiver.refit("v1", zeros())
