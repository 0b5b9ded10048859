"""What a source's shard and a target's range share is found, and nothing else."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refit_mx import SliceRange, TargetTPLayout, intersect

bounds = st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted)
ranges = bounds.map(lambda pair: SliceRange(*pair))


def rows(piece):
    return set() if piece is None else set(range(piece.start, piece.stop))


@given(ranges, ranges)
def test_the_intersection_is_the_rows_in_both(source, target):
    assert rows(intersect(source, target)) == rows(source) & rows(target)
    assert intersect(source, target) == intersect(target, source)


@given(ranges)
def test_a_range_shares_all_of_itself_unless_it_is_empty(piece):
    assert intersect(piece, piece) == (piece if piece.size else None)


@given(st.integers(0, 120), st.integers(1, 9), st.integers(1, 9))
def test_copying_what_is_shared_moves_any_layout_into_any_other(size, source_world, target_world):
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


@pytest.mark.parametrize(
    ("source_world", "target_world", "sources_of_rank_1"),
    [(4, 8, [(0, 8, 16)]), (4, 2, [(2, 32, 48), (3, 48, 64)]), (1, 8, [(0, 8, 16)])],
)
def test_each_receiver_reads_only_the_sources_that_hold_its_rows(
    source_world, target_world, sources_of_rank_1
):
    needed = TargetTPLayout(target_world, 1).range_on(64)
    shared = [
        (rank, intersect(TargetTPLayout(source_world, rank).range_on(64), needed))
        for rank in range(source_world)
    ]
    found = [(rank, piece.start, piece.stop) for rank, piece in shared if piece is not None]
    assert found == sources_of_rank_1


def test_touching_and_empty_ranges_share_nothing():
    assert intersect(SliceRange(0, 4), SliceRange(4, 8)) is None
    assert intersect(SliceRange(2, 2), SliceRange(0, 8)) is None


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
