"""Sources are live publishers whose manifests match the control plane and the compile target.

These tests use internals: the test's own service serves false manifests.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import msgspec
import pytest
import torch
from refit_fixtures import MODEL, World, zeros
from refit_processes import fsdp_shards, same, weights

from refit_mx import (
    CompileTargetError,
    Deadline,
    LayoutError,
    RefitConfigError,
    Registry,
    SourceLostError,
    SourceSet,
    TargetTPLayout,
    discover_v2_sources_for_slice,
)
from refit_mx.control import Shard, WorkerRole
from refit_mx.receive.source_cache import SourceCache
from refit_mx.source.manifest_service import ManifestService

SLOTS = [f"fsdp-{rank}" for rank in range(4)]


def discover(world: World, version: str = "v1", **settings) -> SourceSet:
    return discover_v2_sources_for_slice(
        world.control, version, deadline=Deadline(20, "discovery"), **settings
    )


@pytest.fixture
def ranks(world):
    """Publish v1 from four FSDP ranks; return the publishers."""
    publishers = [world.publisher(slot) for slot in SLOTS]
    world.publish(publishers, "v1", 1)
    return publishers


def workers(sources: SourceSet) -> list[str]:
    return [manifest.worker_id for manifest in sources.manifests]


def test_live_sources_are_in_the_order_of_slots(world, ranks):
    sources = discover(world)
    assert [manifest.source_slot_id for manifest in sources.manifests] == SLOTS
    assert (sources.excluded, sources.missing_slots) == ({}, ())
    assert sources.registry == Registry("hf_raw")


def test_ranks_ask_different_sources_first(world, ranks, monkeypatch):
    for module in ("discovery", "receiving"):
        monkeypatch.setattr(f"refit_mx.receive.{module}.MAX_CONCURRENT_CALLS", 1)
    requested = []
    manifest = SourceCache.manifest

    def asking(cache, shard, **settings):
        requested.append(shard.source_slot_id)
        return manifest(cache, shard, **settings)

    monkeypatch.setattr(SourceCache, "manifest", asking)
    world.receiver(rank=0).refit("v1", zeros())
    order, requested[:] = list(requested), []
    world.receiver(rank=5).refit("v1", zeros())
    assert requested == [*order[1:], *order[:1]]


def test_replicas_follow_one_source_of_each_slot(world, ranks):
    replica = world.publisher("fsdp-2")
    replica.publish("v1", fsdp_shards(weights(1), 4, 2))
    sources = discover(world)
    assert [manifest.source_slot_id for manifest in sources.manifests] == [*SLOTS, "fsdp-2"]


def test_freshest_source_of_a_slot_comes_first(world, ranks):
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
def test_slice_needs_only_the_sources_of_its_parts(world, ranks, layout, slots):
    sources = discover(world, tensor="embed", layout=layout)
    assert [manifest.source_slot_id for manifest in sources.manifests] == slots
    assert len(sources.excluded) == 4 - len(slots)


def test_unpublished_tensor_is_named(world, ranks):
    with pytest.raises(LayoutError, match="'nothing' is not published"):
        discover(world, tensor="nothing")


def test_layout_needs_a_tensor(world, ranks):
    with pytest.raises(RefitConfigError, match="needs a tensor"):
        discover(world, layout=TargetTPLayout(2, 0))


def test_excluded_workers_are_not_asked(world, ranks):
    sources = discover(world, exclude={ranks[1].worker_id})
    assert ranks[1].worker_id not in workers(sources)
    assert sources.missing_slots == ("fsdp-1",)


def test_version_without_sources_is_lost(world):
    world.version("v1")
    with pytest.raises(SourceLostError, match="none of its 0 sources"):
        discover(world)


# False manifests


@pytest.mark.parametrize(
    "change",
    [
        {"worker_id": "other"},
        {"version_id": "v0"},
        {"model_name": "another"},
        {"source_slot_id": "fsdp-9"},
    ],
)
def test_manifest_with_another_identity_is_left_out(world, ranks, change):
    true = discover(world).manifests[0]
    manifest = msgspec.structs.replace(true, **{"worker_id": "other-trainer", **change})
    leave_out(world, manifest.encode(), "the control plane lists")


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", bytes(1000)])
def test_garbage_is_left_out(world, ranks, data):
    leave_out(world, data, "manifest: ")


def test_contradictory_manifest_loses_only_its_worker(world, ranks):
    true = discover(world).manifests[0]
    # Half a digest is missing, so a shard has too few.
    manifest = msgspec.structs.replace(true, worker_id="other-trainer", digests=true.digests[:-8])
    with served_as_manifest(world, manifest.encode()):
        assert "other-trainer" in workers(discover(world))
        receiver = world.receiver()
        with pytest.raises(SourceLostError, match="1 of 5 manifests cannot be used") as lost:
            receiver.refit("v1", zeros(), attempts=1)
        assert lost.value.worker_ids == ("other-trainer",)
        live = zeros()
        stats = receiver.refit("v1", live)
        assert same(live, weights(1))
        assert stats.attempts == 2


@contextlib.contextmanager
def served_as_manifest(world: World, data: bytes) -> Iterator[None]:
    """Register a further worker of the first slot, which serves ``data`` as its manifest."""
    with contextlib.closing(ManifestService()) as service:
        world.control.register_worker("other-trainer", WorkerRole.TRAINER, MODEL, ttl_s=600)
        digest = service.put("v1", "fsdp-0", data)
        world.control.create_shard(
            Shard("v1", "fsdp-0", "other-trainer", 1, 1, digest, service.endpoint)
        )
        yield


def leave_out(world: World, data: bytes, says: str) -> None:
    with served_as_manifest(world, data):
        sources = discover(world)
        assert "other-trainer" not in workers(sources)
        assert says in sources.excluded["other-trainer"]
        assert len(sources.manifests) == 4


def test_restarted_publisher_is_not_the_old_one(world, port, monkeypatch):
    on_port = functools.partial(ManifestService, port=port)
    with monkeypatch.context() as patch:
        patch.setattr("refit_mx.source.publisher.ManifestService", on_port)
        first = world.publisher(SLOTS[0])
    world.publish([first, *map(world.publisher, SLOTS[1:])], "v1", 1)
    # The control plane still lists the old one, whose time to live has not passed.
    old = next(each for each in world.control.list_shards("v1") if each.source_slot_id == "fsdp-0")
    first._manifests.close()
    with contextlib.closing(on_port()) as service:
        service.put("v1", "fsdp-0", b"of the next life")
        sources = discover(world)
        assert "its manifest of v1 has the digest" in sources.excluded[old.worker_id]
        assert sources.missing_slots == ("fsdp-0",)


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
def test_only_sources_of_the_compile_target_are_used(world, mixed, targets, metadata, slots):
    sources = discover(world, compile_target_filter=targets, required_compile_metadata=metadata)
    assert [manifest.source_slot_id for manifest in sources.manifests] == slots


@pytest.mark.parametrize(
    ("targets", "metadata"),
    [
        ({"cutlass_fp8"}, None),
        ({"hf_raw"}, {"block": 128}),
        ({"deep_gemm_fp8"}, {"block": 128.0}),  # equal in Python, but of another type
        ({"deep_gemm_fp8"}, {"block": 128, "scale": "float32"}),
    ],
)
def test_unpublished_compile_target_error_lists_the_published(world, mixed, targets, metadata):
    with pytest.raises(CompileTargetError, match=r"no source has .*; \d+ sources publish .*hf_raw"):
        discover(world, compile_target_filter=targets, required_compile_metadata=metadata)


def test_sources_of_two_targets_are_never_mixed(world, mixed):
    sources = discover(world, compile_target_filter={"hf_raw", "deep_gemm_fp8"})
    assert len({repr(manifest.registry) for manifest in sources.manifests}) == 1


def test_empty_filter_is_refused(world, ranks):
    with pytest.raises(RefitConfigError, match="empty"):
        discover(world, compile_target_filter=set())
