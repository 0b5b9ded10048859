"""Targets for common layouts: slices of a tensor, fused projections, stacked experts.

Fused targets are divided as in vLLM's parallel linear layers: every rank has the same number of
rows, and key and value heads are replicated if there are fewer heads than ranks. All others are
divided as in `TargetTPLayout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from refit_mx.errors import LayoutError
from refit_mx.layout import Box, TargetTPLayout, TensorSpec
from refit_mx.plan.target_tensors import TargetPart, TargetTensor


def replicated_target(spec: TensorSpec, *, name: str | None = None) -> TargetTensor:
    """Return the target of a complete tensor.

    Args:
        spec: the published tensor.
        name: name of the target; None uses the tensor's.
    """
    part = TargetPart(spec.name, Box.full(spec.shape), (0,) * len(spec.shape), spec.shape)
    return TargetTensor(name or spec.name, spec.dtype, spec.shape, (part,))


def tp_target(spec: TensorSpec, layout: TargetTPLayout, *, name: str | None = None) -> TargetTensor:
    """Return the target of a tensor's slice along one axis.

    Args:
        spec: the published tensor.
        layout: the slice.
        name: name of the target; None uses the tensor's.

    Raises:
        ValueError: the tensor lacks the axis, or the layout's range extends beyond it.
    """
    return _box_target(
        name or spec.name, spec, Box.of_slices(layout.slices(spec.shape), spec.shape)
    )


def mesh_target(
    spec: TensorSpec, axes: Sequence[tuple[int, int, int]], *, name: str | None = None
) -> TargetTensor:
    """Return the target of a tensor divided along several axes, as by a two-dimensional mesh.

    Args:
        spec: the published tensor.
        axes: (axis of the tensor, number of ranks, this rank) for each mesh dimension that divides
            the tensor, each division as in `TargetTPLayout`. If an axis occurs again, this rank's
            part is divided again, as DTensor does in the order of the mesh dimensions.
        name: name of the target; None uses the tensor's.

    Raises:
        ValueError: the tensor lacks an axis, or a rank is out of range.
    """
    start, shape = [0] * len(spec.shape), list(spec.shape)
    for axis, size, rank in axes:
        layout = TargetTPLayout(size, rank, axis)
        if axis >= len(shape):
            raise ValueError(f"{spec.name!r}: axis {axis}; the tensor has {len(shape)} axes")
        taken = layout.range_on(shape[axis])
        start[axis] += taken.start
        shape[axis] = taken.size
    return _box_target(name or spec.name, spec, Box(tuple(start), tuple(shape)))


def _box_target(name: str, spec: TensorSpec, box: Box) -> TargetTensor:
    part = TargetPart(spec.name, box, (0,) * len(box.shape), spec.shape)
    return TargetTensor(name, spec.dtype, box.shape, (part,))


def fused_qkv_target(
    name: str,
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    tp_size: int,
    tp_rank: int,
) -> TargetTensor:
    """Return the target of one rank's query, key and value projections, stacked; weights or biases.

    Args:
        name: name of the target.
        q: published tensor of ``num_heads * head_dim`` rows.
        k: published tensor of ``num_kv_heads * head_dim`` rows.
        v: published tensor with as many rows as ``k``.
        num_heads: query heads of the model, a multiple of ``tp_size``.
        num_kv_heads: key and value heads, a multiple or a divisor of ``tp_size``. If there are
            fewer than ranks, ``tp_size // num_kv_heads`` consecutive ranks have the same head.
        head_dim: rows of a head.
        tp_size: number of ranks.
        tp_rank: this rank.

    Raises:
        LayoutError: rows, heads and ranks do not match.
    """
    _check_rank(name, tp_size, tp_rank)
    for spec, heads in ((q, num_heads), (k, num_kv_heads), (v, num_kv_heads)):
        if not spec.shape or spec.shape[0] != heads * head_dim:
            raise LayoutError(
                f"target {name!r}: {spec.name!r} has shape {spec.shape}; "
                f"expected {heads} heads of {head_dim} rows, {heads * head_dim} in all"
            )
    if (
        num_heads % tp_size
        or num_kv_heads < 1
        or (num_kv_heads % tp_size and tp_size % num_kv_heads)
    ):
        raise LayoutError(
            f"target {name!r}: {num_heads} heads and {num_kv_heads} key and value heads over "
            f"{tp_size} ranks; expected a number of ranks that divides the heads, and that divides "
            "the key and value heads, at least one, or is a multiple of them"
        )
    q_rows = num_heads // tp_size * head_dim
    if num_kv_heads >= tp_size:
        kv_rows = num_kv_heads // tp_size * head_dim
        kv_start = tp_rank * kv_rows
    else:
        kv_rows = head_dim
        kv_start = tp_rank // (tp_size // num_kv_heads) * head_dim
    return _rows_target(
        name, ((q, tp_rank * q_rows, q_rows), (k, kv_start, kv_rows), (v, kv_start, kv_rows))
    )


def fused_gate_up_target(
    name: str, gate: TensorSpec, up: TensorSpec, tp_size: int, tp_rank: int
) -> TargetTensor:
    """Return the target of one rank's gate and up projections, stacked.

    Args:
        name: name of the target.
        gate: published tensor; its rows are a multiple of ``tp_size``.
        up: published tensor of the same shape.
        tp_size: number of ranks.
        tp_rank: this rank.

    Raises:
        LayoutError: the shapes differ, or the rows are no multiple of the ranks.
    """
    _check_rank(name, tp_size, tp_rank)
    if not gate.shape or gate.shape != up.shape or gate.shape[0] % tp_size:
        raise LayoutError(
            f"target {name!r}: {gate.name!r} has shape {gate.shape}, {up.name!r} {up.shape}; "
            f"expected equal shapes, with a multiple of {tp_size} rows"
        )
    rows = gate.shape[0] // tp_size
    return _rows_target(name, ((gate, tp_rank * rows, rows), (up, tp_rank * rows, rows)))


def stacked_experts_target(
    name: str,
    experts: TensorSpec | Sequence[TensorSpec],
    expert_ids: Sequence[int],
    *,
    box: Box | None = None,
) -> TargetTensor:
    """Return the target of a receiver's experts, stacked ``[len(expert_ids), ...]`` in that order.

    Args:
        name: name of the target.
        experts: one published tensor with all experts ``[experts, ...]``, or one published tensor
            per expert, in the order of their ids.
        expert_ids: ids of this receiver's experts: distinct, in any order; gaps are allowed.
        box: part of each expert's tensor that this receiver needs; None is all of it.

    Raises:
        LayoutError: an id is out of range or repeated, or the experts' shapes or dtypes differ.
    """
    stacked = isinstance(experts, TensorSpec)
    if isinstance(experts, TensorSpec):
        if not experts.shape:
            raise LayoutError(f"target {name!r}: {experts.name!r} has no axis of experts")
        count, shape = experts.shape[0], experts.shape[1:]
        dtype = experts.dtype
    else:
        if not experts:
            raise LayoutError(f"target {name!r}: no published experts; expected at least one")
        count, shape, dtype = len(experts), experts[0].shape, experts[0].dtype
        for spec in experts:
            if (spec.shape, spec.dtype) != (shape, dtype):
                raise LayoutError(
                    f"target {name!r}: {spec.name!r} is {spec.dtype} of shape {spec.shape}, "
                    f"{experts[0].name!r} {dtype} of shape {shape}; expected equal ones"
                )
    if len(set(expert_ids)) != len(expert_ids) or any(not 0 <= i < count for i in expert_ids):
        raise LayoutError(
            f"target {name!r}: experts {list(expert_ids)[:16]}; "
            f"expected distinct ids from 0 to {count - 1}"
        )
    taken = Box.full(shape) if box is None else box
    parts = []
    for row, length in (
        _runs(expert_ids) if stacked else ((row, 1) for row in range(len(expert_ids)))
    ):
        first = expert_ids[row]
        at = (row, *(0,) * len(shape))
        if isinstance(experts, TensorSpec):
            rows = Box((first, *taken.start), (length, *taken.shape))
            parts.append(TargetPart(experts.name, rows, at, experts.shape))
        else:
            parts.append(TargetPart(experts[first].name, taken, at, shape))
    return TargetTensor(name, dtype, (len(expert_ids), *taken.shape), tuple(parts))


def _runs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Return position and length of each run of consecutive ids."""
    starts = [i for i in range(len(ids)) if i == 0 or ids[i] != ids[i - 1] + 1]
    return [(a, b - a) for a, b in pairwise([*starts, len(ids)])]


def _check_rank(name: str, tp_size: int, tp_rank: int) -> None:
    if not 0 <= tp_rank < tp_size:
        raise LayoutError(
            f"target {name!r}: rank {tp_rank} of {tp_size}; expected 0 to {tp_size - 1}"
        )


def _rows_target(name: str, pieces: Sequence[tuple[TensorSpec, int, int]]) -> TargetTensor:
    """Return a target that stacks rows of tensors: (tensor, first row, number of rows)."""
    first = pieces[0][0]
    parts = []
    at = 0
    for spec, start, rows in pieces:
        if (spec.shape[1:], spec.dtype) != (first.shape[1:], first.dtype):
            raise LayoutError(
                f"target {name!r}: {spec.name!r} is {spec.dtype} of shape {spec.shape}, "
                f"{first.name!r} {first.dtype} of shape {first.shape}; "
                "expected equal dtypes, and equal axes after the first"
            )
        rest = (0,) * (len(spec.shape) - 1)
        box = Box((start, *rest), (rows, *spec.shape[1:]))
        parts.append(TargetPart(spec.name, box, (at, *rest), spec.shape))
        at += rows
    return TargetTensor(name, first.dtype, (at, *first.shape[1:]), tuple(parts))
