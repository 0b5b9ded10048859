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
from dataplane_core.ledger.actions import end_claim, reset_consumption
from dataplane_core.ledger.inspect import LARGEST_PAGE, claims, page, summarise
from dataplane_core.ledger.scan import SEARCH_WINDOW, scan, search

IDS = [f"p{prompt}_g{place}" for prompt in range(3) for place in range(2)]
FIELDS = ("x", "y")


def nbytes(cells):
    """Of cells (field, sample, bytes), as the machine writes them."""
    return sum(cell[2] for cell in cells)


def books(num_samples=0, group_size=None, capacity=None, discard=lambda cells: None, measure=None):
    ledger = Ledger(capacity, discard, measure=measure)
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
        self.ledger = books(discard=self.discarded.extend, measure=nbytes)
        self.now = 0.0
        self.written = {}
        self.put_total = 0
        self.cleared = 0
        self.where = {"a": {}, "b": {}}
        self.pinned = []

    @rule(
        ids=st.sets(st.sampled_from(IDS)),
        fields=st.sets(st.sampled_from(FIELDS)),
        size=st.integers(0, 9),
    )
    def put(self, ids, fields, size):
        names = sorted(ids)
        cells = {
            field: [(field, name, size + place) for place, name in enumerate(names)]
            for field in fields
        }
        ticket = self.ledger.begin_put("p", names, dict.fromkeys(fields, "torch.int64"))
        sizes = {field: nbytes(column) for field, column in cells.items()}
        self.ledger.commit_put(ticket, cells, None, nbytes=sizes)
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

    @rule(task=st.sampled_from(["a", "b"]), ids=st.sets(st.sampled_from(IDS)))
    def reset(self, task, ids):
        book, places = self.ledger.partition("p"), self.where[task]
        if any(places.get(each, "open") not in ("open", "settled") for each in ids):
            with pytest.raises(SamplesLeasedError):
                reset_consumption(book, task, sorted(ids))
            return
        consumed = [each for each in sorted(ids) if places.get(each) == "settled"]
        assert reset_consumption(book, task, sorted(ids)) == consumed
        places.update(dict.fromkeys(consumed, "open"))

    @rule(lease=leases, expired_only=st.booleans())
    def end_a_claim(self, lease, expired_only):
        task, token, _, _ = lease
        book = self.ledger.partition("p")
        if token not in book.leases:
            return
        name, held = book.leases[token].name, set(book.leases[token].rows)
        if expired_only and book.leases[token].deadline > self.now:
            with pytest.raises(SamplesLeasedError):
                end_claim(book, name, self.now, expired_only=True)
            return
        assert end_claim(book, name, self.now, expired_only=expired_only) == len(held)
        assert end_claim(book, name, self.now, expired_only=False) == 0
        self.where[task].update(dict.fromkeys(held, "open"))

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
    def bytes_by_field_are_those_of_the_cells(self):
        book = self.ledger.partition("p")
        for field in FIELDS:
            cells = [row.cells[field] for row in book.rows.values() if field in row.cells]
            assert book.sizes.of(field, len(cells)) == nbytes(cells)
            assert book.field_counts.get(field, 0) == len(cells)

    @invariant()
    def the_oldest_unclaimed_sample_is_the_one_put_first(self):
        book = self.ledger.partition("p")
        for name, places in self.where.items():
            oldest = next((each for each in book.rows if places[each] == "open"), None)
            found = book.tasks[name].oldest_unclaimed()
            assert (found and found.sample_id) == oldest

    @invariant()
    def a_scan_tells_the_same_as_the_places(self):
        book = self.ledger.partition("p")
        found = scan(book, 0, 10)
        code = {"open": 0, "settled": 3}
        expected = [code.get(self.where[task][each], 2) for each in book.rows for task in "ab"]
        assert (found.tasks, list(found.states)) == (("a", "b"), expected)
        written = [field in self.written[each] for each in book.rows for field in found.fields]
        assert list(found.written) == written

    @invariant()
    def claims_hold_what_is_leased(self):
        book = self.ledger.partition("p")
        held = {"a": 0, "b": 0}
        for claim in claims(book, self.now):
            held[claim.task] += claim.samples
        for task, places in self.where.items():
            assert held[task] == sum(place not in ("open", "settled") for place in places.values())

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
TestLedgerMachine.settings = settings(max_examples=150, stateful_step_count=40)


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


