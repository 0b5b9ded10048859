"""Assignments of data-parallel ranks: retained for an active rank, opened if the rank is dead."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ledger_parts import FIELDS, claim, claimed, declared, new_ledger, put

from dataplane_core import (
    ClaimTimeoutError,
    InMemoryDataPlaneClient,
    LeaseLostError,
)
from dataplane_core.ledger import TagFilter
from dataplane_core.ledger.actions import reset_consumption
from dataplane_core.ledger.inspect import state_of
from dataplane_core.testing.claims import put as put_ones

IN_MEMORY = {"enabled": True, "impl": "in_memory"}
IDS = [f"p{prompt}_g{number}" for prompt in range(6) for number in range(2)]


def assigned_ids(ledger):
    """Return the ids of assigned samples."""
    return in_state(ledger.partition("p"), "assigned")


def in_state(partition, *states):
    """Return the samples in these states for task a, ordered by id."""
    states_of_rows = (state_of(partition, row, 0.0) for row in partition.rows.values())
    return sorted(each.sample_id for each in states_of_rows if each.tasks["a"] in states)


def test_ranks_get_disjoint_parts_of_even_size_and_length():
    ledger = new_ledger(num_samples=40)
    lengths = {f"s{i}": 10 + i * i for i in range(40)}
    put(ledger, list(lengths), tags=[{"input_lengths": n} for n in lengths.values()])
    parts = [claim(ledger, 10, dp_rank=rank, dp_world=4) for rank in (2, 0, 3, 1)]
    assert sorted(chain(*parts)) == sorted(lengths)
    loads = [sum(lengths[i] for i in part) for part in parts]
    assert [len(part) for part in parts] == [10] * 4
    assert max(loads) - min(loads) < max(lengths.values())


@given(
    world=st.integers(1, 4),
    lengths=st.lists(st.integers(0, 50), min_size=24, max_size=24),
    data=st.data(),
)
def test_parts_do_not_depend_on_which_rank_claims_first(world, lengths, data):
    rounds = 24 // (world * 2)
    asking = data.draw(st.permutations([rank for rank in range(world) for _ in range(rounds)]))
    parts = []
    for order in (sorted(asking), asking):
        ledger = new_ledger(num_samples=24)
        put(ledger, [f"s{i}" for i in range(24)], tags=[{"input_lengths": n} for n in lengths])
        got = [[] for _ in range(world)]
        for rank in order:
            got[rank].append(claim(ledger, 2, dp_rank=rank, dp_world=world))
        parts.append(got)
    assert parts[0] == parts[1]


def test_assignment_ignores_the_order_of_fields_and_conditions():
    ledger = new_ledger(num_samples=4)
    put(ledger, list("abcd"), FIELDS, [{"v": 1, "w": 1}] * 4)
    conditions = [TagFilter("v", "in", {1, 2}), TagFilter("w", ">", 0)]
    first = claim(ledger, 2, required=["x", "y"], where=tuple(conditions), dp_rank=0, dp_world=2)
    late = claim(ledger, 2, required=["y", "x"], where=(*conditions[::-1],), dp_rank=1, dp_world=2)
    assert sorted(first + late) == list("abcd")


@pytest.mark.parametrize("sign", ["claim", "renew"])
def test_assignment_is_kept_while_its_rank_is_active(sign):
    ledger = new_ledger(num_samples=12)
    put(ledger, [f"s{i}" for i in range(12)])
    leased = {"dp_world": 2, "lease_s": 10.0}
    for _ in range(3):
        claim(ledger, 2, dp_rank=0, now=0.0, **leased)
    held = claimed(ledger, 2, dp_rank=1, now=1.0, **leased)
    if sign == "renew":
        ledger.partition("p").renew(held.token, [row.sample_id for row in held.rows], 9.0)
        end = 19.0
    else:
        claim(ledger, 2, dp_rank=1, now=9.5, **leased)
        end = 19.5
    expected = assigned_ids(ledger)
    assert len(expected) in (2, 4)
    ledger.expire(end - 0.1)
    assert assigned_ids(ledger) == expected
    ledger.expire(end)
    assert assigned_ids(ledger) == []


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"dp_rank": 0, "dp_world": 1},
        {"dp_rank": 1, "dp_world": 2, "seed": 3},
        {"dp_rank": 0, "dp_world": 2, "where": (TagFilter("v", "==", 1),)},
    ],
    ids=["no rank", "another world", "another seed", "a filter"],
)
@pytest.mark.parametrize("blocking", [True, False])
def test_untimed_assignment_opens_if_nothing_else_is_ready(terms, blocking):
    ledger = new_ledger(num_samples=4)
    put(ledger, list("abcd"), tags=[{"v": 1}] * 4)
    first = claim(ledger, 2, dp_rank=0, dp_world=2)
    assert claim(ledger, 2, dp_rank=0, dp_world=2, blocking=blocking) == []
    rest = claim(ledger, 2, blocking=blocking, **terms)
    while more := claim(ledger, 2, blocking=blocking):
        rest += more
    assert sorted(first + rest) == list("abcd")
    assert claim(ledger, 2, dp_rank=1, dp_world=2) == []


def test_untimed_assignment_is_kept_while_others_are_ready():
    ledger = new_ledger(num_samples=6)
    put(ledger, list("abcdef"))
    first = claim(ledger, 2, dp_rank=0, dp_world=2)
    expected = assigned_ids(ledger)
    assert claim(ledger, 2) == ["e", "f"]
    assert sorted(claim(ledger, 2, dp_rank=1, dp_world=2)) == expected
    assert not set(first) & set(expected)


@pytest.mark.parametrize("lease_s", [None, 9.0], ids=["final", "leased"])
def test_rank_claims_its_assignment_in_batches(lease_s):
    ledger = new_ledger(num_samples=16, group_size=2)
    put(ledger, [f"p{i}_g{j}" for i in range(8) for j in range(2)])
    rank_1 = {"dp_rank": 1, "dp_world": 2, "lease_s": lease_s}
    claim(ledger, 8, dp_rank=0, dp_world=2, lease_s=lease_s)
    expected = assigned_ids(ledger)
    got = [claim(ledger, size, **rank_1) for size in (2, 4, 4)]
    assert [len(batch) for batch in got] == [2, 4, 2]
    assert all(len({i.split("_")[0] for i in batch}) == len(batch) // 2 for batch in got)
    assert sorted(chain(*got)) == expected


def test_drawn_part_is_limited_with_incomplete_groups():
    ledger = new_ledger(num_samples=4, group_size=2)
    # The split by length puts the complete group and an incomplete one in the same part.
    lengths = {"p0_g0": 1, "p0_g1": 1, "p1_g0": 100, "p2_g0": 100}
    put(ledger, list(lengths), tags=[{"input_lengths": n} for n in lengths.values()])
    got = [claim(ledger, 2, dp_rank=rank, dp_world=2) for rank in (0, 1, 0, 1)]
    assert [len(batch) for batch in got] == [2, 1, 1, 0]
    assert sorted(chain(*got)) == sorted(lengths)


def test_group_larger_than_a_ranks_batch_is_left_to_others():
    ledger = new_ledger(num_samples=9, group_size=2)
    large = [[f"p{i}_g{j}" for j in range(3)] for i in range(2)]
    put(ledger, [*large[0], *large[1], "p2_g0", "p2_g1"])
    parts = [claim(ledger, 2, dp_rank=rank, dp_world=2) for rank in (0, 1, 0)]
    assert parts == [["p2_g0", "p2_g1"], [], []]
    assert claim(ledger, 2, dp_rank=0, dp_world=2, blocking=True) is None
    assert [claim(ledger, 4), claim(ledger, 4)] == large


def test_assignment_of_too_large_groups_opens_to_all():
    ledger = new_ledger(num_samples=9, group_size=2)
    put(ledger, [f"p{i}_g{j}" for i in range(2) for j in range(3)])
    claim(ledger, 4, dp_rank=0, dp_world=2, lease_s=9.0)
    expected = assigned_ids(ledger)
    assert len(expected) == 3
    assert claim(ledger, 2, dp_rank=1, dp_world=2, lease_s=9.0) == []
    assert sorted(claim(ledger, 4)) == expected


def test_reset_opens_assigned_samples():
    ledger = new_ledger(num_samples=4)
    put(ledger, list("abcd"))
    first = claim(ledger, 2, dp_rank=0, dp_world=2)
    assigned = assigned_ids(ledger)
    assert reset_consumption(ledger.partition("p"), "a", assigned) == assigned
    assert claim(ledger, 4) == assigned
    assert sorted(first + assigned) == list("abcd")


def test_timed_out_claim_reports_assigned_samples():
    with InMemoryDataPlaneClient() as client:
        client.register_partition("p", ["x"], 5, ["a"])
        put_ones(client, "p", list("abcd"))
        client.claim_meta("p", "a", ["x"], 2, dp_rank=0, dp_world=2)
        counts = client.inspector.count_samples("p", "a", ["x"])
        assert (counts.ready, counts.leased, counts.acknowledged) == (0, 2, 2)
        assert not client.check_consumption_status("p", ["a"])
        with pytest.raises(ClaimTimeoutError, match="2 are assigned to data-parallel ranks"):
            client.claim_meta("p", "a", ["x"], 2, dp_rank=0, dp_world=2, timeout_s=0.01)


def test_timed_out_claim_by_id_reports_its_assigned_samples_only():
    with InMemoryDataPlaneClient({**IN_MEMORY, "claim_lease_s": 1000.0}) as client:
        client.register_partition("p", ["x"], 5, ["a"])
        put_ones(client, "p", list("abcd"))
        held = client.claim_meta("p", "a", ["x"], 2, dp_rank=0, dp_world=2)
        [assigned, _] = sorted(set("abcd").difference(held.sample_ids))
        for ids, message, expires in (
            (["absent"], "1 of the named samples are not in the partition$", False),
            ([assigned], "1 are assigned to data-parallel ranks; the first assignment", True),
        ):
            with pytest.raises(ClaimTimeoutError, match=message) as raised:
                client.claim_meta("p", "a", ["x"], 1, timeout_s=0.01, sample_ids=ids)
            assert (raised.value.first_expiry_s is not None) is expires


TERMS = [{}] + [
    {"dp_rank": rank, "dp_world": world, "seed": seed}
    for world in (2, 3)
    for rank in range(world)
    for seed in (None, 5)
]


class AssignmentMachine(RuleBasedStateMachine):
    """Ranks claim in any way: no sample is lost or delivered twice."""

    group_size = None

    def __init__(self):
        super().__init__()
        self.ledger = new_ledger(len(IDS), self.group_size)
        self.now = 0.0
        self.acknowledged = Counter()
        self.held = []

    @property
    def partition(self):
        return self.ledger.partition("p")

    @rule(
        ids=st.sets(st.sampled_from(IDS), min_size=1),
        value=st.integers(0, 1),
        fields=st.sampled_from([("x", "y"), ("x",), ("y",), ()]),
    )
    def put(self, ids, value, fields):
        put(self.ledger, sorted(ids), fields, [{"v": value, "input_lengths": 3}] * len(ids))

    @rule(
        terms=st.sampled_from(TERMS),
        size=st.sampled_from([2, 4]),
        required=st.sampled_from([("x", "y"), ("y", "x"), ("x",)]),
        lease=st.sampled_from([None, 2.0, 5.0]),
        value=st.sampled_from([None, 0, 1]),
        blocking=st.booleans(),
    )
    def claim(self, terms, size, required, lease, value, blocking):
        where = () if value is None else (TagFilter("v", "in", [value]),)
        before = set(in_state(self.partition, "unclaimed", "assigned"))
        result = claimed(
            self.ledger,
            size,
            required=required,
            now=self.now,
            where=where,
            lease_s=lease,
            blocking=blocking,
            **terms,
        )
        if result is None:
            return
        got = [row.sample_id for row in result.rows]
        assert set(got) <= before
        assert len(set(got)) == len(got) <= size
        if result.token is not None:
            self.held.append((result.token, got))
        else:
            self.acknowledged.update(got)

    @precondition(lambda self: self.held)
    @rule(how=st.sampled_from(["acknowledge", "release", "renew"]), data=st.data())
    def call_on_lease(self, how, data):
        token, got = data.draw(st.sampled_from(self.held))
        try:
            if how == "renew":
                self.partition.renew(token, got, self.now)
                return
            getattr(self.partition, how)(token, got)
        except LeaseLostError:
            pass
        else:
            if how == "acknowledge":
                self.acknowledged.update(got)
        self.held.remove((token, got))

    @rule(step=st.floats(0.1, 3.0))
    def time_passes(self, step):
        self.now += step
        self.ledger.expire(self.now)
        expiry = self.partition.next_expiry()
        assert expiry is None or expiry > self.now

    @rule(ids=st.sets(st.sampled_from(IDS), min_size=1))
    def clear(self, ids):
        self.ledger.clear("p", sorted(ids), force=True)
        for sample_id in ids:
            del self.acknowledged[sample_id]

    @rule(ids=st.sets(st.sampled_from(IDS), min_size=1))
    def reset(self, ids):
        if ids.isdisjoint(in_state(self.partition, "leased")):
            reset_consumption(self.partition, "a", sorted(ids))
            for sample_id in ids:
                del self.acknowledged[sample_id]

    @rule()
    def register_again(self):
        self.ledger.register(declared(len(IDS), self.group_size))
        assert not self.partition.tasks["a"].assigned

    @invariant()
    def every_sample_is_in_one_state(self):
        task = self.partition.tasks["a"]
        states = ("unclaimed", "assigned", "leased", "acknowledged")
        assert task.totals == [len(in_state(self.partition, state)) for state in states]
        assert sorted(self.acknowledged.elements()) == in_state(self.partition, "acknowledged")
        assert not self.acknowledged or max(self.acknowledged.values()) == 1

    @invariant()
    def assignments_hold_what_is_assigned(self):
        task = self.partition.tasks["a"]
        assignments = list(task.assignments)
        assert all(each.rows for each in assignments)
        assert all(any(sets) for sets in task.assignments.by_ranks.values())
        assert sorted(chain(*(each.rows for each in assignments))) == assigned_ids(self.ledger)
        timed = {each for each in assignments if each.seconds < 100}
        assert timed == set(task.assignments.timed)

    @invariant()
    def queues_agree_with_a_scan_of_every_sample(self):
        task = self.partition.tasks["a"]
        for (required, where, _), queue in task.queues.items():
            rows = [self.partition.rows[each] for each in in_state(self.partition, "unclaimed")]
            fit = [row for row in rows if all(c.matches(row.tags) for c in where)]
            ready = [row for row in fit if required <= row.cells.keys()]
            if where:
                assert len(queue.terms.awaited) == sum(row not in ready for row in fit)
            if self.group_size is None:
                assert len(queue) == queue.count(1) == len(ready)
            else:
                groups = Counter(row.group for row in ready)
                complete = sum(n for n in groups.values() if n == self.group_size)
                assert queue.count(self.group_size) == complete

    def teardown(self):
        # All claimers die; a new one gets every sample that was not acknowledged.
        self.ledger.expire(self.now + 100.0)
        put(self.ledger, IDS)
        rest = self.partition.rows.keys() - self.acknowledged.keys()
        got = []
        while more := claim(self.ledger, 4, blocking=bool(self.group_size)):
            got += more
        assert sorted(got) == sorted(rest)


class GroupAssignmentMachine(AssignmentMachine):
    group_size = 2


TestAssignments = AssignmentMachine.TestCase
TestAssignments.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAssignmentsOfGroups = GroupAssignmentMachine.TestCase
TestAssignmentsOfGroups.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
