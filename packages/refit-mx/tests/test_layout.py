"""Tensors, boxes, ranges of rows and the slices of tensor-parallel ranks."""

import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from refit_mx import Box, SliceRange, TargetTPLayout, TensorSpec, intersect

DTYPES = [
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "bool",
]


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_has_the_size_that_torch_gives(name: str) -> None:
    size = torch.empty(0, dtype=getattr(torch, name)).element_size()
    assert TensorSpec("w", name, (3,)).nbytes == 3 * size


def test_invalid_spec_is_refused() -> None:
    with pytest.raises(ValueError, match=r"w: dtype 'float99'; expected one of float32, "):
        TensorSpec("w", "float99", (1,))
    with pytest.raises(ValueError, match="none negative"):
        TensorSpec("w", "float32", (1, -1))
    with pytest.raises(ValueError, match="at most 4 axes"):
        TensorSpec("w", "float32", (1,) * 5)


def test_box_of_negative_or_unequal_numbers_is_refused() -> None:
    for start, shape in (((-1,), (1,)), ((0,), (-1,)), ((0, 0), (1,))):
        with pytest.raises(ValueError, match="as many starts as sizes"):
            Box(start, shape)


def test_slices_with_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a step of 1"):
        Box.of_slices((slice(0, 4, 2),), (4,))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 6),
            st.none() | st.integers(-8, 8),
            st.none() | st.integers(-8, 8),
        ),
        max_size=4,
    )
)
def test_box_of_slices_selects_the_same_rows(
    axes: list[tuple[int, int | None, int | None]],
) -> None:
    shape = tuple(size for size, _, _ in axes)
    content = np.arange(int(np.prod(shape))).reshape(shape)
    slices = tuple(slice(a, b) for _, a, b in axes)
    box = Box.of_slices(slices, shape)
    assert box.shape == content[slices].shape
    assert box.size == content[slices].size
    assert (content[box.slices()] == content[slices]).all()


bounds = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted)
ranges = bounds.map(lambda pair: SliceRange(*pair))


def rows(piece):
    return set() if piece is None else set(range(piece.start, piece.stop))


@given(ranges, ranges)
def test_intersection_is_the_rows_in_both(source, target):
    assert rows(intersect(source, target)) == rows(source) & rows(target)
    assert intersect(source, target) == intersect(target, source)


@given(st.integers(0, 120), st.integers(1, 9), st.integers(1, 9))
def test_copying_intersections_converts_any_layout(size, source_world, target_world):
    tensor = list(range(size))
    sources = [TargetTPLayout(source_world, rank).range_on(size) for rank in range(source_world)]
    for rank in range(target_world):
        needed = TargetTPLayout(target_world, rank).range_on(size)
        scratch = [None] * needed.size
        for source in sources:
            shard = tensor[source.as_slice()]
            shared = intersect(source, needed)
            if shared is not None:
                into = shared.within(needed).as_slice()
                assert scratch[into] == [None] * shared.size
                scratch[into] = shard[shared.within(source).as_slice()]
        assert scratch == tensor[needed.as_slice()]


def test_rows_outside_their_holder_are_refused():
    with pytest.raises(ValueError, match="3:9 are not within rows 4:10"):
        SliceRange(3, 9).within(SliceRange(4, 10))


@pytest.mark.parametrize(
    ("start", "stop", "error"),
    [(-1, 2, ValueError), (3, 2, ValueError), (0.0, 2, TypeError), (0, None, TypeError)],
)
def test_wrong_bounds_are_refused(start, stop, error):
    with pytest.raises(error, match="expected"):
        SliceRange(start, stop)


def test_shards_are_those_of_torch_chunk():
    for size in range(1, 40):
        for world in range(1, 10):
            chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(world)]
            chunks += [[]] * (world - len(chunks))
            ranges = [TargetTPLayout(world, rank).range_on(size) for rank in range(world)]
            assert [list(range(r.start, r.stop)) for r in ranges] == chunks


def test_only_the_shard_axis_is_divided():
    layout = TargetTPLayout(world_size=2, rank=1, shard_axis=1)
    assert layout.slices((3, 8, 5)) == (slice(0, 3), slice(4, 8), slice(0, 5))


def test_target_range_selects_its_rows():
    layout = TargetTPLayout(4, 0, target_range=SliceRange(3, 9))
    assert layout.range_on(9) == SliceRange(3, 9)
    assert layout.slices((10, 2)) == (slice(3, 9), slice(0, 2))


def test_target_range_past_the_axis_is_refused():
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
def test_wrong_layout_is_refused_by_argument(arguments, error, named):
    with pytest.raises(error, match=named):
        TargetTPLayout(**arguments)


def test_shape_without_the_shard_axis_is_refused():
    with pytest.raises(ValueError, match="has 1 axes; shard_axis is 1"):
        TargetTPLayout(2, 0, shard_axis=1).slices((4,))


def test_negative_axis_size_is_refused():
    with pytest.raises(ValueError, match="axis_size -1"):
        TargetTPLayout(2, 0).range_on(-1)


def test_layout_is_hashable_picklable_and_immutable():
    layout = TargetTPLayout(4, 1, target_range=SliceRange(0, 2))
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert len({layout, TargetTPLayout(4, 1, 0, SliceRange(0, 2))}) == 1
    with pytest.raises(FrozenInstanceError):
        layout.rank = 2
