"""Every layout that trainers and generators use, and the holes of planners before this one."""

from __future__ import annotations

import dataclasses
import itertools

import msgspec
import numpy as np
import pytest
from plan_reference import (
    Held,
    Model,
    carried_out,
    check_plan,
    chunks,
    manifest,
    plan_checked,
    publish,
    sharded,
)

from refit_mx.errors import LayoutError
from refit_mx.layout import TargetTPLayout
from refit_mx.manifest import BLOCK_BYTES, DIGEST_BYTES, Manifest, ShardColumns
from refit_mx.plan.planner import SPLIT_BYTES, plan_reads
from refit_mx.plan.shards import ShardTable
from refit_mx.plan.targets import (
    TargetPart,
    TargetTensor,
    expert_targets,
    fused_gate_up_target,
    fused_qkv_target,
    mesh_target,
    replicated_target,
    tp_target,
)
from refit_mx.slice_range import SliceRange
from refit_mx.tensor_types import Box, TensorSpec

W = TensorSpec("w", "bfloat16", (8, 6))


def holding(spec: TensorSpec, boxes: list[Box]) -> list[Held]:
    """One source a box."""
    return [[(spec.name, box)] for box in boxes]


@pytest.mark.parametrize(("sources", "receivers"), [(2, 2), (2, 4), (4, 2), (3, 2), (3, 4), (5, 3)])
@pytest.mark.parametrize("rows", [1, 5, 12, 13])
def test_fsdp_to_fsdp_even_and_uneven(sources: int, receivers: int, rows: int) -> None:
    spec = TensorSpec("w", "float32", (rows, 3))
    for rank in range(receivers):
        target = tp_target(spec, TargetTPLayout(receivers, rank))
        plan_checked(Model.of([spec]), holding(spec, sharded(spec, 0, sources)), [target])


@pytest.mark.parametrize(("sources", "receivers"), [(2, 4), (4, 2), (1, 8), (8, 1), (3, 2)])
@pytest.mark.parametrize(("of_axis", "to_axis"), list(itertools.product(range(3), range(3))))
def test_tp_on_any_axis_to_tp_on_any_axis(
    sources: int, receivers: int, of_axis: int, to_axis: int
) -> None:
    spec = TensorSpec("w", "bfloat16", (4, 5, 6))
    held_by = holding(spec, sharded(spec, of_axis, sources))
    for rank in range(receivers):
        target = tp_target(spec, TargetTPLayout(receivers, rank, to_axis))
        plan_checked(Model.of([spec]), held_by, [target], seed=rank)


def test_a_receiver_of_half_a_shard_reads_from_one_source_and_only_its_half() -> None:
    spec = TensorSpec("w", "float32", (16, 4))
    plan = plan_checked(
        Model.of([spec]),
        holding(spec, sharded(spec, 0, 4)),
        [tp_target(spec, TargetTPLayout(8, 3))],
    )
    assert [(source, reads.nbytes) for source, reads in plan.fetches] == [(1, 2 * 4 * 4)]


def test_a_range_of_its_own_is_read_from_every_source_that_has_some_of_it() -> None:
    target = tp_target(W, TargetTPLayout(1, 0, 0, SliceRange(1, 7)))
    plan = plan_checked(Model.of([W]), holding(W, sharded(W, 0, 4)), [target])
    assert plan.bytes_by_source.tolist() == [12, 24, 24, 12]


def test_two_dimensional_meshes_and_uneven_shards_are_planned() -> None:
    """Hole: the slice planner of the RFC's branches refuses both."""
    spec = TensorSpec("w", "bfloat16", (7, 9))
    rows, columns = chunks(7, 3), chunks(9, 2)
    held_by = holding(
        spec, [Box((r, c), (n, m)) for (r, n), (c, m) in itertools.product(rows, columns)]
    )
    for i, j in itertools.product(range(2), range(4)):
        target = mesh_target(spec, [(0, 2, i), (1, 4, j)])
        assert target.shape == (chunks(7, 2)[i][1], chunks(9, 4)[j][1])
        plan_checked(Model.of([spec]), held_by, [target], seed=i * 4 + j)


def test_a_mesh_may_divide_one_axis_twice() -> None:
    spec = TensorSpec("w", "float32", (12, 2))
    taken = [mesh_target(spec, [(0, 2, i), (0, 3, j)]) for i in range(2) for j in range(3)]
    assert [target.parts[0].box.start[0] for target in taken] == [0, 2, 4, 6, 8, 10]
    plan_checked(
        Model.of([spec]),
        holding(spec, sharded(spec, 1, 2)),
        [dataclasses.replace(target, name=str(i)) for i, target in enumerate(taken)],
    )


