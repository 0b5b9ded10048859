"""Bin packing by sizes alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from column_io.packing import (
    Packer,
    pack_in_order,
    pack_largest_first,
    pack_largest_first_modified,
    split_to_multiple,
)
from dataplane_core import InvalidRequestError

CAPACITY = 60
sizes_lists = st.lists(st.integers(0, CAPACITY), max_size=40)


@pytest.mark.parametrize("packer", [pack_in_order, pack_largest_first, pack_largest_first_modified])
@given(sizes=sizes_lists)
def test_each_sequence_is_in_one_bin_and_no_bin_overflows(packer: Packer, sizes: list[int]) -> None:
    bins = packer(sizes, CAPACITY)
    assert sorted(place for members in bins for place in members) == list(range(len(sizes)))
    assert all(bins)
    assert all(sum(sizes[place] for place in members) <= CAPACITY for members in bins)


@given(sizes=sizes_lists)
def test_packing_in_order_keeps_the_order_and_fills_greedily(sizes: list[int]) -> None:
    bins = pack_in_order(sizes, CAPACITY)
    assert [place for members in bins for place in members] == list(range(len(sizes)))
    for members, following in pairwise(bins):
        assert sum(sizes[place] for place in members) + sizes[following[0]] > CAPACITY


@given(sizes=sizes_lists)
def test_packing_largest_first_leaves_at_most_one_bin_half_empty(sizes: list[int]) -> None:
    filled = [sum(sizes[place] for place in bin_) for bin_ in pack_largest_first(sizes, CAPACITY)]
    assert sum(2 * tokens <= CAPACITY for tokens in filled) <= 1


def test_packing_largest_first_opens_bins_by_size() -> None:
    assert pack_largest_first([2, 9, 5, 5, 1], 10) == [[1, 4], [2, 3], [0]]


def test_modified_packing_finds_pairs_that_largest_first_misses() -> None:
    # Largest first puts 6 beside 12 and leaves 2 of 20 unused; a medium 5 cannot fill that.
    sizes = [4, 9, 4, 5, 6, 12]
    assert len(pack_largest_first(sizes, 20)) == 3
    assert pack_largest_first_modified(sizes, 20) == [[5, 2, 0], [1, 4, 3]]


@given(
    sizes=st.lists(st.integers(0, CAPACITY), min_size=1, max_size=30), multiple=st.integers(1, 8)
)
def test_split_bins_come_in_multiples_or_are_refused(sizes: list[int], multiple: int) -> None:
    bins = pack_largest_first(sizes, CAPACITY)
    needed = -(-len(bins) // multiple) * multiple
    if needed > len(sizes):
        with pytest.raises(InvalidRequestError, match=f"at least {needed}"):
            split_to_multiple(bins, sizes, multiple)
        return
    split = split_to_multiple(bins, sizes, multiple)
    assert len(split) == needed
    assert all(split)
    assert sorted(place for members in split for place in members) == list(range(len(sizes)))
    assert all(sum(sizes[place] for place in members) <= CAPACITY for members in split)


def test_the_fullest_bin_is_split_where_it_is_most_even() -> None:
    assert split_to_multiple([[0, 1, 2], [3]], [1, 2, 3, 9], 3) == [[0, 1], [2], [3]]
