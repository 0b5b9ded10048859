"""What claims, leases and puts under way promise beyond the published contract."""

from __future__ import annotations

from itertools import chain

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane_core import (
    InvalidRequestError,
    LeaseLostError,
    PartitionNotFoundError,
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


def test_a_filter_follows_tags_that_change_and_fields_that_come():
    ledger = books(num_samples=9)
    newer = (TagFilter("v", ">=", 2),)
    put(ledger, ["a", "b", "c"], (), [{"v": 1}, {"v": 2}, {"v": 2}])
    assert claim(ledger, 9, where=newer) == []
    put(ledger, ["a", "b", "c"])
    put(ledger, ["a", "b"], (), [{"v": 3}, {"v": 0}])
    assert claim(ledger, 9, where=newer) == ["a", "c"]
    put(ledger, ["b"], (), [{"v": 2}])
    assert claim(ledger, 9, where=newer) == ["b"]


def test_a_group_of_which_one_does_not_match_is_not_taken():
    ledger = books(num_samples=4, group_size=2)
    newer = (TagFilter("v", ">=", 2),)
    put(ledger, IDS[:4], tags=[{"v": 2}, {"v": 1}, {"v": 2}, {"v": 2}])
    assert claim(ledger, 4, where=newer, whole=True) == IDS[2:4]
    assert claim(ledger, 4, where=newer, whole=True) == []
    put(ledger, [IDS[1]], (), [{"v": 2}])
    assert claim(ledger, 4, where=newer, whole=True) == IDS[:2]


def test_a_filter_looks_at_a_sample_when_it_is_put_and_not_at_every_claim(monkeypatch):
    ledger = books(num_samples=1000)
    put(ledger, [f"s{i}" for i in range(100)], tags=[{"v": i % 10} for i in range(100)])
    newer = (TagFilter("v", ">=", 9),)
    claim(ledger, 1, where=newer)
    looked = []
    matches = TagFilter.matches
    monkeypatch.setattr(
        TagFilter, "matches", lambda self, tags: looked.append(tags) or matches(self, tags)
    )
    for _ in range(5):
        assert claim(ledger, 20, where=newer, whole=True) is None
    assert looked == []


def test_a_filter_in_a_list_can_split_what_is_drawn_over_ranks():
    ledger = books(num_samples=4)
    put(ledger, list("abcd"), tags=[{"v": i} for i in range(4)])
    shares = []
    for rank in range(2):
        asked = msgspec.msgpack.encode(TagFilter("v", "in", [0, 1, 3]))
        where = (msgspec.msgpack.decode(asked, type=TagFilter),)
        shares.append(claim(ledger, 2, where=where, dp_rank=rank, dp_world=2))
    assert sorted(chain(*shares)) == ["a", "b", "d"]


@pytest.mark.parametrize(
    ("op", "value"), [("~", 1), ("in", 3), ("==", [1]), ("in", [[1]]), (">", object())]
)
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


def test_lease_numbers_grow_also_when_a_partition_is_registered_again():
    ledger = books(num_samples=1)
    numbers = []
    for _ in range(3):
        put(ledger, ["a"])
        claimed = ledger.partition("p").claim(ClaimRequest("a", ("x",), 1, lease_s=1.0), 0.0)
        numbers.append(int(claimed.token.split(".")[0]))
        ledger.clear("p", None, force=True)
        ledger.register(PartitionDeclaration.checked("p", FIELDS, 1, ["a"]))
    assert numbers == sorted(set(numbers))


def test_a_put_under_a_claim_cannot_write_what_another_claim_of_the_task_holds():
    ledger = books(num_samples=2)
    put(ledger, ["a", "b"])
    book = ledger.partition("p")
    request = ClaimRequest("a", ("x",), 2, lease_s=9.0)
    first = book.claim(request, 0.0)
    other_task = book.claim(ClaimRequest("b", ("x",), 2, lease_s=9.0), 0.0)
    under_way = ledger.begin_put("p", ["a", "b"], {"y": "torch.int64"}, first.token)
    book.settle(first.token, ["b"], acknowledge=False)
    assert [row.sample_id for row in book.claim(request, 0.0).rows] == ["b"]
    with pytest.raises(LeaseLostError, match=r"1 of the samples .* task 'a': 'b'"):
        ledger.begin_put("p", ["a", "b"], {"y": "torch.int64"}, first.token)
    with pytest.raises(LeaseLostError, match="'b'"):
        ledger.commit_put(under_way, {"y": ["late", "late"]}, None)
    assert "y" not in book.rows["b"].cells
    put(ledger, ["a", "new"], ["y"], token=first.token)
    put(ledger, ["a", "b"], ["y"], token=other_task.token)


def test_a_put_under_a_claim_cannot_write_what_the_claim_gave_up():
    ledger = books(num_samples=4)
    put(ledger, list("abcd"))
    book = ledger.partition("p")
    held = book.claim(ClaimRequest("a", ("x",), 3, lease_s=9.0), 0.0)
    book.settle(held.token, ["a"], acknowledge=False)
    ledger.clear("p", ["b"], force=True)
    put(ledger, ["b"])
    assert claim(ledger, 1) == ["a"]  # for good
    for lost in "ab":
        with pytest.raises(LeaseLostError, match=f"1 of the samples .* task 'a': {lost!r}"):
            put(ledger, ["c", lost], ["y"], token=held.token)
    put(ledger, ["c", "d", "new"], ["y"], token=held.token)


def test_a_put_under_a_claim_cannot_write_what_a_final_claim_of_the_task_took():
    ledger = books(num_samples=2)
    put(ledger, ["a", "b"])
    held = ledger.partition("p").claim(ClaimRequest("a", ("x",), 1, lease_s=9.0), 0.0)
    assert claim(ledger, 1) == ["b"]
    with pytest.raises(LeaseLostError, match="'b'"):
        put(ledger, ["a", "b"], ["y"], token=held.token)


def test_a_put_may_be_made_again_under_its_claim_when_a_part_of_that_is_acknowledged():
    ledger = books(num_samples=2)
    put(ledger, ["a", "b"])
    book = ledger.partition("p")
    held = book.claim(ClaimRequest("a", ("x",), 2, lease_s=9.0), 0.0)
    book.settle(held.token, ["a"], acknowledge=True)
    put(ledger, ["a", "b"], ["y"], token=held.token)
    # Taken back by hand it is the next claim's.
    reset_consumption(book, "a", ["a"])
    with pytest.raises(LeaseLostError, match="'a'"):
        put(ledger, ["a", "b"], ["y"], token=held.token)


def test_a_put_goes_into_the_partition_it_began_in_or_nowhere():
    ledger = books(num_samples=2, capacity=2)
    stale = ledger.begin_put("p", ["a", "b"], {"x": "torch.int64"})
    given_up = ledger.begin_put("p", ["a"], {"x": "torch.int64"})
    ledger.clear("p", None, force=False)
    ledger.register(PartitionDeclaration.checked("p", FIELDS, 2, ["a"]))
    new = ledger.begin_put("p", ["a", "c"], {"x": "torch.float32"})
    ledger.abort_put(given_up)
    with pytest.raises(PartitionNotFoundError, match=r"'p'.*cleared"):
        ledger.commit_put(stale, {"x": [1, 2]}, None)
    assert ledger.begin_put("p", ["d"], {}) is None  # the room is the new put's
    ledger.commit_put(new, {"x": [0.5, 0.5]}, None)
    assert (list(ledger.partition("p").rows), ledger.held) == (["a", "c"], 2)


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


def test_a_queue_of_groups_does_not_grow_with_what_was_claimed_before():
    ledger = books(num_samples=0, group_size=2)
    claim(ledger, 2)
    for step in range(200):
        put(ledger, [f"p{step}_g{i}" for i in range(2)])
        claim(ledger, 2, required=[])
    queues = ledger.partition("p").tasks["a"].queues.values()
    assert max(len(queue._heap) for queue in queues) <= 66


def test_counting_makes_no_queue_and_agrees_with_one():
    ledger = books(num_samples=9)
    put(ledger, ["a", "b", "c"])
    put(ledger, ["b"], ["y"])
    book = ledger.partition("p")
    asked = [["x"], ["y"], ["x", "y"], ["y", "z"], []]
    found = [book.counts("a", fields) for fields in asked]
    assert [(each.ready, each.not_ready) for each in found] == [
        (3, 0),
        (1, 2),
        (1, 2),
        (0, 3),
        (3, 0),
    ]
    assert not book.tasks["a"].queues
    for fields in asked:
        book.claim(ClaimRequest("a", tuple(fields), 9, whole=True), 0.0)
    assert [book.counts("a", fields) for fields in asked] == found


def test_the_queue_that_is_claimed_from_is_kept_when_others_are_made():
    ledger = books(num_samples=9)
    put(ledger, ["a"])
    queues = ledger.partition("p").tasks["a"].queues
    claim(ledger, 2, whole=True)
    hot = next(iter(queues.values()))
    for seed in range(200):
        claim(ledger, 2, whole=True, seed=seed)
        claim(ledger, 2, whole=True)
    assert any(queue is hot for queue in queues.values())
    assert len(queues) < 100


@pytest.mark.parametrize("stale", [0, 120], ids=["nothing waits", "some never match"])
def test_a_filter_that_moves_with_every_step_costs_a_put_no_more_as_steps_go_by(stale, monkeypatch):
    ledger = books()
    put(ledger, [f"stale {i}" for i in range(stale)], tags=[{"v": -9}] * stale)
    looked = []
    matches = TagFilter.matches
    monkeypatch.setattr(
        TagFilter, "matches", lambda self, tags: looked.append(tags) or matches(self, tags)
    )
    costs = []
    for step in range(40):
        ids = [f"s{step}_{i}" for i in range(10)]
        looked.clear()
        put(ledger, ids, tags=[{"v": step}] * 10)
        costs.append(len(looked))
        assert claim(ledger, 10, where=(TagFilter("v", ">=", step - 2),)) == ids
    # The queue of the last step, and what others are told of before they count as idle.
    assert max(costs) <= 20 + stale // 4
    assert len(ledger.partition("p").tasks["a"].queues) <= 3 + stale // 40


def test_a_filter_that_stays_is_looked_at_once_for_each_sample(monkeypatch):
    ledger = books()
    put(ledger, [f"stale {i}" for i in range(500)], tags=[{"v": -9}] * 500)
    filters = [(TagFilter("v", "==", value),) for value in range(3)]
    for where in filters:
        claim(ledger, 10, where=where)
    looked = []
    matches = TagFilter.matches
    monkeypatch.setattr(
        TagFilter, "matches", lambda self, tags: looked.append(tags) or matches(self, tags)
    )
    for step in range(200):
        put(ledger, [f"s{step}_{i}" for i in range(10)], tags=[{"v": 0}] * 10)
        for where in filters:
            claim(ledger, 10, where=where)
    assert len(looked) == 200 * 3 * 10


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
        with pytest.raises(InvalidRequestError, match=rf"expected an int of 0 to {LARGEST_PAGE}"):
            look(ledger.partition("p"), 0, LARGEST_PAGE + 1)


KINDS = ["put", "write", "clear", "claim", "claim y", "release"]
CHANGES = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 299)), max_size=12)