def test_a_replica_does_not_make_rows_come_twice() -> None:
    """Hole: with a replica the planner of the RFC's branches returns 12 rows of 8."""
    first, second = sharded(W, 0, 2)
    plan = plan_checked(Model.of([W]), holding(W, [first, second, first]), [replicated_target(W)])
    assert sum(int(reads.rows[:, 2].sum()) for _, reads in plan.fetches) == W.nbytes
    assert len(plan.fetches) == 2


def test_two_versions_are_never_in_one_plan() -> None:
    """Hole: the planner of the RFC's branches calls a mixture of two versions covered."""
    sources = publish(Model.of([W]), holding(W, sharded(W, 0, 2)))
    one, other = (
        sources.manifests[0],
        msgspec.structs.replace(sources.manifests[1], version_id="v2"),
    )
    with pytest.raises(
        LayoutError, match=r"worker 'worker-1' publishes version 'v2'.*'v1'.*expected one version"
    ):
        ShardTable.of([one, other])


def test_replicas_and_overlapping_shards_of_other_layouts_share_the_work() -> None:
    spec = TensorSpec("w", "float32", (16, 16))
    boxes = [*sharded(spec, 0, 4), *sharded(spec, 1, 2), Box.whole(spec.shape)]
    plan = plan_checked(Model.of([spec]), holding(spec, boxes), [replicated_target(spec)])
    assert plan.bytes_by_source.max() <= spec.nbytes // 4


def test_partly_overlapping_shards_are_divided() -> None:
    spec = TensorSpec("w", "int16", (10, 10))
    boxes = [Box((0, 0), (7, 7)), Box((3, 3), (7, 7)), Box((0, 5), (5, 5)), Box((5, 0), (5, 5))]
    plan_checked(Model.of([spec]), holding(spec, boxes), [replicated_target(spec)])


@pytest.mark.parametrize("stacked_source", [True, False])
@pytest.mark.parametrize("ids", [[0], [3, 4, 5], [5, 1, 2, 0], []])
def test_experts_stacked_or_single_become_the_stack_that_a_receiver_owns(
    stacked_source: bool, ids: list[int]
) -> None:
    held_by: list[Held]
    experts: TensorSpec | list[TensorSpec]
    if stacked_source:
        stack = TensorSpec("experts.w", "bfloat16", (6, 4, 3))
        specs, experts = [stack], stack
        held_by = holding(stack, sharded(stack, 0, 3))
    else:
        specs = [TensorSpec(f"experts.{i}.w", "bfloat16", (4, 3)) for i in range(6)]
        experts = specs
        held_by = [
            [(spec.name, Box.whole(spec.shape)) for spec in specs[rank::3]] for rank in range(3)
        ]
    target = expert_targets("w", experts, ids)
    assert target.shape == (len(ids), 4, 3)
    plan_checked(Model.of(specs), held_by, [target])


def test_experts_of_a_stack_become_single_tensors_and_slices_of_them() -> None:
    stack = TensorSpec("w", "float16", (4, 6, 5))
    single = TargetTensor(
        "expert.2", "float16", (6, 5), (TargetPart("w", Box((2, 0, 0), (1, 6, 5)), (0, 0)),)
    )
    sliced = expert_targets("some", stack, [3, 1], box=Box((0, 2), (6, 3)))
    assert sliced.shape == (2, 6, 3)
    plan_checked(Model.of([stack]), holding(stack, sharded(stack, 1, 4)), [single, sliced])


def test_runs_of_experts_in_a_stack_are_one_part() -> None:
    stack = TensorSpec("w", "float16", (8, 2, 2))
    assert len(expert_targets("some", stack, [4, 5, 6, 1, 2, 7]).parts) == 3


