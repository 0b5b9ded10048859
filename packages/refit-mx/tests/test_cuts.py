"""Shards that are cut like the generators' slices: the same tensor, read in long runs.

These tests use internals: index arithmetic of shards and split reads.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refit_fixtures import TRANSPORTS, a_world
from refit_processes import fsdp_shards, same, slice_of, targets_of, weights

from refit_mx import Box, Cut, LocalShard, RefitConfigError, ShardTable, plan_reads
from refit_mx.plan.block_splits import _split_rows, split_at_blocks
from refit_mx.source.shards import cut_shards

BLOCK_BYTES = 1 << 20
SHAPES = {
    "down": ("bfloat16", (96, 1024)),
    "experts": ("float32", (4, 10, 24)),
    "norm": ("float32", (33,)),
}
CUTS = {"down": Cut(1, 4), "experts": Cut(2, 4)}


@given(st.data())
def test_parts_of_a_shard_are_the_shard(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    start = tuple(data.draw(st.integers(0, size)) for size in shape)
    held = tuple(
        data.draw(st.integers(0, size - at)) for at, size in zip(start, shape, strict=True)
    )
    cut = Cut(data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 12)))
    complete = torch.arange(np.prod(shape)).reshape(shape)
    box = Box(start, held)
    shard = LocalShard("w", shape, box, complete[box.slices()])

    parts = cut_shards([shard], {"w": cut})

    seen = torch.full(shape, -1)
    for part in parts:
        assert bool((seen[part.box.slices()] == -1).all()), "two parts hold one element"
        seen[part.box.slices()] = part.tensor
    expected = torch.full(shape, -1)
    expected[box.slices()] = complete[box.slices()]
    assert torch.equal(seen, expected)
    assert len(parts) <= cut.parts


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_cut_shards_arrive_byte_for_byte_in_every_layout(transport, axis, ranks):
    complete = weights(5, SHAPES)
    with a_world() as world:
        world.version("v1", ["fsdp-0", "fsdp-1"])
        for rank in range(2):
            publisher = world.publisher(f"fsdp-{rank}", cuts=CUTS, transports=[transport, "tcp"])
            publisher.publish("v1", fsdp_shards(complete, 2, rank))
        for rank in range(ranks):
            layout = {"axis": axis, "ranks": ranks, "rank": rank}
            with (
                world.receiver(targets_of(SHAPES, **layout), transport=transport) as receiver,
                receiver.receive_weights_scratch("v1") as got,
            ):
                assert same(dict(got), slice_of(complete, **layout))


def test_receiver_of_cut_parts_requests_no_digests():
    complete = weights(5, SHAPES)
    wanted = targets_of({"down": SHAPES["down"]}, axis=1, ranks=4, rank=2)
    requested_bytes = {}
    for name, cuts in (("cut", CUTS), ("as it is", None)):
        with a_world() as world:
            world.publish_state("v1", complete, cuts=cuts)
            receiver = world.receiver(wanted)
            with receiver.receive_weights_scratch("v1") as got:
                requested_bytes[name] = got.stats.source_verified_bytes
    assert requested_bytes == {"cut": 0, "as it is": wanted[0].nbytes}


def test_publishing_again_with_cuts_changes_nothing():
    complete = weights(5, SHAPES)
    with a_world() as world:
        world.version("v1")
        publisher = world.publisher(cuts=CUTS)
        assert publisher.publish("v1", complete) == publisher.publish("v1", complete)


@pytest.mark.parametrize(("axis", "parts"), [(-1, 2), (0, 0)])
def test_invalid_cut_is_refused(axis, parts):
    with pytest.raises(RefitConfigError, match="expected an axis of 0 or more"):
        Cut(axis, parts)


def test_cut_along_a_missing_axis_names_the_tensor():
    with a_world() as world:
        world.version("v1")
        publisher = world.publisher(cuts={"norm": Cut(1, 2)})
        with pytest.raises(RefitConfigError, match=r"norm: cut along axis 1; its shape is \(33,\)"):
            publisher.publish("v1", weights(5, SHAPES))


# Long reads split at blocks


@given(
    st.lists(
        st.tuples(
            st.integers(0, 24 * BLOCK_BYTES), st.integers(1, 24 * BLOCK_BYTES), st.integers(1, 3)
        ),
        max_size=6,
    ),
    st.integers(1, 8).map(lambda blocks: blocks * BLOCK_BYTES),
)
def test_split_reads_cover_the_read_and_end_at_block_ends(reads, max_read_bytes):
    rows = np.array(
        [
            (1000 + begin, 7, run, n1, 2 * run if n1 > 1 else 0, run if n1 > 1 else 0, 1, 0, 0)
            for begin, run, n1 in reads
        ],
        np.int64,
    ).reshape(-1, 9)
    begin = np.array([begin for begin, _, _ in reads], np.int64)
    split_rows, origin = _split_rows(rows, begin, max_read_bytes)
    for row in range(len(rows)):
        parts = split_rows[origin == row]
        if rows[row, 3] > 1:
            assert (parts == rows[row]).all()
            assert len(parts) == 1
            continue
        ends = parts[:, :2] + parts[:, 2:3]
        assert (parts[0, :2] == rows[row, :2]).all()
        assert (parts[1:, :2] == ends[:-1]).all()
        assert (ends[-1] == rows[row, :2] + rows[row, 2]).all()
        assert (parts[:, 2] <= max_read_bytes).all()
        assert ((ends[:-1, 0] - 1000) % BLOCK_BYTES == 0).all()


@pytest.mark.parametrize("max_read_bytes", [0, -BLOCK_BYTES, BLOCK_BYTES - 1, BLOCK_BYTES + 1])
def test_split_within_a_block_is_refused(max_read_bytes):
    with a_world() as world:
        world.version("v1")
        shards = ShardTable.of([world.publisher().publish("v1", weights(5, SHAPES))])
    plan = plan_reads(shards, [], seed=0)
    with pytest.raises(ValueError, match=f"max_read_bytes {max_read_bytes}; expected a multiple"):
        split_at_blocks(shards, plan, max_read_bytes)
