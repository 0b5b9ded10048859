"""Plans of random layouts against the reference: each wanted byte is read exactly once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from plan_reference import Held, Model, is_held, plan_checked, publish

from refit_mx import (
    Box,
    LayoutError,
    ShardTable,
    TargetPart,
    TargetTensor,
    TargetTPLayout,
    TensorSpec,
    mesh_target,
    plan_reads,
    replicated_target,
    stacked_experts_target,
    tp_target,
)

CAREFUL = settings(
    max_examples=250,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    """Draw a few tensors of mixed dtypes, some scalar and some empty."""
    return [
        TensorSpec(
            f"t{number}",
            draw(st.sampled_from(["bool", "bfloat16", "float32", "int64"])),
            tuple(draw(st.lists(st.sampled_from([2, 3, 4, 5, 6, 8, 1, 0]), max_size=4))),
        )
        for number in range(draw(st.integers(1, 3)))
    ]


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Draw any box of a shape, possibly empty."""
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


def cut(box: Box, axis: int, at: list[int]) -> list[Box]:
    """Divide a box along an axis at the given rows."""
    rows = [0, *sorted(min(a, box.shape[axis]) for a in at), box.shape[axis]]
    return [
        Box(
            tuple(s + a if i == axis else s for i, s in enumerate(box.start)),
            tuple(b - a if i == axis else n for i, n in enumerate(box.shape)),
        )
        for a, b in itertools.pairwise(rows)
    ]


@st.composite
def division(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Draw disjoint boxes that cover a shape: even or uneven slabs and grids, some empty."""
    parts = [Box.full(shape)]
    for _ in range(draw(st.integers(0, 2)) if shape else 0):
        axis = draw(st.integers(0, len(shape) - 1))
        if draw(st.booleans()):
            # The same cuts for all boxes make a grid, like a mesh.
            at = draw(st.lists(st.integers(0, shape[axis]), max_size=3))
            parts = [piece for box in parts for piece in cut(box, axis, at)]
        else:
            parts = [
                piece
                for box in parts
                for piece in cut(
                    box, axis, draw(st.lists(st.integers(0, box.shape[axis]), max_size=2))
                )
            ]
    return parts


@st.composite
def publications(draw: st.DrawFn, of: list[TensorSpec]) -> list[Held]:
    """Draw what each source holds: divisions of the tensors, replicas, and arbitrary boxes."""
    sources: list[list[tuple[str, Box]]] = [[] for _ in range(draw(st.integers(1, 6)))]
    for spec in of:
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 2, 3]))):
            for box in draw(division(spec.shape)):
                # Rarely leave out a box, so that something is missing.
                if draw(st.integers(0, 19)):
                    sources[draw(st.integers(0, len(sources) - 1))].append((spec.name, box))
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
            extra = (spec.name, draw(boxes(spec.shape)))
            sources[draw(st.integers(0, len(sources) - 1))].append(extra)
    return [draw(st.permutations(held)) for held in sources]


@st.composite
def a_target(draw: st.DrawFn, name: str, of: list[TensorSpec]) -> TargetTensor:
    """Draw a target: a slice, a mesh's part, or boxes joined along a new or an existing axis."""
    spec = draw(st.sampled_from(of))
    kind = draw(st.sampled_from(["full", "tp", "mesh", "concatenated", "stacked"]))
    if kind == "tp" and spec.shape:
        world = draw(st.integers(1, 5))
        rank, axis = draw(st.integers(0, world - 1)), draw(st.integers(0, len(spec.shape) - 1))
        return tp_target(spec, TargetTPLayout(world, rank, axis), name=name)
    if kind == "mesh" and spec.shape:
        axes = []
        for _ in range(draw(st.integers(1, 3))):
            size = draw(st.integers(1, 3))
            axis = draw(st.integers(0, len(spec.shape) - 1))
            axes.append((axis, size, draw(st.integers(0, size - 1))))
        return mesh_target(spec, axes, name=name)
    if kind == "concatenated" and spec.shape:
        axis = draw(st.integers(0, len(spec.shape) - 1))
        rows = draw(st.lists(boxes((spec.shape[axis],)), min_size=1, max_size=3))
        parts = []
        at = 0
        for row in rows:
            start = tuple(row.start[0] if a == axis else 0 for a in range(len(spec.shape)))
            size = tuple(row.shape[0] if a == axis else n for a, n in enumerate(spec.shape))
            where = tuple(at if a == axis else 0 for a in range(len(spec.shape)))
            parts.append(TargetPart(spec.name, Box(start, size), where))
            at += row.shape[0]
        shape = tuple(at if a == axis else n for a, n in enumerate(spec.shape))
        return TargetTensor(name, spec.dtype, shape, tuple(draw(st.permutations(parts))))
    if kind == "stacked" and spec.shape:
        ids = draw(st.permutations(range(spec.shape[0])))
        ids = ids[: draw(st.integers(0, len(ids)))]
        box = draw(boxes(spec.shape[1:])) if draw(st.booleans()) else None
        return stacked_experts_target(name, spec, ids, box=box)
    if kind == "stacked":
        return stacked_experts_target(name, [spec, spec], draw(st.sampled_from([[0], [1], [1, 0]])))
    return replicated_target(spec, name=name)


@CAREFUL
@given(st.data())
def test_every_wanted_byte_is_read_once_or_refused(
    data: st.DataObject,
) -> None:
    of = data.draw(specs())
    held_by = data.draw(publications(of))
    targets = [
        data.draw(a_target(f"target{number}", of))
        for number in range(data.draw(st.sampled_from([2, 1, 3, 0])))
    ]
    seed = data.draw(st.integers(0, 1000))
    model = Model.of(of, seed)
    if is_held(targets, held_by):
        plan = plan_checked(model, held_by, targets, seed=seed)
        event(f"planned, {len(plan.source_reads)} sources")
        return
    event("refused")
    shards = ShardTable.of(publish(model, held_by).manifests)
    with pytest.raises(LayoutError) as refused:
        plan_reads(shards, targets)
    assert any(f"{part.tensor!r}" in str(refused.value) for t in targets for part in t.parts)


@CAREFUL
@given(st.data())
def test_equal_arguments_give_equal_plans(data: st.DataObject) -> None:
    of = data.draw(specs())
    held_by = data.draw(publications(of))
    targets = [replicated_target(spec) for spec in of]
    shards = ShardTable.of(publish(Model.of(of), held_by).manifests)
    again = ShardTable.of(publish(Model.of(of), held_by).manifests)
    assert shards.structure == again.structure
    if not is_held(targets, held_by):
        refused = []
        for table in (shards, again):
            with pytest.raises(LayoutError) as error:
                plan_reads(table, targets, seed=3)
            refused.append(str(error.value))
        assert refused[0] == refused[1]
        return
    first, second = plan_reads(shards, targets, seed=3), plan_reads(again, targets, seed=3)
    assert [source for source, _ in first.source_reads] == [
        source for source, _ in second.source_reads
    ]
    for (_, a), (_, b) in zip(first.source_reads, second.source_reads, strict=True):
        assert a.rows.tolist() == b.rows.tolist()
