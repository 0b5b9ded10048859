"""The ledger against a naive model, and what claims promise beyond the published contract."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from dataplane_core import (
    InvalidRequestError,
    LeaseLostError,
    SamplesLeasedError,
    SchemaMismatchError,
)
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest, Ledger, TagFilter, balance

IDS = [f"p{prompt}_g{place}" for prompt in range(3) for place in range(2)]
FIELDS = ("x", "y")


def books(num_samples=0, group_size=None, capacity=None, discard=lambda cells: None):
    ledger = Ledger(capacity, discard)
    ledger.register(PartitionDeclaration.checked("p", FIELDS, num_samples, ["a", "b"], group_size))
    return ledger


def put(ledger, ids, fields=("x",), tags=None, token=None):
    ticket = ledger.begin_put("p", ids, dict.fromkeys(fields, "torch.int64"), token)
    cells = {name: [(name, sample_id) for sample_id in ids] for name in fields}
    ledger.commit_put(ticket, cells, tags)


def claim(ledger, size, *, task="a", required=("x",), whole=False, now=0.0, **more):
    request = ClaimRequest(task, tuple(required), size, whole=whole, **more)
    claimed = ledger.partition("p").claim(request, now)
    return claimed if claimed is None else [row.sample_id for row in claimed.rows]


class LedgerMachine(RuleBasedStateMachine):
    """Every sample is in one place, and what is handed out was ready and free."""

    leases = Bundle("leases")

    def __init__(self):
        super().__init__()
        self.discarded = []
        self.ledger = books(discard=self.discarded.extend)
        self.now = 0.0
        self.written = {}
        self.put_total = 0
        self.cleared = 0
        self.where = {"a": {}, "b": {}}
        self.pinned = []

    @rule(ids=st.sets(st.sampled_from(IDS)), fields=st.sets(st.sampled_from(FIELDS)))
    def put(self, ids, fields):
        put(self.ledger, sorted(ids), sorted(fields))
        for sample_id in ids:
            if sample_id not in self.written:
                self.written[sample_id] = set()
                self.put_total += 1
                for task in self.where.values():
                    task[sample_id] = "open"
            self.written[sample_id] |= fields

    @rule(ids=st.sets(st.sampled_from(IDS)))
    def give_up_a_put(self, ids):
        self.ledger.abort_put(self.ledger.begin_put("p", sorted(ids), {"z": "torch.bool"}))

    @rule(
        target=leases,
        task=st.sampled_from(["a", "b"]),
        required=st.sets(st.sampled_from(FIELDS)),
        size=st.integers(1, 4),
        lease=st.sampled_from([None, 2.0]),
        seed=st.sampled_from([None, 7]),
    )
    def claim(self, task, required, size, lease, seed):
        request = ClaimRequest(task, tuple(sorted(required)), size, lease_s=lease, seed=seed)
        claimed = self.ledger.partition("p").claim(request, self.now)
        ready = {
            sample_id
            for sample_id, place in self.where[task].items()
            if place == "open" and required <= self.written[sample_id]
        }
        got = [row.sample_id for row in claimed.rows]
        assert set(got) <= ready
        assert len(got) == min(size, len(ready)) == len(set(got))
        for sample_id in got:
            self.where[task][sample_id] = "settled" if lease is None else claimed.token
        return task, claimed.token, self.now + 2.0, got

    @rule(lease=leases, how=st.sampled_from(["acknowledge", "release", "renew"]))
    def settle(self, lease, how):
        task, token, _, got = lease
        alive = token is not None and all(self.where[task].get(i) == token for i in got)
        book = self.ledger.partition("p")

        def act():
            if how == "renew":
                # Renewed for no longer than it had, so that the model need not follow it.
                book.renew(token, got, book.leases[token].deadline - 2.0 if alive else 0.0)
            else:
                book.settle(token, got, acknowledge=how == "acknowledge")

        if alive:
            act()
            if how != "renew":
                place = "settled" if how == "acknowledge" else "open"
                self.where[task].update(dict.fromkeys(got, place))
        else:
            with pytest.raises(LeaseLostError):
                act()

    @rule(step=st.floats(0.0, 3.0))
    def time_passes(self, step):
        self.now += step
        before = dict(self.ledger.partition("p").leases)
        self.ledger.expire(self.now)
        for token, lease in before.items():
            if lease.deadline <= self.now:
                for places in self.where.values():
                    for sample_id, place in places.items():
                        if place == token:
                            places[sample_id] = "open"

    @rule(ids=st.sets(st.sampled_from(IDS)), force=st.booleans())
    def clear(self, ids, force):
        leased = any(
            places.get(sample_id, "open") not in ("open", "settled")
            for places in self.where.values()
            for sample_id in ids
        )
        if leased and not force:
            with pytest.raises(SamplesLeasedError):
                self.ledger.clear("p", sorted(ids), force=False)
            return
        self.ledger.clear("p", sorted(ids), force=force)
        for sample_id in ids & self.written.keys():
            del self.written[sample_id]
            self.cleared += 1
            for places in self.where.values():
                del places[sample_id]

    @rule(ids=st.sets(st.sampled_from(IDS)))
    def start_reading(self, ids):
        rows = [self.ledger.partition("p").rows[i] for i in ids & self.written.keys()]
        self.ledger.pin(rows)
        self.pinned.append(rows)

    @rule()
    def end_reading(self):
        if self.pinned:
            self.ledger.unpin(self.pinned.pop(0))

    @invariant()
    def every_sample_is_counted_in_one_place(self):
        for task, places in self.where.items():
            counts = self.ledger.partition("p").counts(task, ["x"])
            assert counts.put == self.put_total
            assert counts.cleared == self.cleared
            assert counts.acknowledged == sum(place == "settled" for place in places.values())
            assert counts.ready == sum(
                place == "open" and "x" in self.written[sample_id]
                for sample_id, place in places.items()
            )
            assert counts.put == (
                counts.ready
                + counts.not_ready
                + counts.leased
                + counts.acknowledged
                + counts.cleared
            )

    @invariant()
    def what_is_being_read_is_not_discarded(self):
        held = {id(cell) for rows in self.pinned for row in rows for cell in row.cells.values()}
        assert not held & {id(cell) for cell in self.discarded}

    def teardown(self):
        for rows in self.pinned:
            self.ledger.unpin(rows)
        self.ledger.clear("p", None, force=True)
        assert len({id(cell) for cell in self.discarded}) == len(self.discarded)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_group_is_claimed_whole_or_not_at_all():
    ledger = books(num_samples=8, group_size=2)
    put(ledger, ["p0_g0", "p1_g0", "p1_g1", "p2_g0"])
    assert claim(ledger, 4) == ["p1_g0", "p1_g1"]
    put(ledger, ["p0_g1"])
    assert claim(ledger, 4) == ["p0_g0", "p0_g1"]
    assert claim(ledger, 4) == []


def test_a_group_is_named_by_its_tag_before_its_id():
    ledger = books(num_samples=9, group_size=2)
    put(ledger, ["a_g0", "b_g0", "b_g1"], tags=[{"group": "q"}, {"group": "q"}, {"group": "r"}])
    assert claim(ledger, 2) == ["a_g0", "b_g0"]


def test_a_group_that_lost_members_is_claimed_with_the_rest_once_nothing_more_can_come():
    ledger = books(num_samples=4, group_size=2)
    put(ledger, ["p0_g0", "p0_g1", "p1_g0", "p1_g1"])
    ledger.clear("p", ["p1_g1"], force=False)
    assert claim(ledger, 4, whole=True) == ["p0_g0", "p0_g1", "p1_g0"]


def test_a_batch_that_would_break_groups_is_refused():
    with pytest.raises(InvalidRequestError, match=r"batch_size 3 .* grpo_group_size 2"):
        claim(books(group_size=2), 3)


def test_a_filter_passes_only_samples_whose_tags_match():
    ledger = books(num_samples=9)
    put(ledger, ["a", "b", "c", "d"], tags=[{"v": 1}, {"v": 3}, {}, {"v": "text"}])
    newer = (TagFilter("v", ">=", 2),)
    assert claim(ledger, 9, where=newer) == ["b"]
    assert claim(ledger, 9) == ["a", "c", "d"]


def test_a_whole_claim_with_a_filter_ends_when_nothing_that_matches_can_come():
    ledger = books(num_samples=2)
    put(ledger, ["a", "b"], tags=[{"v": 1}, {"v": 2}])
    assert claim(ledger, 5, whole=True, where=(TagFilter("v", "==", 2),)) == ["b"]
    assert claim(ledger, 5, whole=True, where=(TagFilter("v", "==", 2),)) == []


@pytest.mark.parametrize(("op", "value"), [("~", 1), ("in", 3)])
def test_a_filter_that_means_nothing_is_refused(op, value):
    with pytest.raises(InvalidRequestError, match="'v'"):
        TagFilter("v", op, value)


def test_a_seeded_order_depends_on_the_seed_and_the_ids_alone():
    ids = [f"s{i}" for i in range(50)]
    orders = []
    for arrival in (ids, ids[::-1]):
        ledger = books(num_samples=50)
        put(ledger, arrival)
        orders.append([claim(ledger, 10, seed=3) for _ in range(5)])
    assert orders[0] == orders[1]
    other = books(num_samples=50)
    put(other, ids)
    assert claim(other, 50, seed=4) != list(chain(*orders[0]))


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


@given(st.lists(st.integers(0, 10_000), max_size=60), st.integers(1, 8))
def test_balance_gives_each_item_to_one_rank_and_keeps_counts_even(lengths, world):
    shares = balance(lengths, world)
    assert sorted(chain(*shares)) == list(range(len(lengths)))
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def test_a_part_of_a_claim_can_be_acknowledged_and_the_rest_expires():
    ledger = books(num_samples=3)
    put(ledger, ["a", "b", "c"])
    book = ledger.partition("p")
    claimed = book.claim(ClaimRequest("a", ("x",), 3, lease_s=1.0), 0.0)
    book.settle(claimed.token, ["b"], acknowledge=True)
    ledger.expire(1.0)
    assert claim(ledger, 3) == ["a", "c"]


def test_a_later_lease_has_a_larger_number():
    ledger = books(num_samples=1)
    put(ledger, ["a"])
    book = ledger.partition("p")
    request = ClaimRequest("a", ("x",), 1, lease_s=1.0)
    numbers = []
    for now in (0.0, 2.0, 4.0):
        ledger.expire(now)
        numbers.append(int(book.claim(request, now).token.split(".")[0]))
    assert numbers == sorted(set(numbers))


def test_a_put_under_a_lost_lease_is_refused_and_changes_nothing():
    ledger = books(num_samples=1)
    put(ledger, ["a"])
    book = ledger.partition("p")
    claimed = book.claim(ClaimRequest("a", ("x",), 1, lease_s=1.0), 0.0)
    put(ledger, ["a"], ["y"], token=claimed.token)
    ticket = ledger.begin_put("p", ["a"], {"y": "torch.int64"}, claimed.token)
    ledger.expire(1.0)
    with pytest.raises(LeaseLostError):
        ledger.begin_put("p", ["a"], {"y": "torch.int64"}, claimed.token)
    with pytest.raises(LeaseLostError):
        ledger.commit_put(ticket, {"y": ["late"]}, None)
    assert book.rows["a"].cells["y"] == ("y", "a")


def test_two_puts_under_way_cannot_give_a_field_two_kinds():
    ledger = books(num_samples=2)
    first = ledger.begin_put("p", ["a"], {"x": "torch.int64"})
    with pytest.raises(SchemaMismatchError):
        ledger.begin_put("p", ["b"], {"x": "torch.float32"})
    ledger.abort_put(first)
    second = ledger.begin_put("p", ["b"], {"x": "torch.float32"})
    ledger.commit_put(second, {"x": [1]}, None)
    assert ledger.partition("p").kinds == {"x": "torch.float32"}


def test_a_queue_does_not_grow_with_what_was_claimed_before():
    ledger = books(num_samples=0)
    for step in range(200):
        put(ledger, [f"s{step}_{i}" for i in range(10)])
        claim(ledger, 10)
    queue = next(iter(ledger.partition("p").tasks["a"].queues.values()))
    assert len(queue) == 0
    assert len(queue._heap) <= 64
