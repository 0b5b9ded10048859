"""The ranks of any layout hold each row of the axis exactly once."""

import pickle
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refit_mx import SliceRange, TargetTPLayout

sizes = st.integers(0, 200)
worlds = st.integers(1, 17)


@given(sizes, worlds)
def test_the_ranks_tile_the_axis_in_order_without_gap_or_overlap(size, world):
    ranges = [TargetTPLayout(world, rank).range_on(size) for rank in range(world)]
    assert [row for r in ranges for row in range(r.start, r.stop)] == list(range(size))
    assert all(one.stop == following.start for one, following in pairwise(ranges))


@given(sizes, worlds)
def test_shards_are_full_then_one_shorter_then_empty(size, world):
    full = -(-size // world)
    held = [TargetTPLayout(world, rank).range_on(size).size for rank in range(world)]
    assert held == sorted(held, reverse=True)
    assert all(rows in (0, full) for rows in held if rows != size % max(full, 1))


def test_shards_are_those_of_torch_chunk():
    for size in range(1, 40):
        for world in range(1, 10):
            chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(world)]
            chunks += [[]] * (world - len(chunks))
            ranges = [TargetTPLayout(world, rank).range_on(size) for rank in range(world)]
            assert [list(range(r.start, r.stop)) for r in ranges] == chunks


@pytest.mark.parametrize(
    ("size", "world", "held"),
    [
        (8, 4, [2, 2, 2, 2]),
        (5, 4, [2, 2, 1, 0]),
        (3, 4, [1, 1, 1, 0]),
        (0, 2, [0, 0]),
        (7, 1, [7]),
    ],
)
def test_uneven_sizes_follow_torch_chunk_not_balanced_shards(size, world, held):
    assert [TargetTPLayout(world, rank).range_on(size).size for rank in range(world)] == held


def test_rank_3_of_8_needs_the_rows_from_three_to_four_eighths():
    assert TargetTPLayout(8, 3).range_on(64) == SliceRange(24, 32)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), worlds, st.data())
def test_the_slices_of_all_ranks_cover_each_element_of_the_tensor_once(shape, world, data):
    axis = data.draw(st.integers(0, len(shape) - 1))
    seen = []
    for rank in range(world):
        index = TargetTPLayout(world, rank, shard_axis=axis).slices(shape)
        assert len(index) == len(shape)
        cells = [()]
        for part, size in zip(index, shape, strict=True):
            cells = [(*cell, row) for cell in cells for row in range(size)[part]]
        seen += cells
    every = [()]
    for size in shape:
        every = [(*cell, row) for cell in every for row in range(size)]
    assert sorted(seen) == every


def test_only_the_shard_axis_is_divided():
    layout = TargetTPLayout(world_size=2, rank=1, shard_axis=1)
    assert layout.slices((3, 8, 5)) == (slice(0, 3), slice(4, 8), slice(0, 5))


def test_a_target_range_stands_for_itself():
    layout = TargetTPLayout(4, 0, target_range=SliceRange(3, 9))
    assert layout.range_on(9) == SliceRange(3, 9)
    assert layout.slices((10, 2)) == (slice(3, 9), slice(0, 2))


def test_a_target_range_past_the_axis_is_refused():
    layout = TargetTPLayout(1, 0, target_range=SliceRange(3, 9))
    with pytest.raises(ValueError, match="3:9 reaches past an axis of 8 rows"):
        layout.range_on(8)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"world_size": 0, "rank": 0}, ValueError, "world_size 0; expected at least 1"),
        ({"world_size": 2, "rank": 2}, ValueError, "rank 2; expected 0 to 1"),
        ({"world_size": 2, "rank": -1}, ValueError, "rank -1; expected 0 to 1"),
        ({"world_size": 2, "rank": 0, "shard_axis": -1}, ValueError, "shard_axis -1"),
        ({"world_size": 2.0, "rank": 0}, TypeError, "world_size 2.0; expected an int"),
        ({"world_size": 2, "rank": "0"}, TypeError, "rank '0'"),
        ({"world_size": 2, "rank": 0, "shard_axis": None}, TypeError, "shard_axis None"),
        ({"world_size": 2, "rank": 0, "target_range": (0, 1)}, TypeError, "expected a SliceRange"),
    ],
)
def test_a_wrong_layout_is_refused_and_the_argument_named(arguments, error, named):
    with pytest.raises(error, match=named):
        TargetTPLayout(**arguments)


def test_a_shape_without_the_shard_axis_is_refused():
    with pytest.raises(ValueError, match="has 1 axes; shard_axis is 1"):
        TargetTPLayout(2, 0, shard_axis=1).slices((4,))


def test_a_negative_axis_size_is_refused():
    with pytest.raises(ValueError, match="axis_size -1"):
        TargetTPLayout(2, 0).range_on(-1)


def test_a_layout_is_a_value():
    layout = TargetTPLayout(4, 1, target_range=SliceRange(0, 2))
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert len({layout, TargetTPLayout(4, 1, 0, SliceRange(0, 2))}) == 1
    with pytest.raises(FrozenInstanceError):
        layout.rank = 2
