"""Copying shards into an arena: places, wire dtypes, digests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import xxhash

from refit_mx.deadline import Deadline
from refit_mx.digests import block_digests
from refit_mx.errors import RefitConfigError, RefitTimeoutError
from refit_mx.manifest import BLOCK_BYTES, DIGEST_BYTES
from refit_mx.shard_sources import LocalShard, local_shards
from refit_mx.staging import ALIGNMENT, copy_shard, lay_out, same_bytes, stage
from refit_mx.tensor_types import Box


def staged(state, wire_dtype=None, threads=2):
    layout = lay_out(local_shards(state), wire_dtype)
    arena = torch.full((layout.nbytes,), 0xAB, dtype=torch.uint8)
    with ThreadPoolExecutor(threads) as pool:
        digests = stage(layout, arena, threads=pool, deadline=Deadline(30, "staging"))
    return layout, arena, digests


def held(layout, arena, row):
    part = arena[layout.offsets[row] : layout.offsets[row] + layout.sizes[row]]
    return part.view(getattr(torch, layout.dtypes[row])).view(layout.shards[row].box.shape)


def test_every_shard_lies_aligned_and_apart():
    layout, _, _ = staged({f"w{size}": torch.zeros(size) for size in (1, 63, 64, 65, 1000)})
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    ends = [offset + size for offset, size in zip(layout.offsets, layout.sizes, strict=True)]
    assert all(end <= offset for end, offset in zip(ends, layout.offsets[1:], strict=False))


def test_a_shard_that_is_not_contiguous_is_copied_in_order():
    tensor = torch.arange(12.0).reshape(3, 4).t()
    layout, arena, _ = staged({"w": tensor})
    assert torch.equal(held(layout, arena, 0), tensor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_every_wire_dtype_is_torchs_own_cast(dtype):
    tensor = torch.randn(17, 9)
    layout, arena, _ = staged({"w": tensor}, dtype)
    expected = tensor.to(getattr(torch, dtype))
    assert torch.equal(held(layout, arena, 0).view(torch.uint8), expected.view(torch.uint8))


def test_only_floating_point_tensors_are_cast():
    layout, _, _ = staged(
        {"w": torch.zeros(2), "ids": torch.zeros(2, dtype=torch.int64)}, "float16"
    )
    assert layout.dtypes == ("float16", "int64")


def test_a_wire_dtype_can_be_given_for_each_tensor():
    layout, _, _ = staged({"a": torch.zeros(2), "b": torch.zeros(2)}, {"b": "bfloat16"})
    assert layout.dtypes == ("float32", "bfloat16")


@pytest.mark.parametrize(
    ("wire_dtype", "says"),
    [
        ("float64", "expected one of"),
        ("int8", "expected one of float32"),
        ({"c": "float16"}, "not published: c"),
        ({"ids": "float16"}, "published as it is"),
    ],
)
def test_a_wire_dtype_that_cannot_be_is_refused(wire_dtype, says):
    state = {"a": torch.zeros(2), "ids": torch.zeros(2, dtype=torch.int32)}
    with pytest.raises(RefitConfigError, match=says):
        lay_out(local_shards(state), wire_dtype)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "float8_e5m2"])
def test_a_number_that_the_wire_dtype_cannot_hold_is_refused(dtype):
    with pytest.raises(RefitConfigError, match="100000 does not fit into the wire dtype"):
        staged({"w": torch.tensor([1.0, -1e5])}, dtype)


@pytest.mark.parametrize(
    ("number", "dtype", "wire"),
    [
        (float("inf"), torch.float32, "float8_e4m3fn"),
        (float("-inf"), torch.bfloat16, "float8_e4m3fn"),
        (1e39, torch.float64, "bfloat16"),
    ],
)
def test_a_number_that_would_look_sound_or_become_infinite_is_refused(number, dtype, wire):
    with pytest.raises(RefitConfigError, match=f"does not fit into the wire dtype {wire}"):
        staged({"w": torch.tensor([1.0, number], dtype=dtype)}, wire)


def test_a_nan_stays_one_also_where_there_are_no_infinities():
    layout, arena, _ = staged({"w": torch.tensor([float("nan"), 2.0])}, "float8_e4m3fn")
    assert held(layout, arena, 0).float().isnan().tolist() == [True, False]


def test_infinities_and_nans_stay_what_they_are():
    tensor = torch.tensor([float("inf"), float("nan"), 1.0])
    layout, arena, _ = staged({"w": tensor}, "float16")
    assert torch.equal(held(layout, arena, 0).isnan(), tensor.isnan())
    assert held(layout, arena, 0)[0] == float("inf")


def test_a_dtype_that_cannot_be_published_is_refused():
    with pytest.raises(RefitConfigError, match="complex64"):
        lay_out(local_shards({"w": torch.zeros(2, dtype=torch.complex64)}), None)


def test_no_shards_are_refused():
    with pytest.raises(RefitConfigError, match="no shards"):
        lay_out([], None)


def test_shards_of_one_tensor_that_disagree_are_refused():
    shards = [
        LocalShard("w", (4,), Box((0,), (1,)), torch.zeros(1)),
        LocalShard("w", (5,), Box((1,), (1,)), torch.zeros(1)),
    ]
    with pytest.raises(RefitConfigError, match="one dtype and one global shape"):
        lay_out(shards, None)


@pytest.mark.parametrize("threads", [1, 3])
def test_digests_are_of_each_block_in_the_order_of_the_shards(threads):
    sizes = {"a": BLOCK_BYTES + 5, "empty": 0, "b": 3, "c": 2 * BLOCK_BYTES}
    state = {
        name: torch.randint(0, 256, (size,), dtype=torch.uint8) for name, size in sizes.items()
    }
    _, _, digests = staged(state, threads=threads)
    expected = [
        b"".join(
            xxhash.xxh3_128_digest(tensor[at : at + BLOCK_BYTES].numpy().tobytes())
            for at in range(0, len(tensor), BLOCK_BYTES)
        )
        for tensor in state.values()
    ]
    assert digests == expected
    assert [len(each) // DIGEST_BYTES for each in digests] == [2, 0, 1, 2]


def test_the_same_weights_are_told_from_others():
    state = {"a": torch.randn(8), "empty": torch.zeros(0, 3), "nan": torch.tensor([float("nan")])}
    layout, arena, _ = staged(state)
    assert same_bytes(layout, arena)
    state["a"][3] += 1
    assert not same_bytes(layout, arena)


def test_staging_ends_at_its_deadline():
    layout = lay_out(local_shards({"w": torch.zeros(2)}), None)
    deadline = Deadline(1e-9, "staging")
    while deadline.left_s:
        pass
    arena = torch.zeros(layout.nbytes, dtype=torch.uint8)
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(RefitTimeoutError, match="copying shards"),
    ):
        stage(layout, arena, threads=pool, deadline=deadline)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(1 << 22,), (700, 1200), (3, 1 << 20), (1, 1 << 22), (5, 600, 700), ()]
)
def test_digests_taken_while_copying_are_those_of_the_copy(shape, dtype):
    tensor = torch.randn(shape)
    layout = lay_out([LocalShard.whole("w", tensor)], str(dtype).removeprefix("torch."))
    arena = torch.zeros(layout.nbytes + 1, dtype=torch.uint8)

    digests = copy_shard(layout, 0, arena)

    size = layout.sizes[0]
    assert torch.equal(arena[:size].view(dtype).view(shape), tensor.to(dtype))
    assert digests == block_digests(arena, 0, size)
