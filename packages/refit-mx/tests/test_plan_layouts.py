"""Plans of every layout that trainers and generators use.

The tests use the planner's own bounds, so they stay correct when a bound changes. Imports
internals: manifests are made by hand, and limits are the planner's.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from plan_reference import (
    Held,
    Model,
    carried_out,
    check_plan,
    manifest,
    plan_checked,
    publish,
    sharded,
)

from refit_mx import (
    Box,
    LayoutError,
    Manifest,
    ShardTable,
    TargetPart,
    TargetTensor,
    TargetTPLayout,
    TensorSpec,
    fused_gate_up_target,
    fused_qkv_target,
    plan_reads,
    replicated_target,
    stacked_experts_target,
    tp_target,
)
from refit_mx.manifest.format import BLOCK_BYTES, DIGEST_BYTES, ShardColumns
from refit_mx.plan.cells import divide
from refit_mx.plan.planner import SPLIT_BYTES

W = TensorSpec("w", "bfloat16", (8, 6))


def holding(spec: TensorSpec, boxes: list[Box]) -> list[Held]:
    """Return one source per box."""
    return [[(spec.name, box)] for box in boxes]


@pytest.mark.parametrize("stacked_source", [True, False])
@pytest.mark.parametrize("ids", [[0], [3, 4, 5], [5, 1, 2, 0], []])
def test_experts_become_the_stack_of_their_receiver(stacked_source: bool, ids: list[int]) -> None:
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
            [(spec.name, Box.full(spec.shape)) for spec in specs[rank::3]] for rank in range(3)
        ]
    target = stacked_experts_target("w", experts, ids)
    assert target.shape == (len(ids), 4, 3)
    plan_checked(Model.of(specs), held_by, [target])


def test_runs_of_experts_in_a_stack_are_one_part() -> None:
    stack = TensorSpec("w", "float16", (8, 2, 2))
    assert len(stacked_experts_target("some", stack, [4, 5, 6, 1, 2, 7]).parts) == 3


def qkv(heads: int, kv_heads: int, dim: int, hidden: int = 5) -> list[TensorSpec]:
    return [
        TensorSpec("q", "bfloat16", (heads * dim, hidden)),
        TensorSpec("k", "bfloat16", (kv_heads * dim, hidden)),
        TensorSpec("v", "bfloat16", (kv_heads * dim, hidden)),
    ]


@pytest.mark.parametrize("tp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_fused_qkv_replicates_few_heads(tp_size: int, kv_heads: int) -> None:
    q, k, v = qkv(8, kv_heads, 3)
    model = Model.of([q, k, v])
    held_by = [
        [("q", q_box), ("k", k_box), ("v", v_box)]
        for q_box, k_box, v_box in zip(*(sharded(spec, 0, 3) for spec in (q, k, v)), strict=True)
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
        # The heads that vLLM's QKVParallelLinear assigns to this rank.
        q_heads = range(rank * 8 // tp_size, (rank + 1) * 8 // tp_size)
        first = rank * kv_heads // tp_size
        own_kv_heads = range(first, first + max(1, kv_heads // tp_size))
        rows = [
            model.content[name][head * 3 : head * 3 + 3]
            for name, heads in (("q", q_heads), ("k", own_kv_heads), ("v", own_kv_heads))
            for head in heads
        ]
        scratch, _ = carried_out(plan, sources)
        assert scratch[: plan.nbytes].tobytes() == np.concatenate(rows).tobytes()


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


def test_targets_of_any_dtype_and_shape_are_aligned() -> None:
    specs = [
        TensorSpec("bias", "float32", (7,)),
        TensorSpec("scale", "float32", ()),
        TensorSpec("nothing", "int64", (0, 3)),
        TensorSpec("flag", "bool", (1, 1, 1, 1)),
        TensorSpec("kernel", "float16", (3, 2, 3, 2)),
    ]
    held_by: list[Held] = [
        [(spec.name, Box.full(spec.shape)) for spec in specs],
        [("nothing", Box((0, 0), (0, 3))), ("bias", Box((3,), (0,)))],
    ]
    plan = plan_checked(Model.of(specs), held_by, [replicated_target(spec) for spec in specs])
    assert plan.offsets.tolist() == [0, 256, 512, 512, 768]
    assert plan.scratch_bytes == 1024


def test_third_loop_of_a_part_becomes_one_row_per_step() -> None:
    spec = TensorSpec("w", "bfloat16", (4, 5, 6, 7))
    box = Box((1, 1, 1, 1), (3, 3, 4, 5))
    target = TargetTensor(
        "w", "bfloat16", box.shape, (TargetPart("w", box, (0, 0, 0, 0), spec.shape),)
    )
    plan = plan_checked(Model.of([spec]), holding(spec, [Box.full(spec.shape)]), [target])
    assert len(plan.source_reads[0][1]) == 3


def test_complete_shard_is_one_contiguous_read() -> None:
    spec = TensorSpec("w", "bfloat16", (8, 3, 4, 5))
    plan = plan_checked(
        Model.of([spec]), holding(spec, sharded(spec, 0, 4)), [replicated_target(spec)]
    )
    assert [reads.rows[:, 2:].tolist() for _, reads in plan.source_reads] == [
        [[2 * 3 * 4 * 5 * 2, 1, 0, 0, 1, 0, 0]]
    ] * 4


def test_missing_rows_are_named() -> None:
    manifests = publish(Model.of([W]), holding(W, sharded(W, 0, 4))).manifests
    with pytest.raises(LayoutError) as error:
        plan_reads(ShardTable.of([manifests[0], manifests[3]]), [replicated_target(W)])
    assert str(error.value) == (
        "target 'w': no source has rows 2:6 of axis 0 of 'w', shape (8, 6); checked 2 sources "
        "of version 'v1': slot-0 (worker-0), slot-3 (worker-3)"
    )


def test_missing_corner_is_named_as_a_box() -> None:
    boxes = [Box((r, c), (2, 3)) for r in (0, 2, 4, 6) for c in (0, 3) if (r, c) != (4, 3)]
    shards = ShardTable.of(publish(Model.of([W]), holding(W, boxes)).manifests)
    with pytest.raises(LayoutError, match=r"no source has \[4:6, 3:6\] of .*and 3 more") as error:
        plan_reads(shards, [replicated_target(W)])
    assert "worker-4" not in str(error.value)


def test_tensor_published_differently_or_not_at_all_is_refused() -> None:
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
    with pytest.raises(LayoutError, match="1 parts do not match"):
        plan_reads(shards, [beyond])


def large_replicas(spec: TensorSpec, replicas: int) -> list[Manifest]:
    """Return manifests of sources that have all of a tensor, without memory for it."""
    template = manifest([spec], [], [], np.zeros(0, np.uint8))
    return [
        msgspec.structs.replace(
            template,
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


def test_large_tensor_is_divided_among_its_sources() -> None:
    spec = TensorSpec("w", "float32", (5 * SPLIT_BYTES // 4096 + 3, 1024))
    shards = ShardTable.of(large_replicas(spec, 3))
    plan = plan_reads(shards, [replicated_target(spec)])
    assert len(plan.source_reads) == 3
    assert plan.bytes_by_source.sum() == spec.nbytes
    assert plan.bytes_by_source.max() <= spec.nbytes / 3 + SPLIT_BYTES
    rows = np.concatenate([reads.rows for _, reads in plan.source_reads])
    rows = rows[np.argsort(rows[:, 1])]
    # One after the other, at the source as in scratch.
    assert (rows[:, 0] == rows[:, 1]).all()
    assert (rows[1:, 1] == rows[:-1, 1] + rows[:-1, 2]).all()


# What several sources have is divided evenly


def test_tensors_are_distributed_evenly_over_replicas() -> None:
    specs = [TensorSpec(f"t{i}", "float32", (1 + i % 7, 4)) for i in range(40)]
    held_by: list[Held] = [[(spec.name, Box.full(spec.shape)) for spec in specs]] * 4
    plan = plan_checked(Model.of(specs), held_by, [replicated_target(spec) for spec in specs])
    largest = max(spec.nbytes for spec in specs)
    assert plan.bytes_by_source.max() - plan.bytes_by_source.min() <= largest


def test_replicated_tensors_are_read_from_idle_sources() -> None:
    w = TensorSpec("w", "float32", (8, 4))
    norms = [TensorSpec(f"n{i}", "float32", (8,)) for i in range(3)]
    held_by: list[Held] = [
        [("w", box), *((norm.name, Box.full((8,))) for norm in norms)] for box in sharded(w, 0, 4)
    ]
    targets = [tp_target(w, TargetTPLayout(4, 1)), *(replicated_target(norm) for norm in norms)]
    plan = plan_checked(Model.of([w, *norms]), held_by, targets)
    assert plan.bytes_by_source.tolist() == [32, 32, 32, 32]


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_receivers_use_all_replicas_of_a_single_tensor(replicas: int) -> None:
    spec = TensorSpec("w", "float32", (4,))
    held_by: list[Held] = [[("w", Box.full((4,)))]] * replicas
    total = sum(
        plan_checked(
            Model.of([spec]), held_by, [replicated_target(spec)], seed=rank
        ).bytes_by_source
        for rank in range(replicas * replicas)
    )
    assert total.tolist() == [replicas * spec.nbytes] * replicas


def test_receivers_of_the_same_shard_use_all_replicas() -> None:
    """Every second receiver wants the first half; rank modulo 2 picks one replica for all."""
    spec = TensorSpec("w", "float32", (8,))
    held_by: list[Held] = [[("w", box)] for box in sharded(spec, 0, 2) * 2]
    total = sum(
        plan_checked(
            Model.of([spec]), held_by, [tp_target(spec, TargetTPLayout(2, rank % 2))], seed=rank
        ).bytes_by_source
        for rank in range(16)
    )
    assert total.tolist() == [4 * spec.nbytes // 2] * 4


def test_too_many_overlaps_of_shards_are_refused() -> None:
    rng = np.random.default_rng(0)
    start = rng.integers(0, 10**6, (2000, 2))
    stop = start + rng.integers(1, 10**5, (2000, 2))
    with pytest.raises(LayoutError, match=r"2000 different shards .* expected at most"):
        divide(np.array([2 * 10**6, 2 * 10**6]), start, stop)


def test_too_many_pairs_of_shards_and_parts_are_refused() -> None:
    spec = TensorSpec("w", "uint8", (6000,))
    rows: list[Held] = [[("w", Box((row,), (1,))) for row in range(6000)]]
    shards = ShardTable.of(publish(Model.of([spec]), rows).manifests)
    targets = [
        TargetTensor(f"row{row}", "uint8", (1,), (TargetPart("w", Box((row,), (1,)), (0,)),))
        for row in range(6000)
    ]
    assert plan_reads(shards, targets[:100]).nbytes == 100
    with pytest.raises(LayoutError, match="36000000 pairs that share a tensor"):
        plan_reads(shards, targets)
