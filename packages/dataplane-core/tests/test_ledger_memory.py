"""Cleared values are freed: no queue, expired claim or removed task keeps them."""

from __future__ import annotations

import gc
import weakref

import pytest

from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest, Ledger, TagFilter


class Cell:
    """Value that a weak reference can observe."""

    __slots__ = ("__weakref__",)


class Store:
    """Ledger of one partition, and the put values that still exist."""

    def __init__(self, group_size, tasks=("a", "b")):
        self.ledger = Ledger(None)
        self.group_size, self.tasks = group_size, tasks
        self.register()
        self.values = []

    def register(self):
        self.ledger.register(
            PartitionDeclaration.checked("p", ["x"], 0, list(self.tasks), self.group_size)
        )

    @property
    def partition(self):
        return self.ledger.partition("p")

    def put(self, step, count):
        size = self.group_size or 1
        ids = [f"{step}_{number // size}_g{number % size}" for number in range(count)]
        cells = [Cell() for _ in ids]
        self.values += map(weakref.ref, cells)
        ticket = self.ledger.begin_put("p", ids, {"x": "object"})
        self.ledger.commit_put(ticket, {"x": cells}, [{"step": step}] * count)
        return ids

    def claim(self, count, task="a", **terms):
        return self.partition.claim(ClaimRequest(task, ("x",), count, **terms), 0.0)

    @property
    def alive(self):
        return sum(value() is not None for value in self.values)


@pytest.fixture(params=[None, 8], ids=["samples", "groups"])
def store(request):
    gc.collect()
    gc.disable()  # servers avoid collections, so nothing may depend on them
    yield Store(request.param)
    gc.enable()


def test_changing_filter_keeps_no_samples_alive(store):
    steps = []
    for step in range(25):
        steps.append([])
        for part in range(8):
            steps[-1] += store.put(10 * step + part, 64)
            store.claim(32, where=(TagFilter("step", ">=", 10 * step),))
        if len(steps) > 3:
            store.ledger.clear("p", steps.pop(0), force=True)
    assert store.alive == len(store.partition.rows) == 3 * 8 * 64


def test_dismantled_partition_frees_all_cells(store):
    store.put(0, 4096)
    for seed in range(40):  # more queues than a task keeps
        store.claim(8, seed=seed, lease_s=9.0)
    store.claim(64, task="b", lease_s=9.0)
    store.claim(64, task="b", dp_rank=0, dp_world=2, lease_s=9.0)
    partition = store.ledger.detach("p", force=True)
    while store.ledger.dismantle(partition, 64):
        pass
    del partition
    assert store.alive == 0


def test_a_ledger_that_is_closed_leaves_nothing(store):
    store.put(0, 512)
    store.claim(64, lease_s=9.0)
    store.claim(64, dp_rank=0, dp_world=2, lease_s=9.0)
    store.claim(64, task="b")
    store.ledger.close()
    assert store.alive == 0


def test_samples_cleared_after_redeclaration_are_freed(store):
    store.put(0, 2048)
    store.claim(8)
    store.group_size, store.tasks = 4, ("b", "c")
    store.register()
    store.claim(8, task="c")
    store.ledger.clear("p", None, force=True)
    assert store.alive == 0