def qkv(heads: int, kv_heads: int, dim: int, hidden: int = 5) -> list[TensorSpec]:
    return [
        TensorSpec("q", "bfloat16", (heads * dim, hidden)),
        TensorSpec("k", "bfloat16", (kv_heads * dim, hidden)),
        TensorSpec("v", "bfloat16", (kv_heads * dim, hidden)),
    ]


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_fused_qkv_with_key_and_value_heads_replicated_where_there_are_few(
    tp_size: int, kv_heads: int
) -> None:
    q, k, v = qkv(8, kv_heads, 3)
    model = Model.of([q, k, v])
    held_by = [
        [("q", one), ("k", two), ("v", three)]
        for one, two, three in zip(*(sharded(spec, 0, 3) for spec in (q, k, v)), strict=True)
    ]
    for rank in range(tp_size):
        target = fused_qkv_target(
            "qkv",
            q,
            k,
            v,
            num_heads=8,
            num_kv_heads=kv_heads,
            head_dim=3,
            tp_size=tp_size,
            tp_rank=rank,
        )
        sources = publish(model, held_by)
        shards = ShardTable.of(sources.manifests)
        plan = plan_reads(shards, [target])
        check_plan(plan, shards, [target], sources, model)
        # Head by head, as vLLM's QKVParallelLinear divides them.
        q_heads = range(rank * 8 // tp_size, (rank + 1) * 8 // tp_size)
        first = rank * kv_heads // tp_size
        some = range(first, first + max(1, kv_heads // tp_size))
        rows = [
            model.content[name][head * 3 : head * 3 + 3]
            for name, heads in (("q", q_heads), ("k", some), ("v", some))
            for head in heads
        ]
        scratch, _ = carried_out(plan, sources)
        assert scratch[: plan.nbytes].tobytes() == np.concatenate(rows).tobytes()


def test_key_and_value_heads_replicated_at_the_source_are_read_once() -> None:
    spec = TensorSpec("k", "bfloat16", (2 * 4, 3))
    heads = [Box((head * 4, 0), (4, 3)) for head in (0, 0, 0, 0, 1, 1, 1, 1)]
    plan = plan_checked(Model.of([spec]), holding(spec, heads), [replicated_target(spec)])
    assert len(plan.fetches) == 2


@pytest.mark.parametrize("tp_size", [1, 2, 3])
def test_fused_gate_up_is_gate_above_up(tp_size: int) -> None:
    gate = TensorSpec("gate", "float8_e4m3fn", (6, 4))
    up = TensorSpec("up", "float8_e4m3fn", (6, 4))
    held_by = [
        [("gate", a), ("up", b)]
        for a, b in zip(sharded(gate, 1, 2), sharded(up, 1, 2), strict=True)
    ]
    for rank in range(tp_size):
        target = fused_gate_up_target("gate_up", gate, up, tp_size, rank)
        assert target.shape == (12 // tp_size, 4)
        plan_checked(Model.of([gate, up]), held_by, [target])


def test_biases_and_scalars_and_empty_tensors_of_many_dtypes_lie_aligned() -> None:
    specs = [
        TensorSpec("bias", "float32", (7,)),
        TensorSpec("scale", "float32", ()),
        TensorSpec("nothing", "int64", (0, 3)),
        TensorSpec("flag", "bool", (1, 1, 1, 1)),
        TensorSpec("kernel", "float16", (3, 2, 3, 2)),
    ]
    held_by: list[Held] = [
        [(spec.name, Box.whole(spec.shape)) for spec in specs],
        [("nothing", Box((0, 0), (0, 3))), ("bias", Box((3,), (0,)))],
    ]
    plan = plan_checked(Model.of(specs), held_by, [replicated_target(spec) for spec in specs])
    assert plan.offsets.tolist() == [0, 256, 512, 512, 768]
    assert plan.scratch_bytes == 1024


def test_a_part_of_four_axes_that_joins_nowhere_becomes_rows_of_two_loops() -> None:
    spec = TensorSpec("w", "bfloat16", (4, 5, 6, 7))
    box = Box((1, 1, 1, 1), (3, 3, 4, 5))
    target = TargetTensor(
        "w", "bfloat16", box.shape, (TargetPart("w", box, (0, 0, 0, 0), spec.shape),)
    )
    plan = plan_checked(Model.of([spec]), holding(spec, [Box.whole(spec.shape)]), [target])
    assert len(plan.fetches[0][1]) == 3


def test_whole_shards_are_one_contiguous_read_each() -> None:
    spec = TensorSpec("w", "bfloat16", (8, 3, 4, 5))
    plan = plan_checked(
        Model.of([spec]), holding(spec, sharded(spec, 0, 4)), [replicated_target(spec)]
    )
    assert [reads.rows[:, 2:].tolist() for _, reads in plan.fetches] == [
        [[2 * 3 * 4 * 5 * 2, 1, 0, 0, 1, 0, 0]]
    ] * 4


def test_nothing_wanted_is_nothing_read() -> None:
    plan = plan_checked(Model.of([W]), holding(W, sharded(W, 0, 2)), [])
    assert plan.fetches == ()
    assert plan.nbytes == plan.scratch_bytes == 0


def test_what_is_missing_is_named() -> None:
    shards = ShardTable.of(publish(Model.of([W]), holding(W, sharded(W, 0, 4))).manifests)
    with pytest.raises(LayoutError) as error:
        plan_reads(shards, [replicated_target(W)], exclude=["worker-1", "worker-2"])
    assert str(error.value) == (
        "target 'w': of 'w', shape (8, 6), no source has rows 2:6 of axis 0; looked at 2 sources "
        "of version 'v1': slot-0 (worker-0), slot-3 (worker-3); left out 2 that are excluded"
    )
    with pytest.raises(LayoutError, match=r"no source has all; looked at 0 sources"):
        plan_reads(
            shards, [replicated_target(W)], exclude=[f"worker-{number}" for number in range(4)]
        )


def test_a_missing_corner_is_named_as_a_box_and_many_sources_as_a_few() -> None:
    boxes = [Box((r, c), (2, 3)) for r in (0, 2, 4, 6) for c in (0, 3) if (r, c) != (4, 3)]
    shards = ShardTable.of(publish(Model.of([W]), holding(W, boxes)).manifests)
    with pytest.raises(LayoutError, match=r"no source has \[4:6, 3:6\];.*and 3 more") as error:
        plan_reads(shards, [replicated_target(W)])
    assert "worker-4" not in str(error.value)


def test_what_is_not_published_or_published_otherwise_is_refused() -> None:
    shards = ShardTable.of(publish(Model.of([W]), holding(W, sharded(W, 0, 2))).manifests)
    unknown = replicated_target(TensorSpec("x", "bfloat16", (8, 6)))
    with pytest.raises(LayoutError, match=r"'x' needs 'x', which none of the 2 sources"):
        plan_reads(shards, [unknown])
    for spec in (
        TensorSpec("w", "float16", (8, 6)),
        TensorSpec("w", "bfloat16", (9, 6)),
        TensorSpec("w", "bfloat16", (4, 6)),
        TensorSpec("w", "bfloat16", (8, 6, 1)),
        TensorSpec("w", "bfloat16", (48,)),
    ):
        with pytest.raises(LayoutError, match=r"'w' as .* publish bfloat16 of shape \(8, 6\)"):
            plan_reads(shards, [replicated_target(spec)])
    beyond = TargetTensor("w", "bfloat16", (2, 6), (TargetPart("w", Box((7, 0), (2, 6)), (0, 0)),))
    with pytest.raises(LayoutError, match="1 parts do not fit"):
        plan_reads(shards, [beyond])


def test_two_targets_of_one_name_are_refused() -> None:
    shards = ShardTable.of(publish(Model.of([W]), holding(W, sharded(W, 0, 2))).manifests)
    with pytest.raises(LayoutError, match="'w' comes 2 times"):
        plan_reads(shards, [replicated_target(W), replicated_target(W)])


def test_what_a_source_on_this_host_has_is_read_there() -> None:
    held_by = holding(W, [Box.whole(W.shape)] * 4)
    hosts = ["far", "far", "near", "far"]
    for seed in range(4):
        plan = plan_checked(
            Model.of([W]),
            held_by,
            [replicated_target(W)],
            prefer_local="near",
            hosts=hosts,
            seed=seed,
        )
        assert [source for source, _ in plan.fetches] == [2]


def large_replicas(spec: TensorSpec, replicas: int) -> list[Manifest]:
    """Manifests of sources that have all of a tensor; there is no memory behind them."""
    one = manifest([spec], [], [], np.zeros(0, np.uint8))
    return [
        msgspec.structs.replace(
            one,
            worker_id=f"worker-{number}",
            arena_bytes=spec.nbytes,
            digests=bytes(-(-spec.nbytes // BLOCK_BYTES) * DIGEST_BYTES),
            shards=ShardColumns(
                axes=2,
                tensor=bytes(4),
                start=bytes(16),
                shape=np.array(spec.shape, "<i8").tobytes(),
                offset=bytes(8),
            ),
        )
        for number in range(replicas)
    ]


def test_a_large_tensor_is_divided_among_those_that_have_it() -> None:
    spec = TensorSpec("w", "float32", (5 * SPLIT_BYTES // 4096 + 3, 1024))
    shards = ShardTable.of(large_replicas(spec, 3))
    plan = plan_reads(shards, [replicated_target(spec)])
    assert len(plan.fetches) == 3
    assert plan.bytes_by_source.sum() == spec.nbytes
    assert plan.bytes_by_source.max() <= spec.nbytes / 3 + SPLIT_BYTES
    rows = np.concatenate([reads.rows for _, reads in plan.fetches])
    rows = rows[np.argsort(rows[:, 1])]
    # One after the other, at the source as in scratch.
    assert (rows[:, 0] == rows[:, 1]).all()
    assert (rows[1:, 1] == rows[:-1, 1] + rows[:-1, 2]).all()
