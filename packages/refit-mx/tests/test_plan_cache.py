"""Plans are made again only when something that they depend on is another."""

from __future__ import annotations

import msgspec
import pytest
from plan_reference import Model, check_plan, publish, sharded

from refit_mx.errors import LayoutError
from refit_mx.plan.cache import PlanCache
from refit_mx.plan.shards import ShardTable
from refit_mx.plan.targets import replicated_target
from refit_mx.tensor_types import Box, TensorSpec

W = TensorSpec("w", "float32", (8, 3))
HELD = [[("w", box)] for box in sharded(W, 0, 2)] + [[("w", Box.whole(W.shape))]]
TARGETS = (replicated_target(W),)


def table(version_id: str = "v1", *, seed: int = 0, address: int = 4096) -> ShardTable:
    return ShardTable.of(
        [
            msgspec.structs.replace(manifest, version_id=version_id, arena_address=address)
            for manifest in publish(Model.of([W], seed), HELD).manifests
        ]
    )


def test_the_next_version_of_the_same_layout_has_the_same_plan_and_it_is_right() -> None:
    cache = PlanCache()
    one = cache.plan(table(), TARGETS)
    later = table("v2", seed=1, address=1 << 20)
    assert cache.plan(later, TARGETS) is one
    model = Model.of([W], 1)
    check_plan(one, later, TARGETS, publish(model, HELD), model)


def test_other_arguments_have_other_plans() -> None:
    cache = PlanCache(8)
    shards = table()
    plans = [
        cache.plan(shards, TARGETS),
        cache.plan(shards, TARGETS, exclude=["worker-0"]),
        cache.plan(shards, TARGETS, seed=1),
        cache.plan(shards, TARGETS, prefer_local="127.0.0.1"),
        cache.plan(shards, (replicated_target(W),)),
    ]
    assert len({id(plan) for plan in plans}) == 5
    assert plans[1].bytes_by_source[0] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"worker_id": "worker-9"},
        {"source_slot_id": "slot-9"},
        {"endpoint": "elsewhere:1"},
        {"offset": True},
    ],
)
def test_another_structure_has_another_plan(changes: dict[str, object]) -> None:
    manifests = publish(Model.of([W]), HELD).manifests
    cache = PlanCache()
    one = cache.plan(ShardTable.of(manifests), TARGETS)
    first = manifests[0]
    if changes.pop("offset", None):
        shards = msgspec.structs.replace(first.shards, offset=bytes(8))
        assert shards.offset != first.shards.offset
        changes = {"shards": shards}
    other = ShardTable.of([msgspec.structs.replace(first, **changes), *manifests[1:]])
    assert other.structure != ShardTable.of(manifests).structure
    assert cache.plan(other, TARGETS) is not one


def test_the_order_of_sources_is_part_of_the_structure() -> None:
    manifests = publish(Model.of([W]), HELD).manifests
    assert ShardTable.of(manifests).structure != ShardTable.of(manifests[::-1]).structure


def test_only_the_last_plans_are_kept_and_a_refusal_is_no_plan() -> None:
    cache = PlanCache(1)
    shards = table()
    one = cache.plan(shards, TARGETS)
    with pytest.raises(LayoutError):
        cache.plan(shards, TARGETS, exclude=["worker-0", "worker-2"])
    assert cache.plan(shards, TARGETS) is one
    cache.plan(shards, TARGETS, seed=1)
    assert cache.plan(shards, TARGETS) is not one
    with pytest.raises(ValueError, match="most 0"):
        PlanCache(0)
