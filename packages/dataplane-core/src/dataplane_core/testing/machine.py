"""A random walk over the contract's operations, compared with a model after each step."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any, ClassVar  # Any: hypothesis' drawn values

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dataplane_core import (
    ClaimTimeoutError,
    DataPlaneClient,
    InvalidRequestError,
    KVBatchMeta,
    LeaseLostError,
    MissingDataError,
    SamplesLeasedError,
)
from dataplane_core.capabilities import TaskCounts
from dataplane_core.ledger import ClaimSummary
from dataplane_core.meta import LEASE
from dataplane_core.testing.storage import StoreFixtures, batch

IDS = [f"s{i}" for i in range(6)]
FIELDS = ["x", "y"]
TASKS = ["logprob", "train"]

some_ids = st.lists(st.sampled_from(IDS), min_size=1, max_size=4, unique=True)
some_fields = st.lists(st.sampled_from(FIELDS), min_size=1, unique=True)


@dataclass
class _Held:
    """A claim under a lease; ``ids`` are the samples that it still holds."""

    meta: KVBatchMeta
    task: str
    name: str
    ids: set[str]


class _Walk(RuleBasedStateMachine):
    clients: ClassVar[tuple[DataPlaneClient, DataPlaneClient]]

    def __init__(self) -> None:
        super().__init__()
        self.partition = f"walk-{uuid.uuid4().hex[:8]}"
        self.declared = 0
        self.clients[0].register_partition(self.partition, FIELDS, self.declared, TASKS)
        self.rows: dict[str, dict[str, list[int]]] = {}
        self.claimed: dict[str, set[str]] = {task: set() for task in TASKS}
        self.held: list[_Held] = []
        self.put_total = 0
        self.cleared = 0
        self.serial = 0

    @rule(caller=st.integers(0, 1), declared=st.integers(0, len(IDS)))
    def declare_again(self, caller: int, declared: int) -> None:
        self.clients[caller].register_partition(self.partition, FIELDS, declared, TASKS)
        self.declared, self.put_total, self.cleared = declared, len(self.rows), 0

    @rule(caller=st.integers(0, 1), ids=some_ids, fields=some_fields, data=st.data())
    def put(self, caller: int, ids: list[str], fields: list[str], data: Any) -> None:
        written: dict[str, Any] = {}
        self.put_total += len(set(ids) - self.rows.keys())
        for name in fields:
            rows = []
            for sample_id in ids:
                self.serial += 1
                rows.append([self.serial] * data.draw(st.integers(0, 3)))
                self.rows.setdefault(sample_id, {})[name] = rows[-1]
            offsets = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0)])
            values = torch.tensor([value for row in rows for value in row], dtype=torch.int64)
            written[name] = torch.nested.nested_tensor_from_jagged(values, offsets)
        self.clients[caller].put_samples(ids, self.partition, batch(len(ids), **written))

    @rule(caller=st.integers(0, 1), ids=some_ids, fields=some_fields)
    def get(self, caller: int, ids: list[str], fields: list[str]) -> None:
        if not all(set(fields) <= self.rows.get(sample_id, {}).keys() for sample_id in ids):
            with pytest.raises(MissingDataError):
                self.clients[caller].get_samples(ids, self.partition, fields)
            return
        answer = self.clients[caller].get_samples(ids, self.partition, fields)
        for name in fields:
            got = [row.tolist() for row in answer[name].unbind()]
            assert got == [self.rows[sample_id][name] for sample_id in ids]

    @rule(
        caller=st.integers(0, 1),
        task=st.sampled_from(TASKS),
        fields=st.lists(st.sampled_from(FIELDS), unique=True),
        size=st.integers(1, len(IDS)),
        blocking=st.booleans(),
    )
    def claim(self, caller: int, task: str, fields: list[str], size: int, blocking: bool) -> None:
        ready = {
            sample_id
            for sample_id, row in self.rows.items()
            if set(fields) <= row.keys() and sample_id not in self.claimed[task]
        }
        not_put = max(0, self.declared - self.put_total)
        lacking = len(self.rows.keys() - self.claimed[task] - ready)
        leased = len(self.leased(task))
        complete = len(ready) >= size or not (not_put or lacking or (leased and not ready))
        client = self.clients[caller]
        if blocking and not complete:
            with pytest.raises(ClaimTimeoutError) as caught:
                client.claim_meta(self.partition, task, fields, size, timeout_s=0.0)
            error = caught.value
            assert (error.ready, error.leased, sum(error.holders.values())) == (
                len(ready),
                leased,
                leased,
            )
            assert (error.first_expiry_s is None) == (not leased)
            return
        meta = client.claim_meta(
            self.partition, task, fields, size, blocking=blocking, timeout_s=0.0
        )
        assert meta.size == len(set(meta.sample_ids)) == min(size, len(ready))
        assert set(meta.sample_ids) <= ready
        self.hold(task, meta)

    def hold(self, task: str, meta: KVBatchMeta) -> None:
        """Record the result of a claim."""
        self.claimed[task] |= set(meta.sample_ids)
        if LEASE in meta.extra_info:
            known = {held.name for held in self.held}
            [name] = {claim.claim for claim in self.claims()} - known
            self.held.append(_Held(meta, task, name, set(meta.sample_ids)))

    @precondition(lambda self: self.clients[0].capabilities.named_claims)
    @rule(
        caller=st.integers(0, 1),
        task=st.sampled_from(TASKS),
        ids=some_ids,
        fields=some_fields,
        blocking=st.booleans(),
    )
    def claim_named(
        self, caller: int, task: str, ids: list[str], fields: list[str], blocking: bool
    ) -> None:
        client, leased = self.clients[caller], self.leased(task)
        ready = [
            each
            for each in ids
            if set(fields) <= self.rows.get(each, {}).keys() and each not in self.claimed[task]
        ]

        def claim() -> KVBatchMeta:
            return client.claim_meta(
                self.partition,
                task,
                fields,
                len(ids),
                blocking=blocking,
                timeout_s=0.0,
                sample_ids=ids,
            )

        if not (self.claimed[task] - leased).isdisjoint(ids):
            with pytest.raises(InvalidRequestError, match="acknowledged"):
                claim()
            return
        if blocking and len(ready) < len(ids):
            with pytest.raises(ClaimTimeoutError) as caught:
                claim()
            error = caught.value
            counts = (error.ready, error.missing, error.leased)
            assert counts == (len(ready), len(ids) - len(ready), len(leased & set(ids)))
            return
        meta = claim()
        assert meta.sample_ids == ready
        self.hold(task, meta)

    @rule(caller=st.integers(0, 1), task=st.sampled_from(TASKS))
    def claim_until_empty(self, caller: int, task: str) -> None:
        """Claim everything ready, so that a blocking claim waits for leases or ends."""
        self.claim(caller, task, [], len(IDS), blocking=False)
        self.claim(caller, task, [], 1, blocking=True)
        self.check(caller, [task])

    def claims(self) -> list[ClaimSummary]:
        return self.clients[0].inspector.list_claims(self.partition)

    def leased(self, task: str) -> set[str]:
        return {each for held in self.held if held.task == task for each in held.ids}

    def release(self, held: _Held, ids: set[str]) -> None:
        self.claimed[held.task] -= ids
        self.end(held, ids)

    def end(self, held: _Held, ids: set[str]) -> None:
        held.ids -= ids
        if not held.ids:
            self.held.remove(held)

    @precondition(lambda self: self.held)
    @rule(caller=st.integers(0, 1), acknowledge=st.booleans(), part=st.booleans(), data=st.data())
    def end_lease(self, caller: int, acknowledge: bool, part: bool, data: Any) -> None:
        held = data.draw(st.sampled_from(self.held))
        ids = sorted(held.ids)[:1] if part else sorted(held.ids)
        meta = held.meta.subset([held.meta.sample_ids.index(each) for each in ids])
        if acknowledge:
            self.clients[caller].acknowledge(meta)
            self.end(held, set(ids))
        else:
            self.clients[caller].release(meta)
            self.release(held, set(ids))

    @precondition(lambda self: self.held)
    @rule(caller=st.integers(0, 1), data=st.data())
    def end_claim(self, caller: int, data: Any) -> None:
        held = data.draw(st.sampled_from(self.held))
        client = self.clients[caller]
        with pytest.raises(SamplesLeasedError):
            client.inspector.end_claim(self.partition, held.name)
        ended = client.inspector.end_claim(self.partition, held.name, expired_only=False)
        assert ended == len(held.ids)
        self.release(held, set(held.ids))
        with pytest.raises(LeaseLostError):
            client.acknowledge(held.meta)

    @precondition(lambda self: self.clients[0].capabilities.inspection)
    @rule(caller=st.integers(0, 1), task=st.sampled_from(TASKS), ids=some_ids)
    def reset(self, caller: int, task: str, ids: list[str]) -> None:
        client = self.clients[caller]
        if not self.leased(task).isdisjoint(ids):
            with pytest.raises(SamplesLeasedError):
                client.inspector.reset_consumption(self.partition, task, ids)
            return
        acknowledged = self.claimed[task] & set(ids)
        assert client.inspector.reset_consumption(self.partition, task, ids + ids[:1]) == len(
            acknowledged
        )
        self.claimed[task] -= acknowledged

    @rule(caller=st.integers(0, 1), ids=some_ids)
    def clear(self, caller: int, ids: list[str]) -> None:
        if any(not self.leased(task).isdisjoint(ids) for task in TASKS):
            with pytest.raises(SamplesLeasedError):
                self.clients[caller].clear_samples(ids, self.partition)
            return
        self.clients[caller].clear_samples(ids, self.partition)
        self.cleared += len(self.rows.keys() & set(ids))
        self.drop(ids)

    @precondition(lambda self: self.clients[0].capabilities.withdrawal)
    @rule(caller=st.integers(0, 1), ids=some_ids)
    def withdraw(self, caller: int, ids: list[str]) -> None:
        self.clients[caller].withdraw_samples(ids, self.partition)
        self.put_total -= len(self.rows.keys() & set(ids))
        for held in list(self.held):
            self.end(held, held.ids & set(ids))
        self.drop(ids)

    def drop(self, ids: list[str]) -> None:
        for sample_id in ids:
            self.rows.pop(sample_id, None)
            for claimed in self.claimed.values():
                claimed.discard(sample_id)

    @rule(caller=st.integers(0, 1), tasks=st.lists(st.sampled_from(TASKS), min_size=1, unique=True))
    def check(self, caller: int, tasks: list[str]) -> None:
        complete = bool(self.rows) and all(
            self.claimed[task] - self.leased(task) >= self.rows.keys() for task in tasks
        )
        assert self.clients[caller].check_consumption_status(self.partition, tasks) == complete

    @precondition(lambda self: self.clients[0].capabilities.conservation)
    @rule(caller=st.integers(0, 1), task=st.sampled_from(TASKS), fields=some_fields)
    def count(self, caller: int, task: str, fields: list[str]) -> None:
        open_rows = [row for each, row in self.rows.items() if each not in self.claimed[task]]
        ready = sum(set(fields) <= row.keys() for row in open_rows)
        leased = len(self.leased(task))
        assert self.clients[caller].inspector.count_samples(
            self.partition, task, fields
        ) == TaskCounts(
            put=self.put_total,
            ready=ready,
            not_ready=len(open_rows) - ready,
            leased=leased,
            acknowledged=len(self.claimed[task]) - leased,
            cleared=self.cleared,
        )

    @precondition(lambda self: self.clients[0].capabilities.inspection)
    @rule(caller=st.integers(0, 1))
    def inspect(self, caller: int) -> None:
        claims = self.clients[caller].inspector.list_claims(self.partition)
        expected = {held.name: (held.task, len(held.ids)) for held in self.held}
        assert {each.claim: (each.task, each.samples) for each in claims} == expected
        page = self.clients[caller].inspector.scan_states(self.partition)
        assert page.total == len(self.rows)
        for index, task in enumerate(page.tasks):
            column = page.states[index :: len(page.tasks)]
            leased = len(self.leased(task))
            assert column.count(2) == leased
            assert column.count(3) == len(self.claimed[task]) - leased

    def teardown(self) -> None:
        force = {"force": True} if self.held else {}
        self.clients[0].clear_samples(list(self.rows), self.partition, **force)


class StateMachineContract(StoreFixtures):
    """Contract: any sequence of operations from two clients agrees with the model."""

    walk_examples = 40
    walk_steps = 30

    def test_any_sequence_of_operations_agrees_with_the_model(
        self, client: DataPlaneClient, peer: DataPlaneClient
    ) -> None:
        self.walk(client, peer)

    def walk(self, client: DataPlaneClient, peer: DataPlaneClient) -> None:
        """Compare two clients of one store with the model."""
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
