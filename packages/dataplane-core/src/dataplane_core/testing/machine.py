"""A random walk over the whole contract, compared with a model of a few dicts after each step."""

from __future__ import annotations

import uuid
from typing import Any, ClassVar  # Any: hypothesis' drawn values

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from dataplane_core import DataPlaneClient, MissingDataError
from dataplane_core.testing.storage import StoreFixtures, batch

IDS = [f"s{i}" for i in range(6)]
FIELDS = ["x", "y"]
TASKS = ["logprob", "train"]

some_ids = st.lists(st.sampled_from(IDS), min_size=1, max_size=4, unique=True)
some_fields = st.lists(st.sampled_from(FIELDS), min_size=1, unique=True)


class _Walk(RuleBasedStateMachine):
    clients: ClassVar[tuple[DataPlaneClient, DataPlaneClient]]

    def __init__(self) -> None:
        super().__init__()
        self.partition = f"walk-{uuid.uuid4().hex[:8]}"
        self.clients[0].register_partition(self.partition, FIELDS, 10**6, TASKS)
        self.rows: dict[str, dict[str, list[int]]] = {}
        self.claimed: dict[str, set[str]] = {task: set() for task in TASKS}
        self.serial = 0

    @rule(who=st.integers(0, 1), ids=some_ids, fields=some_fields, data=st.data())
    def put(self, who: int, ids: list[str], fields: list[str], data: Any) -> None:
        written: dict[str, Any] = {}
        for name in fields:
            rows = []
            for sample_id in ids:
                self.serial += 1
                rows.append([self.serial] * data.draw(st.integers(0, 3)))
                self.rows.setdefault(sample_id, {})[name] = rows[-1]
            offsets = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0)])
            values = torch.tensor([value for row in rows for value in row], dtype=torch.int64)
            written[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
        self.clients[who].put_samples(ids, self.partition, batch(len(ids), **written))

    @rule(who=st.integers(0, 1), ids=some_ids, fields=some_fields)
    def get(self, who: int, ids: list[str], fields: list[str]) -> None:
        whole = all(set(fields) <= self.rows.get(sample_id, {}).keys() for sample_id in ids)
        if not whole:
            with pytest.raises(MissingDataError):
                self.clients[who].get_samples(ids, self.partition, fields)
            return
        answer = self.clients[who].get_samples(ids, self.partition, fields)
        for name in fields:
            got = [row.tolist() for row in answer[name].unbind()]
            assert got == [self.rows[sample_id][name] for sample_id in ids]

    @rule(
        who=st.integers(0, 1),
        task=st.sampled_from(TASKS),
        fields=some_fields,
        size=st.integers(1, 4),
    )
    def claim(self, who: int, task: str, fields: list[str], size: int) -> None:
        ready = {
            sample_id
            for sample_id, row in self.rows.items()
            if set(fields) <= row.keys() and sample_id not in self.claimed[task]
        }
        meta = self.clients[who].claim_meta(self.partition, task, fields, size, blocking=False)
        assert meta.size == len(set(meta.sample_ids)) == min(size, len(ready))
        assert set(meta.sample_ids) <= ready
        self.claimed[task] |= set(meta.sample_ids)

    @rule(who=st.integers(0, 1), ids=some_ids)
    def clear(self, who: int, ids: list[str]) -> None:
        self.clients[who].clear_samples(ids, self.partition)
        for sample_id in ids:
            self.rows.pop(sample_id, None)
            for claimed in self.claimed.values():
                claimed.discard(sample_id)

    @rule(who=st.integers(0, 1), tasks=st.lists(st.sampled_from(TASKS), min_size=1, unique=True))
    def check(self, who: int, tasks: list[str]) -> None:
        complete = bool(self.rows) and all(self.claimed[task] >= self.rows.keys() for task in tasks)
        assert self.clients[who].check_consumption_status(self.partition, tasks) == complete

    def teardown(self) -> None:
        self.clients[0].clear_samples(list(self.rows), self.partition)


class StateMachineContract(StoreFixtures):
    """Any sequence of operations from two clients does what the model does."""

    walk_examples = 40
    walk_steps = 30

    def test_any_sequence_of_operations_agrees_with_the_model(
        self, client: DataPlaneClient, peer: DataPlaneClient
    ) -> None:
        walk = type("Walk", (_Walk,), {"clients": (client, peer)})
        run_state_machine_as_test(
            walk,
            settings=settings(
                max_examples=self.walk_examples,
                stateful_step_count=self.walk_steps,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
