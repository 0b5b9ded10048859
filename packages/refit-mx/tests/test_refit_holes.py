"""Holes found in other implementations of a refit, where they are no invariant of their own."""

from __future__ import annotations

import pytest
import torch
from refit_fixtures import TRANSPORTS, zeros
from refit_processes import fsdp_shards, same, targets_of, weights

from refit_mx.errors import LeaseLostError, VersionNotReadyError
from refit_mx.receiver import MxV2RefitReceiver
from refit_mx.shard_sources import LocalShard
from refit_mx.tensor_types import Box


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_hole_3_tied_weights_do_not_crash_a_publisher_on_close(world, transport):
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_hole_7_the_wire_dtype_of_fsdp_shards_is_not_fixed(world, dtype):
    world.version("v1", ["fsdp-0", "fsdp-1"])
    whole = {"w": torch.randn(5, 3)}
    for rank in range(2):
        publisher = world.publisher(f"fsdp-{rank}", wire_dtype=dtype)
        publisher.publish("v1", fsdp_shards(whole, 2, rank))
    shapes = {"w": (dtype, (5, 3))}
    with world.receiver(targets_of(shapes)).receive_weights_scratch("v1") as got:
        assert same(dict(got), {"w": whole["w"].to(getattr(torch, dtype))})


def test_a_replica_adds_no_rows(world):
    """The slice planner of the RFC's branches returned 12 rows of 8 with a replica."""
    whole = {"w": torch.randn(8, 2)}
    world.version("v1", ["fsdp-0", "fsdp-1"])
    for rank in (0, 1, 0):
        world.publisher(f"fsdp-{rank}").publish("v1", fsdp_shards(whole, 2, rank))
    with world.receiver(targets_of({"w": ("float32", (8, 2))})).receive_weights_scratch(
        "v1"
    ) as got:
        assert same(dict(got), whole)
        assert got.stats.nbytes == whole["w"].nbytes


def test_two_versions_are_never_mixed_in_one_refit(world):
    """The slice planner of the RFC's branches mixed two versions in one covered plan."""
    world.version("v1", ["fsdp-0", "fsdp-1"])
    publishers = [world.publisher(f"fsdp-{rank}") for rank in range(2)]
    whole = weights(1)
    for rank, publisher in enumerate(publishers):
        publisher.publish("v1", fsdp_shards(whole, 2, rank))
    world.version("v2", ["fsdp-0", "fsdp-1"])
    publishers[0].publish("v2", fsdp_shards(weights(2), 2, 0))
    live = zeros()
    with pytest.raises(VersionNotReadyError, match="fsdp-1"):
        world.receiver().refit("v2", live)
    assert same(live, zeros())


def test_uneven_shards_on_a_mesh_of_two_axes_are_assembled(world):
    """The slice planner of the RFC's branches refused 2-D meshes and uneven shards."""
    whole = torch.randn(7, 5)
    boxes = [Box((r, c), (4 - r // 4, 3 - c // 3)) for r in (0, 4) for c in (0, 3)]
    world.version("v1", [f"mesh-{number}" for number in range(4)])
    for number, box in enumerate(boxes):
        shard = LocalShard("w", (7, 5), box, whole[box.slices()])
        world.publisher(f"mesh-{number}").publish("v1", [shard])
    with world.receiver(targets_of({"w": ("float32", (7, 5))})).receive_weights_scratch(
        "v1"
    ) as got:
        assert same(dict(got), {"w": whole})


def test_a_lease_that_ended_before_the_bytes_were_verified_installs_nothing(world):
    publisher = world.publisher()
    world.publish([publisher], "v1", 1)

    def end_lease(phase):
        if phase == "verify":
            leases[0].close()

    leases = []
    receiver: MxV2RefitReceiver = world.receiver(on_phase=end_lease)
    lease = receiver._control.lease

    def taken(*args, **settings):
        leases.append(lease(*args, **settings))
        return leases[-1]

    receiver._control.lease = taken
    live = zeros()
    with pytest.raises(LeaseLostError):
        receiver.refit("v1", live)
    assert same(live, zeros())
