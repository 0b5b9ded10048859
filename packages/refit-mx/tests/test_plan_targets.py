"""Targets of receivers, and the layouts that describe them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refit_mx import (
    Box,
    LayoutError,
    TargetPart,
    TargetTensor,
    TargetTPLayout,
    TensorSpec,
    fused_gate_up_target,
    fused_qkv_target,
    mesh_target,
    replicated_target,
    stacked_experts_target,
    tp_target,
)

W = TensorSpec("w", "bfloat16", (8, 6))


def part(start: tuple[int, ...], shape: tuple[int, ...], at: tuple[int, ...]) -> TargetPart:
    return TargetPart("w", Box(start, shape), at)


def test_builder_sets_the_global_shape_and_the_name() -> None:
    for target in (
        replicated_target(W, name="mine"),
        tp_target(W, TargetTPLayout(2, 1), name="mine"),
        mesh_target(W, [(1, 2, 0)], name="mine"),
    ):
        assert target.name == "mine"
        assert [p.global_shape for p in target.parts] == [(8, 6)]
    assert tp_target(W, TargetTPLayout(2, 1)).name == "w"


def test_slice_has_the_rows_of_the_layout() -> None:
    target = tp_target(W, TargetTPLayout(4, 3, 1))
    assert (target.shape, target.parts[0].box) == ((8, 0), Box((0, 6), (8, 0)))
    assert tp_target(W, TargetTPLayout(2, 1, 1)).parts[0].box == Box((0, 3), (8, 3))
    with pytest.raises(ValueError, match="shard_axis is 2"):
        tp_target(W, TargetTPLayout(2, 1, 2))


def test_mesh_with_an_invalid_axis_or_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="axis 2; the tensor has 2 axes"):
        mesh_target(W, [(2, 2, 0)])
    with pytest.raises(ValueError, match="rank 2"):
        mesh_target(W, [(0, 2, 2)])


def test_overlapping_parts_are_refused() -> None:
    # As many elements as expected: one corner twice, one not at all.
    parts = (
        part((0, 0), (3, 3), (0, 0)),
        part((0, 0), (1, 3), (3, 0)),
        part((0, 0), (3, 1), (0, 3)),
        part((0, 0), (1, 1), (2, 2)),
    )
    with pytest.raises(LayoutError, match="target 't'"):
        TargetTensor("t", "bfloat16", (4, 4), parts)
    with pytest.raises(LayoutError, match="target 't'"):
        TargetTensor("t", "bfloat16", (), (part((), (), ()),) * 2)


@pytest.mark.parametrize(
    ("invalid", "message"),
    [
        (part((0, 0), (4, 6), (0,)), "expected one number for each axis"),
        (part((0, 0), (4, 6), (0, 0, 0)), "expected one number for each axis"),
        (part((0, 0), (4, 6), (0, -1)), "none negative"),
        (part((0, 0, 0), (2, 2, 6), (0, 0)), "sizes of 1 along its first 1 axes"),
    ],
)
def test_parts_outside_their_tensors_are_refused(invalid: TargetPart, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        TargetTensor("t", "bfloat16", (4, 6), (invalid,))


def test_unknown_dtype_or_shape_is_refused() -> None:
    with pytest.raises(LayoutError, match="dtype 'f32'"):
        TargetTensor("t", "f32", (), ())
    with pytest.raises(LayoutError, match="none negative"):
        TargetTensor("t", "bool", (-1,), ())
    with pytest.raises(LayoutError, match="at most 4 axes"):
        TargetTensor("t", "bool", (1,) * 5, ())


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3), st.integers(1, 3)),
        max_size=6,
    ),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_parts_must_cover_each_element_exactly_once(
    rectangles: list[tuple[int, int, int, int]], rows: int, columns: int
) -> None:
    covered = np.zeros((8, 8), dtype=np.int64)
    for row, column, height, width in rectangles:
        covered[row : row + height, column : column + width] += 1
    right = (covered[:rows, :columns] == 1).all() and covered.sum() == rows * columns
    parts = tuple(part((0, 0), (h, w), (r, c)) for r, c, h, w in rectangles)
    if right:
        TargetTensor("t", "bool", (rows, columns), parts)
    else:
        with pytest.raises(LayoutError):
            TargetTensor("t", "bool", (rows, columns), parts)


def qkv(*, kv_rows: int = 8, **changes: int) -> TargetTensor:
    heads = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 4, "tp_size": 4, "tp_rank": 3}
    q, k = TensorSpec("q", "bfloat16", (32, 5)), TensorSpec("k", "bfloat16", (kv_rows, 5))
    return fused_qkv_target("qkv", q, k, k, **(heads | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 9}, "expected 9 heads of 4 rows, 36 in all"),
        ({"head_dim": 3}, "expected 8 heads of 3 rows"),
        ({"num_kv_heads": 4}, "'k' has shape"),
        ({"tp_size": 3, "tp_rank": 0}, "over 3 ranks"),
        ({"tp_size": 16}, "over 16 ranks"),
        ({"num_kv_heads": 0, "kv_rows": 0}, "8 heads and 0 key and value heads"),
        ({"tp_rank": 4}, "rank 4 of 4"),
        ({"tp_rank": -1}, "rank -1 of 4"),
    ],
)
def test_fused_qkv_with_invalid_head_counts_is_refused(
    changes: dict[str, int], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        qkv(**changes)


def test_fused_qkv_fuses_biases_too_and_refuses_other_dtypes() -> None:
    q, k = TensorSpec("q", "float32", (8,)), TensorSpec("k", "float32", (4,))
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "tp_size": 2, "tp_rank": 1}
    assert fused_qkv_target("b", q, k, k, **heads).shape == (12,)
    with pytest.raises(LayoutError, match="expected equal dtypes"):
        fused_qkv_target("b", q, k, TensorSpec("v", "float16", (4,)), **heads)


def test_fused_gate_up_with_invalid_sizes_is_refused() -> None:
    gate, up = TensorSpec("gate", "bool", (6, 2)), TensorSpec("up", "bool", (6, 3))
    with pytest.raises(LayoutError, match="expected equal shapes, with a multiple of 2 rows"):
        fused_gate_up_target("t", gate, up, 2, 0)
    with pytest.raises(LayoutError, match="multiple of 4 rows"):
        fused_gate_up_target("t", gate, gate, 4, 0)
    with pytest.raises(LayoutError, match="rank 2 of 2"):
        fused_gate_up_target("t", gate, gate, 2, 2)


@pytest.mark.parametrize(
    ("experts", "ids", "message"),
    [
        (TensorSpec("w", "bool", (4, 2)), [4], "distinct ids from 0 to 3"),
        (TensorSpec("w", "bool", (4, 2)), [-1], "distinct ids from 0 to 3"),
        (TensorSpec("w", "bool", (4, 2)), [1, 1], "distinct ids"),
        (TensorSpec("w", "bool", ()), [0], "no axis of experts"),
        ([], [], "no published experts"),
        (
            [TensorSpec("a", "bool", (2,)), TensorSpec("b", "bool", (3,))],
            [0],
            "expected equal ones",
        ),
    ],
)
def test_missing_experts_are_refused(
    experts: TensorSpec | list[TensorSpec], ids: list[int], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        stacked_experts_target("t", experts, ids)
