"""Shares of data-parallel ranks: each rank's own while it asks, nobody's loss when it does not."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataplane_core import (
    ClaimTimeoutError,
    InMemoryDataPlaneClient,
    LeaseLostError,
)
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest, Ledger, TagFilter
from dataplane_core.ledger.actions import reset_consumption
from dataplane_core.streaming import StreamingDataLoader, StreamingDataset
from dataplane_core.testing.claims import put as put_ones

IDS = [f"p{prompt}_g{place}" for prompt in range(6) for place in range(2)]


def declared(num_samples, group_size=None):
    return PartitionDeclaration.checked("p", ["x", "y"], num_samples, ["a"], group_size)


def books(num_samples=0, group_size=None):
    ledger = Ledger(None)
    ledger.register(declared(num_samples, group_size))
    return ledger


def put(ledger, ids, tags=None, fields=("x", "y")):
    ticket = ledger.begin_put("p", ids, dict.fromkeys(fields, "torch.int64"))
    ledger.commit_put(ticket, {name: list(ids) for name in fields}, tags)


def claimed(ledger, size, *, required=("x",), now=0.0, **more):
    return ledger.partition("p").claim(ClaimRequest("a", tuple(required), size, **more), now)


def claim(ledger, size, **more):
    found = claimed(ledger, size, **more)
    return None if found is None else [row.sample_id for row in found.rows]


def waiting(ledger):
    """What is drawn for ranks that did not ask yet."""
    return sorted(ledger.partition("p").tasks["a"].assigned)


def test_ranks_get_disjoint_shares_of_even_size_and_about_even_length():
    ledger = books(num_samples=40)
    lengths = {f"s{i}": 10 + i * i for i in range(40)}
    put(ledger, list(lengths), tags=[{"input_lengths": n} for n in lengths.values()])
    shares = [claim(ledger, 10, dp_rank=rank, dp_world=4) for rank in (2, 0, 3, 1)]
    assert sorted(chain(*shares)) == sorted(lengths)
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert [len(share) for share in shares] == [10] * 4
    assert max(loads) - min(loads) < max(lengths.values())


def test_a_rank_that_is_ahead_does_not_take_the_share_of_another():
    ledger = books(num_samples=8)
    put(ledger, [f"s{i}" for i in range(8)])
    first = claim(ledger, 2, dp_rank=0, dp_world=2)
    second = claim(ledger, 2, dp_rank=0, dp_world=2)
    late = claim(ledger, 2, dp_rank=1, dp_world=2) + claim(ledger, 2, dp_rank=1, dp_world=2)
    assert sorted(first + second + late) == [f"s{i}" for i in range(8)]
    assert claim(ledger, 8) == []


def test_a_share_leaves_out_what_was_cleared_while_it_waited():
    ledger = books(num_samples=4)
    put(ledger, ["a", "b", "c", "d"])
    mine = claim(ledger, 2, dp_rank=0, dp_world=2)
    waiting = sorted({"a", "b", "c", "d"} - set(mine))
    ledger.clear("p", waiting[:1], force=False)
    assert claim(ledger, 2, dp_rank=1, dp_world=2) == waiting[1:]


def test_shares_keep_groups_together():
    ledger = books(num_samples=8, group_size=2)
    put(ledger, [f"p{i}_g{j}" for i in range(4) for j in range(2)])
    for rank in range(2):
        share = claim(ledger, 4, dp_rank=rank, dp_world=2)
        assert len({sample_id.split("_")[0] for sample_id in share}) == 2


def test_a_sample_that_waits_for_its_rank_counts_as_the_oldest_unclaimed():
    ledger = books(num_samples=4)
    put(ledger, ["a", "b", "c", "d"])
    mine = claim(ledger, 1, dp_rank=1, dp_world=2)
    waiting = sorted({"a", "b"} - set(mine))
    assert ledger.partition("p").tasks["a"].oldest_unclaimed().sample_id == waiting[0]


@given(
    world=st.integers(1, 4),
    lengths=st.lists(st.integers(0, 50), min_size=24, max_size=24),
    data=st.data(),
)
def test_a_ranks_shares_do_not_depend_on_who_asks_first(world, lengths, data):
    rounds = 24 // (world * 2)
    asking = data.draw(st.permutations([rank for rank in range(world) for _ in range(rounds)]))
    shares = []
    for order in (sorted(asking), asking):
        ledger = books(num_samples=24)
        put(ledger, [f"s{i}" for i in range(24)], [{"input_lengths": n} for n in lengths])
        got = [[] for _ in range(world)]
        for rank in order:
            got[rank].append(claim(ledger, 2, dp_rank=rank, dp_world=world))
        shares.append(got)
    assert shares[0] == shares[1]


def test_a_rank_finds_its_share_in_whatever_order_it_names_fields_and_conditions():
    ledger = books(num_samples=4)
    put(ledger, list("abcd"), [{"v": 1, "w": 1}] * 4)
    conditions = [TagFilter("v", "in", {1, 2}), TagFilter("w", ">", 0)]
    first = claim(ledger, 2, required=["x", "y"], where=tuple(conditions), dp_rank=0, dp_world=2)
    late = claim(ledger, 2, required=["y", "x"], where=(*conditions[::-1],), dp_rank=1, dp_world=2)
    assert sorted(first + late) == list("abcd")


def test_a_leased_share_that_its_rank_does_not_ask_for_is_open_to_all_when_the_lease_ends():
    ledger = books(num_samples=4)
    put(ledger, list("abcd"))
    mine = claim(ledger, 2, dp_rank=0, dp_world=2, lease_s=10.0, now=0.0)
    book = ledger.partition("p")
    assert claim(ledger, 4, lease_s=10.0, now=1.0) == []
    assert book.next_expiry() == 10.0
    assert ledger.expire(10.0) == [book]
    assert len(mine) == 2  # its lease ended as well
    assert sorted(claim(ledger, 4)) == list("abcd")


@pytest.mark.parametrize("sign", ["claim", "renew"])
def test_a_leased_share_waits_while_its_rank_gives_signs_of_life(sign):
    ledger = books(num_samples=12)
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
    expected = waiting(ledger)
    assert len(expected) in (2, 4)
    ledger.expire(end - 0.1)
    assert waiting(ledger) == expected
    ledger.expire(end)
    assert waiting(ledger) == []


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
@pytest.mark.parametrize("whole", [True, False], ids=["blocking", "at once"])
def test_a_share_of_final_claims_goes_to_a_claim_on_other_terms_that_finds_nothing_else(
    terms, whole
):
    ledger = books(num_samples=4)
    put(ledger, list("abcd"), [{"v": 1}] * 4)
    mine = claim(ledger, 2, dp_rank=0, dp_world=2)
    assert claim(ledger, 2, dp_rank=0, dp_world=2, whole=whole) == []
    rest = claim(ledger, 2, whole=whole, **terms)
    while more := claim(ledger, 2, whole=whole):
        rest += more
    assert sorted(mine + rest) == list("abcd")
    assert claim(ledger, 2, dp_rank=1, dp_world=2) == []


def test_a_share_of_final_claims_waits_while_there_is_something_else():
    ledger = books(num_samples=6)
    put(ledger, list("abcdef"))
    mine = claim(ledger, 2, dp_rank=0, dp_world=2)
    expected = waiting(ledger)
    assert claim(ledger, 2) == ["e", "f"]
    assert sorted(claim(ledger, 2, dp_rank=1, dp_world=2)) == expected
    assert not set(mine) & set(expected)


@pytest.mark.parametrize("lease_s", [None, 9.0], ids=["final", "leased"])
def test_a_rank_gets_no_more_of_its_share_than_it_asks_for_and_the_rest_waits_on(lease_s):
    ledger = books(num_samples=16, group_size=2)
    put(ledger, [f"p{i}_g{j}" for i in range(8) for j in range(2)])
    rank_1 = {"dp_rank": 1, "dp_world": 2, "lease_s": lease_s}
    claim(ledger, 8, dp_rank=0, dp_world=2, lease_s=lease_s)
    expected = waiting(ledger)
    got = [claim(ledger, size, **rank_1) for size in (2, 4, 4)]
    assert [len(batch) for batch in got] == [2, 4, 2]
    assert all(len({i.split("_")[0] for i in batch}) == len(batch) // 2 for batch in got)
    assert sorted(chain(*got)) == expected


def test_what_a_rank_draws_is_no_more_than_it_asks_for_also_where_groups_are_incomplete():
    ledger = books(num_samples=4, group_size=2)
    # By length the complete group goes beside one of the others.
    lengths = {"p0_g0": 1, "p0_g1": 1, "p1_g0": 100, "p2_g0": 100}
    put(ledger, list(lengths), [{"input_lengths": n} for n in lengths.values()])
    got = [claim(ledger, 2, dp_rank=rank, dp_world=2) for rank in (0, 1, 0, 1)]
    assert [len(batch) for batch in got] == [2, 1, 1, 0]
    assert sorted(chain(*got)) == sorted(lengths)


def test_a_group_that_is_larger_than_a_ranks_batch_is_left_to_others():
    ledger = books(num_samples=9, group_size=2)
    large = [[f"p{i}_g{j}" for j in range(3)] for i in range(2)]
    put(ledger, [*large[0], *large[1], "p2_g0", "p2_g1"])
    shares = [claim(ledger, 2, dp_rank=rank, dp_world=2) for rank in (0, 1, 0)]
    assert shares == [["p2_g0", "p2_g1"], [], []]
    assert claim(ledger, 2, dp_rank=0, dp_world=2, whole=True) is None
    assert [claim(ledger, 4), claim(ledger, 4)] == large


def test_a_share_of_nothing_but_groups_that_its_rank_has_no_room_for_is_open_to_all():
    ledger = books(num_samples=9, group_size=2)
    put(ledger, [f"p{i}_g{j}" for i in range(2) for j in range(3)])
    claim(ledger, 4, dp_rank=0, dp_world=2, lease_s=9.0)
    expected = waiting(ledger)
    assert len(expected) == 3
    assert claim(ledger, 2, dp_rank=1, dp_world=2, lease_s=9.0) == []
    assert sorted(claim(ledger, 4)) == expected


def test_registering_again_opens_what_waits_for_ranks():
    ledger = books(num_samples=4, group_size=2)
    put(ledger, IDS[:4])
    mine = claim(ledger, 2, dp_rank=0, dp_world=2)
    ledger.register(declared(4))
    assert waiting(ledger) == []
    assert sorted(mine + claim(ledger, 4)) == IDS[:4]


def test_a_reset_opens_what_waits_for_a_rank():
    ledger = books(num_samples=4)
    put(ledger, list("abcd"))
    mine = claim(ledger, 2, dp_rank=0, dp_world=2)
    asked = waiting(ledger)
    assert reset_consumption(ledger.partition("p"), "a", asked) == asked
    assert claim(ledger, 4) == asked
    assert sorted(mine + asked) == list("abcd")


def test_what_waits_for_a_rank_is_counted_as_held_and_named_by_a_claim_that_waits_in_vain():
    with InMemoryDataPlaneClient() as client:
        client.register_partition("p", ["x"], 5, ["a"])
        put_ones(client, "p", list("abcd"))
        client.claim_meta("p", "a", ["x"], 2, dp_rank=0, dp_world=2)
        counts = client.count_samples("p", "a", ["x"])
        assert (counts.ready, counts.leased, counts.acknowledged) == (0, 2, 2)
        assert not client.check_consumption_status("p", ["a"])
        with pytest.raises(ClaimTimeoutError, match="2 wait for the data-parallel ranks"):
            client.claim_meta("p", "a", ["x"], 2, dp_rank=0, dp_world=2, timeout_s=0.01)


def test_nothing_is_kept_of_groups_of_ranks_that_are_over():
    ledger = books()
    for seed in range(50):
        ids = [f"{seed}-{i}" for i in range(4)]
        put(ledger, ids)
        for rank in range(2):
            claim(ledger, 2, dp_rank=rank, dp_world=2, seed=seed)
    assert ledger.partition("p").tasks["a"].shares == {}


def rank_0(timeout_s, **config):
    """Its loader over a, b, c and d, of which it shares every batch with a rank that never asks."""
    config = {"enabled": True, "impl": "in_memory", **config}
    store = InMemoryDataPlaneClient(config)
    store.register_partition("p", ["x"], 4, ["a"])
    put_ones(store, "p", list("abcd"))
    return StreamingDataLoader(
        StreamingDataset(
            lambda: InMemoryDataPlaneClient(config, bootstrap=False),
            "p",
            "a",
            required_fields=["x"],
            batch_size=2,
            dp_rank=0,
            dp_world=2,
            timeout_s=timeout_s,
        )
    )


def test_a_loader_delivers_what_a_dead_ranks_share_held_when_its_lease_ends():
    with rank_0(20.0, claim_lease_s=0.3) as loader:
        got = [sample_id for _, meta in loader for sample_id in meta.sample_ids]
    assert sorted(got) == list("abcd")


def test_a_loader_does_not_end_while_another_ranks_share_of_final_claims_waits():
    with rank_0(0.2) as loader, pytest.raises(ClaimTimeoutError, match="2 samples still wait for"):
        list(loader)


TERMS = [{}] + [
    {"dp_rank": rank, "dp_world": world, "seed": seed}
    for world in (2, 3)
    for rank in range(world)
    for seed in (None, 5)
]


class ShareMachine(RuleBasedStateMachine):
    """Whatever ranks do, nothing is lost and nothing is delivered twice."""

    group_size = None

    def __init__(self):
        super().__init__()
        self.ledger = books(len(IDS), self.group_size)
        self.now = 0.0
        self.settled = Counter()
        self.held = []

    @property
    def book(self):
        return self.ledger.partition("p")

    @rule(
        ids=st.sets(st.sampled_from(IDS), min_size=1),
        value=st.integers(0, 1),
        fields=st.sampled_from([("x", "y"), ("x",), ("y",), ()]),
    )
    def put(self, ids, value, fields):
        put(self.ledger, sorted(ids), [{"v": value, "input_lengths": 3}] * len(ids), fields)

    @rule(
        terms=st.sampled_from(TERMS),
        size=st.sampled_from([2, 4]),
        required=st.sampled_from([("x", "y"), ("y", "x"), ("x",)]),
        lease=st.sampled_from([None, 2.0, 5.0]),
        value=st.sampled_from([None, 0, 1]),
        whole=st.booleans(),
    )
    def claim(self, terms, size, required, lease, value, whole):
        where = () if value is None else (TagFilter("v", "in", [value]),)
        before = set(self.book.tasks["a"].open) | set(self.book.tasks["a"].assigned)
        found = claimed(
            self.ledger,
            size,
            required=required,
            now=self.now,
            where=where,
            lease_s=lease,
            whole=whole,
            **terms,
        )
        if found is None:
            return
        got = [row.sample_id for row in found.rows]
        assert set(got) <= before
        assert len(set(got)) == len(got) <= size
        if found.token is not None:
            self.held.append((found.token, got))
        else:
            self.settled.update(got)

    @precondition(lambda self: self.held)
    @rule(how=st.sampled_from(["acknowledge", "release", "renew"]), data=st.data())
    def settle(self, how, data):
        token, got = data.draw(st.sampled_from(self.held))
        try:
            if how == "renew":
                self.book.renew(token, got, self.now)
                return
            self.book.settle(token, got, acknowledge=how == "acknowledge")
        except LeaseLostError:
            pass
        else:
            if how == "acknowledge":
                self.settled.update(got)
        self.held.remove((token, got))

    @rule(step=st.floats(0.1, 3.0))
    def time_passes(self, step):
        self.now += step
        self.ledger.expire(self.now)
        expiry = self.book.next_expiry()
        assert expiry is None or expiry > self.now

    @rule(ids=st.sets(st.sampled_from(IDS), min_size=1))
    def clear(self, ids):
        self.ledger.clear("p", sorted(ids), force=True)
        for sample_id in ids:
            del self.settled[sample_id]

    @rule(ids=st.sets(st.sampled_from(IDS), min_size=1))
    def reset(self, ids):
        if not ids & self.book.tasks["a"].leased.keys():
            reset_consumption(self.book, "a", sorted(ids))
            for sample_id in ids:
                del self.settled[sample_id]

    @rule()
    def register_again(self):
        self.ledger.register(declared(len(IDS), self.group_size))
        assert not self.book.tasks["a"].assigned

    @invariant()
    def every_sample_is_in_one_place(self):
        task = self.book.tasks["a"]
        places = [*task.open, *task.assigned, *task.leased, *task.settled]
        assert sorted(places) == sorted(self.book.rows)
        assert set(self.settled.elements()) == task.settled.keys()
        assert not self.settled or max(self.settled.values()) == 1

    @invariant()
    def shares_hold_what_is_assigned(self):
        task = self.book.tasks["a"]
        shares = [share for ranks in task.shares.values() for ranked in ranks for share in ranked]
        assert all(share.rows for share in shares)
        assert all(any(ranks) for ranks in task.shares.values())
        assert sorted(chain(*(share.rows for share in shares))) == sorted(task.assigned)
        assert {s for s in shares if s.seconds < 100} == self.book._timed.keys()

    @invariant()
    def queues_agree_with_a_look_at_every_sample(self):
        task = self.book.tasks["a"]
        for (required, where, _), queue in task.queues.items():
            fit = [row for row in task.open.values() if all(c.matches(row.tags) for c in where)]
            ready = [row for row in fit if required <= row.cells.keys()]
            if where:
                assert queue.terms.awaited == {row.sequence for row in fit if row not in ready}
            if self.group_size is None:
                assert len(queue) == queue.count(1) == len(ready)
            else:
                groups = Counter(row.group for row in ready)
                complete = sum(n for n in groups.values() if n == self.group_size)
                assert queue.count(self.group_size) == complete

    def teardown(self):
        # Every claimer dies. One that knows nothing of them gets all that was not settled.
        self.ledger.expire(self.now + 100.0)
        put(self.ledger, IDS)
        rest = self.book.rows.keys() - self.settled.keys()
        got = []
        while more := claim(self.ledger, 4, whole=bool(self.group_size)):
            got += more
        assert sorted(got) == sorted(rest)


class GroupShareMachine(ShareMachine):
    group_size = 2


TestShares = ShareMachine.TestCase
TestShares.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSharesOfGroups = GroupShareMachine.TestCase
TestSharesOfGroups.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
