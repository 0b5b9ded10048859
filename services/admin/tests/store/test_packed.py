"""Keys and messages survive their encoding.

These tests call the encoding, since requests to the API produce only few kinds of keys.
So internals are imported.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane_admin.store.compressed import compress, expand
from dataplane_admin.store.packed import (
    pack_blocks,
    pack_keys,
    unpack_block,
    unpack_keys,
)

keys = st.integers(0, 2**63 - 1) | st.integers(0, 300)


@given(st.binary(max_size=2000), st.integers(1, 300))
def test_a_message_expands_up_to_20_times_its_stored_size(message, times):
    stored = compress(message * times)
    assert expand(stored) == message * times
    assert len(message * times) <= 20 * len(stored)


@given(st.lists(keys, max_size=200))
def test_keys_keep_their_order(named):
    assert unpack_keys(pack_keys(named)) == named


@given(st.sets(keys, max_size=200))
def test_blocks_have_exactly_the_keys(named):
    blocks = pack_blocks(named)
    assert all(-(2**63) <= members < 2**63 for members in blocks.values())
    assert sorted(key for block in blocks.items() for key in unpack_block(*block)) == sorted(named)


@pytest.mark.parametrize("step", [1, 4, -1])
def test_regular_keys_take_few_bytes(step):
    assert len(pack_keys(range(10_000, 10_000 + 4096 * step, step))) < 100