@given(CHANGES, st.sampled_from([None, 2]), st.sampled_from([(), (TagFilter("even", "==", 1),)]))
def test_a_queue_built_in_parts_is_as_one_built_at_once(changes, group_size, where):
    ledger = books(num_samples=1000, group_size=group_size)
    ids = [f"p{i // 2}_g{i % 2}" for i in range(300)]
    put(ledger, ids, fields=("x",), tags=[{"even": (i // 2 + 1) % 2} for i in range(300)])
    put(ledger, ids[::3], fields=("y",))
    partition = ledger.partition("p")
    wanted = ClaimRequest("a", ("x", "y"), 2, where=where)
    leases = []
    ready = partition.prepare(wanted)
    for change, at in changes:
        if change == "put":
            put(ledger, [f"n{at}_g0", f"n{at}_g1"], fields=("x", "y"), tags=[{"even": at % 2}] * 2)
        elif change == "write" and ids[at] in partition.rows:
            put(ledger, [ids[at]], fields=("y",))
        elif change == "clear":
            ledger.clear("p", [ids[at]], force=True)
        elif change.startswith("claim"):
            required = ("y",) if change == "claim y" else ("x",)
            claimed = partition.claim(ClaimRequest("a", required, 2, lease_s=9.0), 0.0)
            leases += [claimed] if claimed.rows else []
        elif leases:
            lease = leases.pop()
            if lease.token in partition.leases:
                held = list(partition.leases[lease.token].rows)
                partition.settle(lease.token, held, acknowledge=False)
        ready = partition.prepare(wanted) or ready
    while not partition.prepare(wanted):
        pass
    in_parts = dict(partition.tasks["a"].queues)
    partition.tasks["a"].queues.clear()
    got = partition.claim(ClaimRequest("a", ("x", "y"), 1000, where=where), 0.0)
    at_once = [row.sample_id for row in got.rows]
    key = frozenset(("x", "y")), frozenset(where), None
    taken = in_parts[key].take(1000, unit=1000, partial=False)
    assert [row.sample_id for row in taken] == at_once


def test_a_claim_that_is_prepared_in_parts_looks_at_few_samples_at_once(monkeypatch):
    ledger = books()
    put(ledger, [f"s{i}" for i in range(1000)], tags=[{"v": 0}] * 1000)
    looked = []
    matches = TagFilter.matches
    monkeypatch.setattr(
        TagFilter, "matches", lambda self, tags: looked.append(tags) or matches(self, tags)
    )
    request = ClaimRequest("a", ("x",), 5, where=(TagFilter("v", "==", 0),))
    most, done = 0, False
    while not done:
        looked.clear()
        done = ledger.partition("p").prepare(request)
        most = max(most, len(looked))
    assert 0 < most <= 128
    assert len(claim(ledger, 5, where=request.where)) == 5


def test_a_detached_partition_is_gone_at_once_and_freed_in_parts():
    freed = []
    ledger = books(capacity=300, discard=freed.extend)
    ids = [f"s{i}" for i in range(300)]
    put(ledger, ids)
    held = ledger.partition("p").lookup(ids[:2], ["x"])
    ledger.pin(held)
    claim(ledger, 100, lease_s=9.0, required=("x",))
    with pytest.raises(SamplesLeasedError, match="100 samples are leased by 'a'"):
        ledger.detach("p", force=False)
    partition = ledger.detach("p", force=True)
    assert (ledger.held, ledger.totals["samples_cleared"]) == (0, 300)
    with pytest.raises(PartitionNotFoundError):
        ledger.partition("p")
    parts = []
    while rows := ledger.dismantle(partition, 64):
        parts.append(len(rows))
    assert parts == [64, 64, 64, 64, 44]
    assert sorted(freed) == sorted(("x", sample_id) for sample_id in ids[2:])
    ledger.unpin(held)
    assert sorted(freed) == sorted(("x", sample_id) for sample_id in ids)
