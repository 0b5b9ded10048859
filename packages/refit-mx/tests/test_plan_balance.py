"""What several sources have is shared out evenly, within a receiver and among receivers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_reference import Held, Model, plan_checked, publish, sharded

from refit_mx.errors import LayoutError
from refit_mx.layout import TargetTPLayout
from refit_mx.plan.balance import spread
from refit_mx.plan.cells import divide
from refit_mx.plan.planner import plan_reads
from refit_mx.plan.shards import ShardTable
from refit_mx.plan.targets import TargetPart, TargetTensor, replicated_target, tp_target
from refit_mx.tensor_types import Box, TensorSpec


@settings(max_examples=200)
@given(st.data())
def test_each_item_goes_to_the_least_loaded_of_those_that_have_it(data: st.DataObject) -> None:
    load = data.draw(st.lists(st.integers(0, 50), min_size=1, max_size=6))
    names = list(range(len(load)))
    groups = data.draw(
        st.lists(st.lists(st.sampled_from(names), min_size=1, unique=True), min_size=1, max_size=4)
    )
    items = data.draw(
        st.lists(st.tuples(st.integers(1, 60), st.integers(0, len(groups) - 1)), max_size=30)
    )
    nbytes = np.array([size for size, _ in items], dtype=np.int64)
    places = spread(
        nbytes,
        [group for _, group in items],
        groups,
        np.array(load, dtype=np.int64),
        seed=data.draw(st.integers(0, 99)),
    )
    now = list(load)
    # Largest first, equal ones in their order.
    for item in sorted(range(len(items)), key=lambda i: -items[i][0]):
        size, group = items[item]
        source = groups[group][places[item]]
        assert now[source] == min(now[other] for other in groups[group])
        now[source] += size


def test_many_tensors_on_replicas_are_shared_out_evenly() -> None:
    specs = [TensorSpec(f"t{i}", "float32", (1 + i % 7, 4)) for i in range(40)]
    held_by: list[Held] = [[(spec.name, Box.whole(spec.shape)) for spec in specs]] * 4
    plan = plan_checked(Model.of(specs), held_by, [replicated_target(spec) for spec in specs])
    largest = max(spec.nbytes for spec in specs)
    assert plan.bytes_by_source.max() - plan.bytes_by_source.min() <= largest


def test_what_all_have_goes_to_those_that_give_nothing_else() -> None:
    w = TensorSpec("w", "float32", (8, 4))
    norms = [TensorSpec(f"n{i}", "float32", (8,)) for i in range(3)]
    held_by: list[Held] = [
        [("w", box), *((norm.name, Box.whole((8,))) for norm in norms)] for box in sharded(w, 0, 4)
    ]
    targets = [tp_target(w, TargetTPLayout(4, 1)), *(replicated_target(norm) for norm in norms)]
    plan = plan_checked(Model.of([w, *norms]), held_by, targets)
    assert plan.bytes_by_source.tolist() == [32, 32, 32, 32]


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_receivers_in_a_row_use_all_replicas_of_a_single_tensor(replicas: int) -> None:
    spec = TensorSpec("w", "float32", (4,))
    held_by: list[Held] = [[("w", Box.whole((4,)))]] * replicas
    total = sum(
        plan_checked(
            Model.of([spec]), held_by, [replicated_target(spec)], seed=rank
        ).bytes_by_source
        for rank in range(replicas * replicas)
    )
    assert total.tolist() == [replicas * spec.nbytes] * replicas


def test_receivers_that_want_the_same_shard_use_all_its_replicas() -> None:
    """Every second receiver wants the first half: a plain turn by rank would use one replica."""
    spec = TensorSpec("w", "float32", (8,))
    held_by: list[Held] = [[("w", box)] for box in sharded(spec, 0, 2) * 2]
    total = sum(
        plan_checked(
            Model.of([spec]), held_by, [tp_target(spec, TargetTPLayout(2, rank % 2))], seed=rank
        ).bytes_by_source
        for rank in range(16)
    )
    assert total.tolist() == [4 * spec.nbytes // 2] * 4


def test_shards_that_overlap_in_too_many_ways_are_refused_at_once() -> None:
    rng = np.random.default_rng(0)
    start = rng.integers(0, 10**6, (2000, 2))
    stop = start + rng.integers(1, 10**5, (2000, 2))
    with pytest.raises(LayoutError, match=r"2000 different shards .* expected at most"):
        divide(np.array([2 * 10**6, 2 * 10**6]), start, stop)


def test_shards_and_parts_of_one_tensor_that_make_too_many_pairs_are_refused() -> None:
    spec = TensorSpec("w", "uint8", (6000,))
    rows: list[Held] = [[("w", Box((row,), (1,))) for row in range(6000)]]
    shards = ShardTable.of(publish(Model.of([spec]), rows).manifests)
    targets = [
        TargetTensor(f"row{row}", "uint8", (1,), (TargetPart("w", Box((row,), (1,)), (0,)),))
        for row in range(6000)
    ]
    assert plan_reads(shards, targets[:100]).nbytes == 100
    with pytest.raises(LayoutError, match="36000000 pairs of one tensor"):
        plan_reads(shards, targets)
