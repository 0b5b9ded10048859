"""Shards from state dicts: full tensors, DTensors of any placement, and described shards."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

from refit_mx import Box, LocalShard, RefitConfigError, local_shards


def test_plain_tensor_is_a_complete_shard():
    tensor = torch.arange(6.0).reshape(2, 3)
    (shard,) = local_shards({"w": tensor})
    assert (shard.name, shard.global_shape, shard.box) == ("w", (2, 3), Box((0, 0), (2, 3)))
    assert shard.tensor.data_ptr() == tensor.data_ptr()


def test_described_shards_are_used_unchanged():
    shards = [
        LocalShard("w", (4, 2), Box((0, 0), (1, 2)), torch.ones(1, 2)),
        LocalShard("w", (4, 2), Box((3, 0), (1, 2)), torch.ones(1, 2)),
    ]
    assert local_shards({"w": shards}) == shards


@pytest.mark.parametrize(
    ("box", "shape"),
    [
        (Box((3,), (2,)), (2,)),  # extends beyond the tensor
        (Box((0, 0), (2, 1)), (2, 1)),  # another number of axes
        (Box((0,), (2,)), (3,)),  # the data has another shape than the box
    ],
)
def test_contradictory_shard_is_refused(box, shape):
    with pytest.raises(RefitConfigError, match="w: "):
        LocalShard("w", (4,), box, torch.zeros(shape))


def test_shard_under_another_name_is_refused():
    with pytest.raises(RefitConfigError, match="shard under this name is of 'a'"):
        local_shards({"b": LocalShard.full("a", torch.zeros(1))})


def test_tensor_that_wraps_others_is_refused():
    rows = torch.nested.as_nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(RefitConfigError, match="w: NestedTensor; expected a plain tensor"):
        local_shards({"w": rows})


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
def test_sharded_tensor_of_fsdp1_is_refused(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    try:
        spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
        with pytest.raises(RefitConfigError, match="w: ShardedTensor; expected a plain tensor"):
            local_shards({"w": sharded_tensor.rand(spec, 4, 4)})
    finally:
        torch.distributed.destroy_process_group()


MESHES = {
    "fsdp_uneven": ((4,), [("Shard", 0)], (10, 3)),
    "fsdp_with_empty_ranks": ((4,), [("Shard", 0)], (5, 3)),
    "tensor_parallel_columns": ((4,), [("Shard", 1)], (3, 8)),
    "replicas_of_shards": ((2, 2), [("Replicate", 0), ("Shard", 0)], (7, 2)),
    "two_axes": ((2, 2), [("Shard", 0), ("Shard", 1)], (6, 5)),
    "one_axis_twice": ((2, 2), [("Shard", 0), ("Shard", 0)], (8, 3)),
}

RANK = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from refit_mx import local_shards

rank, store, meshes = int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
found = {}
for name, (mesh, placements, shape) in meshes.items():
    full = torch.arange(torch.tensor(shape).prod().item(), dtype=torch.float32).reshape(shape)
    placed = [Shard(axis) if kind == "Shard" else Replicate() for kind, axis in placements]
    tensor = distribute_tensor(full, init_device_mesh("cpu", tuple(mesh)), placed)
    (shard,) = local_shards({name: tensor})
    found[name] = [list(shard.box.start), list(shard.box.shape), shard.tensor.flatten().tolist()]
print(json.dumps(found))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_dtensors_of_four_ranks_have_the_right_boxes(tmp_path: Path):
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                textwrap.dedent(RANK),
                str(rank),
                str(tmp_path / "store"),
                json.dumps(MESHES),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        answers = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for name, (_, placements, shape) in MESHES.items():
        complete = torch.arange(torch.tensor(shape).prod().item(), dtype=torch.float32).reshape(
            shape
        )
        copies = torch.zeros(shape)
        for answer in answers:
            start, size, values = answer[name]
            box = Box(tuple(start), tuple(size))
            part = torch.tensor(values).reshape(size)
            assert torch.equal(complete[box.slices()], part), name
            copies[box.slices()] += 1
        replicas = 2 if placements[0][0] == "Replicate" else 1
        assert torch.equal(copies, torch.full(shape, float(replicas))), name