def test_a_sample_that_waits_for_its_rank_counts_as_the_oldest_unclaimed():
    ledger = books(num_samples=4)
    put(ledger, ["a", "b", "c", "d"])
    mine = claim(ledger, 1, dp_rank=1, dp_world=2)
    waiting = sorted({"a", "b"} - set(mine))
    assert ledger.partition("p").tasks["a"].oldest_unclaimed().sample_id == waiting[0]


def test_a_lease_that_has_run_out_is_ended_without_force():
    ledger = books(num_samples=2)
    put(ledger, ["a", "b"])
    book = ledger.partition("p")
    claimed = book.claim(ClaimRequest("a", ("x",), 2, lease_s=1.0, owner="host:1"), 5.0)
    [shown] = claims(book, 5.5)
    assert (shown.owner, shown.samples, shown.age_s, shown.expires_in_s) == ("host:1", 2, 0.5, 0.5)
    with pytest.raises(SamplesLeasedError, match="2 samples are leased by 'host:1'"):
        end_claim(book, shown.claim, 5.5, expired_only=True)
    assert end_claim(book, shown.claim, 6.0, expired_only=True) == 2
    with pytest.raises(LeaseLostError):
        book.settle(claimed.token, ["a", "b"], acknowledge=True)
    assert claim(ledger, 2) == ["a", "b"]


def test_a_group_of_which_a_part_was_reset_waits_as_an_incomplete_one():
    ledger = books(num_samples=8, group_size=2)
    put(ledger, ["p0_g0", "p0_g1"])
    claim(ledger, 2)
    book = ledger.partition("p")
    assert reset_consumption(book, "a", ["p0_g0"]) == ["p0_g0"]
    assert claim(ledger, 2) == []
    assert reset_consumption(book, "a", ["p0_g1"]) == ["p0_g1"]
    assert claim(ledger, 2) == ["p0_g0", "p0_g1"]


def test_what_is_kept_of_samples_that_came_back_does_not_grow():
    ledger = books(num_samples=0)
    put(ledger, [f"s{i}" for i in range(10)])
    book = ledger.partition("p")
    for _ in range(200):
        reset_consumption(book, "a", claim(ledger, 10))
    assert len(book.tasks["a"]._returned) <= 2 * 10 + 64


def test_a_partition_that_is_registered_again_does_not_repeat_a_revision():
    ledger = books(num_samples=1)
    put(ledger, ["a"])
    before = summarise(ledger.partition("p"), 0.0).revision
    ledger.clear("p", None, force=False)
    ledger.register(PartitionDeclaration.checked("p", FIELDS, 1, ["a"]))
    assert summarise(ledger.partition("p"), 0.0).revision > before


def test_a_store_that_cannot_tell_bytes_says_so():
    ledger = books(num_samples=1)
    put(ledger, ["a"])
    shown = summarise(ledger.partition("p"), 0.0)
    assert (shown.nbytes, [field.nbytes for field in shown.fields]) == (None, [None, None])


def test_a_field_of_which_a_put_told_no_bytes_leaves_those_of_others_known():
    ledger = books(num_samples=1, measure=nbytes)
    ticket = ledger.begin_put("p", ["a"], {"x": "torch.int64", "y": "object"})
    ledger.commit_put(ticket, {"x": [("x", "a", 7)], "y": ["text"]}, None, nbytes={"x": 7})
    shown = summarise(ledger.partition("p"), 0.0)
    assert (shown.nbytes, [field.nbytes for field in shown.fields]) == (7, [7, None])


def test_a_search_goes_on_where_its_last_step_ended():
    ledger = books(num_samples=0)
    count = 2 * SEARCH_WINDOW + 10
    for start in range(0, count, 10_000):
        ids = [f"s{i}" for i in range(start, min(start + 10_000, count))]
        put(ledger, ids, (), [{"last": i == f"s{count - 1}"} for i in ids])
    book = ledger.partition("p")
    steps, start = [], 0
    while start is not None:
        found, start = search(book, "last", True, start, 5, 0.0)
        steps.append([state.sample_id for state in found])
    assert steps == [[], [], [f"s{count - 1}"]]


def test_a_page_that_is_too_large_is_refused():
    ledger = books()
    for look in (scan, lambda book, start, limit: page(book, start, limit, 0.0)):
        with pytest.raises(InvalidRequestError, match=f"at most {LARGEST_PAGE}"):
            look(ledger.partition("p"), 0, LARGEST_PAGE + 1)
