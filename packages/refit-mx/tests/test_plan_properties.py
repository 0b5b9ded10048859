"""Plans of random layouts against the reference: no byte twice, none missing, no other byte."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from plan_reference import Held, Model, is_held, plan_checked, publish, sharded

from refit_mx.errors import LayoutError
from refit_mx.layout import TargetTPLayout
from refit_mx.plan.planner import plan_reads
from refit_mx.plan.shards import ShardTable
from refit_mx.plan.targets import (
    TargetPart,
    TargetTensor,
    expert_targets,
    mesh_target,
    replicated_target,
    tp_target,
)
from refit_mx.tensor_types import ITEM_SIZES, Box, TensorSpec

CAREFUL = settings(
    max_examples=250,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def specs(draw: st.DrawFn) -> list[TensorSpec]:
    """A few tensors of mixed dtypes, without axes and with empty ones among them."""
    return [
        TensorSpec(
            f"t{number}",
            draw(st.sampled_from(sorted(ITEM_SIZES))),
            tuple(draw(st.lists(st.sampled_from([2, 3, 4, 5, 6, 8, 1, 0]), max_size=4))),
        )
        for number in range(draw(st.integers(1, 3)))
    ]


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any box of a shape, empty ones too."""
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds))


def cut(box: Box, axis: int, at: list[int]) -> list[Box]:
    """A box divided along an axis at some rows of it."""
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
    """Disjoint boxes that together are a shape: slabs and grids, even and uneven, some empty."""
    found = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 2)) if shape else 0):
        axis = draw(st.integers(0, len(shape) - 1))
        if draw(st.booleans()):
            # The same cuts for all: a grid, as of a mesh.
            at = draw(st.lists(st.integers(0, shape[axis]), max_size=3))
            found = [part for box in found for part in cut(box, axis, at)]
        else:
            found = [
                part
                for box in found
                for part in cut(
                    box, axis, draw(st.lists(st.integers(0, box.shape[axis]), max_size=2))
                )
            ]
    return found


@st.composite
def publications(draw: st.DrawFn, of: list[TensorSpec]) -> list[Held]:
    """What each source holds: divisions of the tensors, replicas of them, and any other boxes."""
    sources: list[list[tuple[str, Box]]] = [[] for _ in range(draw(st.integers(1, 6)))]
    for spec in of:
        for _ in range(draw(st.sampled_from([1, 1, 1, 2, 2, 3]))):
            for box in draw(division(spec.shape)):
                # Mostly all of it; now and then something is missing.
                if draw(st.integers(0, 19)):
                    sources[draw(st.integers(0, len(sources) - 1))].append((spec.name, box))
        for _ in range(draw(st.sampled_from([0, 0, 0, 1, 3]))):
            extra = (spec.name, draw(boxes(spec.shape)))
            sources[draw(st.integers(0, len(sources) - 1))].append(extra)
    return [draw(st.permutations(held)) for held in sources]


@st.composite
def a_target(draw: st.DrawFn, name: str, of: list[TensorSpec]) -> TargetTensor:
    """A slice, a mesh's part, or several boxes side by side along a new or a given axis."""
    spec = draw(st.sampled_from(of))
    kind = draw(st.sampled_from(["whole", "tp", "mesh", "beside", "stacked"]))
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
    if kind == "beside" and spec.shape:
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
        one = draw(boxes(spec.shape[1:])) if draw(st.booleans()) else None
        return expert_targets(name, spec, ids, box=one)
    if kind == "stacked":
        return expert_targets(name, [spec, spec], draw(st.sampled_from([[0], [1], [1, 0]])))
    return replicated_target(spec, name=name)


@CAREFUL
@given(st.data())
def test_every_wanted_byte_is_read_once_from_one_live_source_or_the_plan_is_refused(
    data: st.DataObject,
) -> None:
    of = data.draw(specs())
    held_by = data.draw(publications(of))
    targets = [
        data.draw(a_target(f"target{number}", of))
        for number in range(data.draw(st.sampled_from([2, 1, 3, 0])))
    ]
    exclude = data.draw(st.sets(st.integers(0, len(held_by) - 1), max_size=2))
    seed = data.draw(st.integers(0, 1000))
    model = Model.of(of, seed)
    if is_held(targets, held_by, exclude):
        plan = plan_checked(model, held_by, targets, exclude=exclude, seed=seed)
        event(f"planned, {len(plan.fetches)} sources")
        return
    event("refused")
    shards = ShardTable.of(publish(model, held_by).manifests)
    with pytest.raises(LayoutError) as refused:
        plan_reads(shards, targets, exclude=[f"worker-{number}" for number in exclude])
    assert any(f"{part.tensor!r}" in str(refused.value) for t in targets for part in t.parts)


@CAREFUL
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.integers(1, 7),
    st.integers(1, 7),
    st.integers(1, 3),
    st.data(),
)
def test_any_sharding_becomes_any_other(
    shape: list[int], sources: int, receivers: int, replicas: int, data: st.DataObject
) -> None:
    spec = TensorSpec("w", "bfloat16", tuple(shape))
    of_axis = data.draw(st.integers(0, len(shape) - 1))
    to_axis = data.draw(st.integers(0, len(shape) - 1))
    held_by = [[("w", box)] for box in sharded(spec, of_axis, sources) for _ in range(replicas)]
    model = Model.of([spec])
    moved = 0
    for rank in range(receivers):
        target = tp_target(spec, TargetTPLayout(receivers, rank, to_axis))
        moved += plan_checked(model, held_by, [target], seed=rank).nbytes
    assert moved == math.prod(shape) * 2


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
    one, two = plan_reads(shards, targets, seed=3), plan_reads(again, targets, seed=3)
    assert [source for source, _ in one.fetches] == [source for source, _ in two.fetches]
    for (_, a), (_, b) in zip(one.fetches, two.fetches, strict=True):
        assert a.rows.tolist() == b.rows.tolist()
