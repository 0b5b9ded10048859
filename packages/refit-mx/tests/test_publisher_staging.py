"""A publisher stages each shard's bytes, or torch's cast of them, with a digest of each block."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import xxhash
from refit_fixtures import a_world
from refit_processes import same

from refit_mx import (
    Box,
    LocalShard,
    RefitConfigError,
    RefitTimeoutError,
    ShardTable,
    replicated_target,
)

BLOCK_BYTES = 1 << 20


def sent(state, wire_dtype=None):
    """Publish a state dict; return its manifest and the received tensors."""
    with a_world() as world:
        world.version("v1")
        publisher = world.publisher(wire_dtype=wire_dtype)
        manifest = publisher.publish("v1", state)
        assert publisher.publish("v1", state) == manifest
        table = ShardTable.of([manifest])
        targets = [replicated_target(table.spec(name)) for name in state]
        with world.receiver(targets).receive_weights_scratch("v1") as got:
            return manifest, {name: tensor.clone() for name, tensor in got.items()}


def assert_refused(state, wire_dtype, says):
    with a_world() as world:
        world.version("v1")
        with pytest.raises(RefitConfigError, match=says):
            world.publisher(wire_dtype=wire_dtype).publish("v1", state)


def test_tensors_of_any_strides_arrive_in_order():
    state = {
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "one value": torch.ones(2, dtype=torch.bfloat16)[::2],
        "empty": torch.zeros(0, 3),
        "nan": torch.tensor([float("nan")]),
    }
    copies = {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()
    }
    assert same(sent(state)[1], copies)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_every_wire_dtype_equals_torchs_cast(dtype):
    state = {"w": torch.randn(17, 9), "ids": torch.arange(5)}
    assert same(sent(state, dtype)[1], {**state, "w": state["w"].to(getattr(torch, dtype))})


def test_wire_dtype_can_be_given_for_each_tensor():
    _, got = sent({"a": torch.zeros(2), "b": torch.zeros(2)}, {"b": "bfloat16"})
    assert [tensor.dtype for tensor in got.values()] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_digests_are_of_each_block_of_each_aligned_shard(dtype):
    # Copied in one job or in several, and cast block by block.
    shapes = [(1 << 22,), (700, 1200), (0,), (3, 1 << 20), (1, 1 << 22), (5, 600, 700), (), (63,)]
    state = {f"w{number}": torch.randn(shape) for number, shape in enumerate(shapes)}
    manifest, got = sent(state, dtype)
    cast = {name: tensor.to(getattr(torch, dtype)) for name, tensor in state.items()}
    assert same(got, cast)
    digests = b""
    for tensor in cast.values():
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        for at in range(0, len(data), BLOCK_BYTES):
            digests += xxhash.xxh3_128_digest(data[at : at + BLOCK_BYTES])
    assert manifest.digests == digests
    assert not (np.frombuffer(manifest.shards.offset, "<i8") % 256).any()


@pytest.mark.parametrize(
    ("wire_dtype", "says"),
    [
        ("float64", "expected one of"),
        ("int8", "expected one of float32"),
        ({"c": "float16"}, "not published: c"),
        ({"ids": "float16"}, "published as it is"),
    ],
)
def test_invalid_wire_dtype_is_refused(wire_dtype, says):
    state = {"a": torch.zeros(2), "ids": torch.zeros(2, dtype=torch.int32)}
    assert_refused(state, wire_dtype, says)


@pytest.mark.parametrize(
    ("number", "dtype", "wire"),
    [
        (-1e5, torch.float32, "float16"),
        (-1e5, torch.float32, "float8_e4m3fn"),
        (-1e5, torch.float32, "float8_e5m2"),
        (float("inf"), torch.float32, "float8_e4m3fn"),
        (float("-inf"), torch.bfloat16, "float8_e4m3fn"),
        (1e39, torch.float64, "bfloat16"),
        (3.4e38, torch.float32, "bfloat16"),
        (-3.4e38, torch.float32, "bfloat16"),
    ],
)
def test_overflow_of_the_wire_dtype_is_refused(number, dtype, wire):
    state = {"w": torch.tensor([1.0, number], dtype=dtype)}
    assert_refused(state, wire, f"does not fit into the wire dtype {wire}")


def test_infinities_and_nans_are_unchanged():
    state = {"w": torch.tensor([float("inf"), float("nan"), 1.0])}
    assert sent(state, "float16")[1]["w"].tolist()[::2] == [float("inf"), 1.0]
    assert sent(state, "float16")[1]["w"].isnan().tolist() == [False, True, False]
    state = {"w": torch.tensor([float("-inf"), float("nan"), 3.39e38])}  # bfloat16 rounds it down
    assert sent(state, "bfloat16")[1]["w"].float().isfinite().tolist() == [False, False, True]
    _, got = sent({"w": torch.tensor([float("nan"), 2.0])}, "float8_e4m3fn")
    assert got["w"].float().isnan().tolist() == [True, False]


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"w": torch.zeros(2, dtype=torch.complex64)}, "complex64"),
        ({}, "no shards"),
        (
            [
                LocalShard("w", (4,), Box((0,), (1,)), torch.zeros(1)),
                LocalShard("w", (5,), Box((1,), (1,)), torch.zeros(1)),
            ],
            "one dtype and one global shape",
        ),
    ],
)
def test_invalid_shards_are_refused(state, says):
    assert_refused(state, None, says)


def test_copying_ends_at_the_deadline_of_publish():
    def burn(phase):
        if phase == "stage":
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                pass

    with a_world() as world:
        world.version("v1")
        with pytest.raises(RefitTimeoutError, match="copying shards"):
            world.publisher(on_phase=burn).publish("v1", {"w": torch.zeros(2)}, timeout_s=1.5)
