"""Bin packing by sizes alone.

Imports internals: how well bins are filled shows only before they are assigned to ranks.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from column_io.packing import (
    pack_in_order,
    pack_largest_first,
    pack_largest_first_modified,
    split_to_multiple,
)

CAPACITY = 60
sizes_lists = st.lists(st.integers(0, CAPACITY), max_size=40)


@given(sizes=sizes_lists)
def test_packing_in_order_keeps_the_order_and_fills_greedily(sizes: list[int]) -> None:
    bins = pack_in_order(sizes, CAPACITY)
    assert [place for members in bins for place in members] == list(range(len(sizes)))
    for members, following in pairwise(bins):
        assert sum(sizes[place] for place in members) + sizes[following[0]] > CAPACITY


@given(sizes=sizes_lists)
def test_largest_first_leaves_no_two_half_empty_bins(sizes: list[int]) -> None:
    filled = [sum(sizes[place] for place in bin_) for bin_ in pack_largest_first(sizes, CAPACITY)]
    assert sum(2 * tokens <= CAPACITY for tokens in filled) <= 1


def test_packing_largest_first_opens_bins_by_size() -> None:
    assert pack_largest_first([2, 9, 5, 5, 1], 10) == [[1, 4], [2, 3], [0]]


def test_modified_packing_finds_pairs_that_largest_first_misses() -> None:
    # Largest first packs 12 and 6 and leaves 2 of 20 unused, where no 5 fits.
    sizes = [4, 9, 4, 5, 6, 12]
    assert len(pack_largest_first(sizes, 20)) == 3
    assert pack_largest_first_modified(sizes, 20) == [[5, 2, 0], [1, 4, 3]]


def test_fullest_bin_is_split_evenly() -> None:
    assert split_to_multiple([[0, 1, 2], [3]], [1, 2, 3, 9], 3) == [[0, 1], [2], [3]]
