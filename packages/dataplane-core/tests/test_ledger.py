"""Promises of claims, leases and running puts beyond the published contract."""

from __future__ import annotations

from itertools import chain

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_parts import claim, claimed, declared, nbytes, new_ledger, put

from dataplane_core import (
    InvalidRequestError,
    LeaseLostError,
    PartitionNotFoundError,
    SamplesLeasedError,
    SchemaMismatchError,
)
from dataplane_core.ledger import ClaimRequest, TagFilter, balance
from dataplane_core.ledger.actions import end_claim, reset_consumption
from dataplane_core.ledger.inspect import claims, summarize
from dataplane_core.ledger.scan import SEARCH_WINDOW, search

IDS = [f"p{prompt}_g{place}" for prompt in range(3) for place in range(2)]


@pytest.fixture
def evaluated(monkeypatch):
    """Record the tags that filters evaluate."""
    evaluated = []
    matches = TagFilter.matches
    monkeypatch.setattr(
        TagFilter, "matches", lambda self, tags: evaluated.append(tags) or matches(self, tags)
    )
    return evaluated


def test_group_is_claimed_completely_or_not_at_all():
    ledger = new_ledger(num_samples=8, group_size=2)
    put(ledger, ["p0_g0", "p1_g0", "p1_g1", "p2_g0"])
    assert claim(ledger, 4) == ["p1_g0", "p1_g1"]
    put(ledger, ["p0_g1"])
    assert claim(ledger, 4) == ["p0_g0", "p0_g1"]
    assert claim(ledger, 4) == []


def test_group_tag_takes_precedence_over_the_id():
    ledger = new_ledger(num_samples=9, group_size=2)
    put(ledger, ["a_g0", "b_g0", "b_g1"], tags=[{"group": "q"}, {"group": "q"}, {"group": "r"}])
    assert claim(ledger, 2) == ["a_g0", "b_g0"]


def test_an_id_without_a_group_number_is_a_group():
    ledger = new_ledger(num_samples=9, group_size=2)
    put(ledger, ["img_gold", "img_gray", "img_g"])
    assert claim(ledger, 2) == []


def test_shrunk_group_is_claimed_once_nothing_more_can_come():
    ledger = new_ledger(num_samples=4, group_size=2)
    put(ledger, ["p0_g0", "p0_g1", "p1_g0", "p1_g1"])
    ledger.clear("p", ["p1_g1"], force=False)
    assert claim(ledger, 4, blocking=True) == ["p0_g0", "p0_g1", "p1_g0"]


def test_a_batch_that_would_break_groups_is_refused():
    with pytest.raises(InvalidRequestError, match=r"batch_size 3 .* grpo_group_size 2"):
        claim(new_ledger(group_size=2), 3)


def test_a_filter_passes_only_samples_whose_tags_match():
    ledger = new_ledger(num_samples=9)
    put(ledger, ["a", "b", "c", "d"], tags=[{"v": 1}, {"v": 3}, {}, {"v": "text"}])
    newer = (TagFilter("v", ">=", 2),)
    assert claim(ledger, 9, where=newer) == ["b"]
    assert claim(ledger, 9) == ["a", "c", "d"]


def test_blocking_filtered_claim_ends_when_no_match_can_come():
    ledger = new_ledger(num_samples=2)
    put(ledger, ["a", "b"], tags=[{"v": 1}, {"v": 2}])
    assert claim(ledger, 5, blocking=True, where=(TagFilter("v", "==", 2),)) == ["b"]
    assert claim(ledger, 5, blocking=True, where=(TagFilter("v", "==", 2),)) == []


def test_a_filter_follows_changed_tags_and_added_fields():
    ledger = new_ledger(num_samples=9)
    newer = (TagFilter("v", ">=", 2),)
    put(ledger, ["a", "b", "c"], (), [{"v": 1}, {"v": 2}, {"v": 2}])
    assert claim(ledger, 9, where=newer) == []
    put(ledger, ["a", "b", "c"])
    put(ledger, ["a", "b"], (), [{"v": 3}, {"v": 0}])
    assert claim(ledger, 9, where=newer) == ["a", "c"]
    put(ledger, ["b"], (), [{"v": 2}])
    assert claim(ledger, 9, where=newer) == ["b"]


def test_group_with_a_mismatched_sample_is_not_claimed():
    ledger = new_ledger(num_samples=4, group_size=2)
    newer = (TagFilter("v", ">=", 2),)
    put(ledger, IDS[:4], tags=[{"v": 2}, {"v": 1}, {"v": 2}, {"v": 2}])
    assert claim(ledger, 4, where=newer, blocking=True) == IDS[2:4]
    assert claim(ledger, 4, where=newer, blocking=True) == []
    put(ledger, [IDS[1]], (), [{"v": 2}])
    assert claim(ledger, 4, where=newer, blocking=True) == IDS[:2]


def test_filter_is_evaluated_per_put_not_per_claim(evaluated):
    ledger = new_ledger(num_samples=1000)
    put(ledger, [f"s{i}" for i in range(100)], tags=[{"v": i % 10} for i in range(100)])
    newer = (TagFilter("v", ">=", 9),)
    claim(ledger, 1, where=newer)
    evaluated.clear()
    for _ in range(5):
        assert claim(ledger, 20, where=newer, blocking=True) is None
    assert evaluated == []


def test_list_filter_works_with_data_parallel_ranks():
    ledger = new_ledger(num_samples=4)
    put(ledger, list("abcd"), tags=[{"v": i} for i in range(4)])
    parts = []
    for rank in range(2):
        encoded = msgspec.msgpack.encode(TagFilter("v", "in", [0, 1, 3]))
        where = (msgspec.msgpack.decode(encoded, type=TagFilter),)
        parts.append(claim(ledger, 2, where=where, dp_rank=rank, dp_world=2))
    assert sorted(chain(*parts)) == ["a", "b", "d"]


@pytest.mark.parametrize(
    ("op", "value"), [("~", 1), ("in", 3), ("==", [1]), ("in", [[1]]), (">", object())]
)
def test_invalid_filter_is_refused(op, value):
    with pytest.raises(InvalidRequestError, match="'v'"):
        TagFilter("v", op, value)


def test_seeded_order_depends_only_on_seed_and_ids():
    ids = [f"s{i}" for i in range(50)]
    orders = []
    for arrival in (ids, ids[::-1]):
        ledger = new_ledger(num_samples=50)
        put(ledger, arrival)
        orders.append([claim(ledger, 10, seed=3) for _ in range(5)])
    assert orders[0] == orders[1]
    other = new_ledger(num_samples=50)
    put(other, ids)
    assert claim(other, 50, seed=4) != list(chain(*orders[0]))


@given(st.lists(st.integers(0, 10_000), max_size=60), st.integers(1, 8))
def test_balance_assigns_each_item_once_in_even_counts(lengths, world):
    parts = balance(lengths, world)
    assert sorted(chain(*parts)) == list(range(len(lengths)))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_lease_numbers_grow_across_registrations():
    ledger = new_ledger(num_samples=1)
    numbers = []
    for _ in range(3):
        put(ledger, ["a"])
        held = claimed(ledger, 1, lease_s=1.0)
        numbers.append(int(held.token.split(".")[0]))
        ledger.clear("p", None, force=True)
        ledger.register(declared(1))
    assert numbers == sorted(set(numbers))


def test_put_under_a_claim_cannot_write_samples_of_another():
    ledger = new_ledger(num_samples=2)
    put(ledger, ["a", "b"])
    partition = ledger.partition("p")
    request = ClaimRequest("a", ("x",), 2, lease_s=9.0)
    first = partition.claim(request, 0.0)
    other_task = partition.claim(ClaimRequest("b", ("x",), 2, lease_s=9.0), 0.0)
    under_way = ledger.begin_put("p", ["a", "b"], {"y": "torch.int64"}, first.token)
    partition.release(first.token, ["b"])
    assert [row.sample_id for row in partition.claim(request, 0.0).rows] == ["b"]
    with pytest.raises(LeaseLostError, match=r"1 of the samples, .* task 'a' has them: 'b'"):
        ledger.begin_put("p", ["a", "b"], {"y": "torch.int64"}, first.token)
    with pytest.raises(LeaseLostError, match="'b'"):
        ledger.commit_put(under_way, {"y": ["late", "late"]}, None)
    assert "y" not in partition.rows["b"].cells
    put(ledger, ["a", "new"], ["y"], token=first.token)
    put(ledger, ["a", "b"], ["y"], token=other_task.token)


def test_put_under_a_claim_cannot_write_released_samples():
    ledger = new_ledger(num_samples=4)
    put(ledger, list("abcd"))
    partition = ledger.partition("p")
    held = claimed(ledger, 3, lease_s=9.0)
    partition.release(held.token, ["a"])
    ledger.clear("p", ["b"], force=True)
    put(ledger, ["b"])
    assert claim(ledger, 1) == ["a"]  # without a lease
    for lost in "ab":
        with pytest.raises(
            LeaseLostError, match=f"1 of the samples, .* task 'a' has them: {lost!r}"
        ):
            put(ledger, ["c", lost], ["y"], token=held.token)
    put(ledger, ["c", "d", "new"], ["y"], token=held.token)


def test_put_under_a_claim_cannot_write_acknowledged_samples():
    ledger = new_ledger(num_samples=2)
    put(ledger, ["a", "b"])
    held = claimed(ledger, 1, lease_s=9.0)
    assert claim(ledger, 1) == ["b"]
    with pytest.raises(LeaseLostError, match="'b'"):
        put(ledger, ["a", "b"], ["y"], token=held.token)


def test_put_can_be_retried_under_a_partly_acknowledged_claim():
    ledger = new_ledger(num_samples=2)
    put(ledger, ["a", "b"])
    partition = ledger.partition("p")
    held = claimed(ledger, 2, lease_s=9.0)
    partition.acknowledge(held.token, ["a"])
    put(ledger, ["a", "b"], ["y"], token=held.token)
    # After an operator's reset the next claim gets it.
    reset_consumption(partition, "a", ["a"])
    with pytest.raises(LeaseLostError, match="'a'"):
        put(ledger, ["a", "b"], ["y"], token=held.token)


def test_new_sample_of_overlapping_puts_is_counted_once():
    ledger = new_ledger(num_samples=9)
    tickets = [ledger.begin_put("p", ["a", last], {}) for last in "bc"]
    for ticket in tickets:
        ledger.commit_put(ticket, {}, None)
    assert (ledger.totals["puts"], ledger.totals["samples_put"]) == (2, 3)


def test_put_never_enters_a_partition_registered_later():
    ledger = new_ledger(num_samples=2, capacity=2)
    stale = ledger.begin_put("p", ["a", "b"], {"x": "torch.int64"})
    given_up = ledger.begin_put("p", ["a"], {"x": "torch.int64"})
    ledger.clear("p", None, force=False)
    ledger.register(declared(2))
    new = ledger.begin_put("p", ["a", "c"], {"x": "torch.float32"})
    ledger.abort_put(given_up)
    with pytest.raises(PartitionNotFoundError, match=r"'p'.*cleared"):
        ledger.commit_put(stale, {"x": [1, 2]}, None)
    assert ledger.begin_put("p", ["d"], {}) is None  # the capacity is reserved for the new put
    ledger.commit_put(new, {"x": [0.5, 0.5]}, None)
    assert (list(ledger.partition("p").rows), ledger.held) == (["a", "c"], 2)


def test_a_put_under_a_lost_lease_is_refused_and_changes_nothing():
    ledger = new_ledger(num_samples=1)
    put(ledger, ["a"])
    partition = ledger.partition("p")
    held = claimed(ledger, 1, lease_s=1.0)
    put(ledger, ["a"], ["y"], token=held.token)
    ticket = ledger.begin_put("p", ["a"], {"y": "torch.int64"}, held.token)
    ledger.expire(1.0)
    with pytest.raises(LeaseLostError):
        ledger.begin_put("p", ["a"], {"y": "torch.int64"}, held.token)
    with pytest.raises(LeaseLostError):
        ledger.commit_put(ticket, {"y": ["late"]}, None)
    assert partition.rows["a"].cells["y"] == ("y", "a")


def test_each_lease_expires_at_its_last_deadline():
    ledger = new_ledger()
    put(ledger, ["long", "renewed", "short"])
    partition = ledger.partition("p")
    assert partition.next_expiry() is None
    leases = [ClaimRequest("a", ("x",), 1, lease_s=each) for each in (5.0, 2.0, 1.5)]
    tokens = [partition.claim(request, 0.0).token for request in leases]
    partition.renew(tokens[1], ["renewed"], 1.0)
    ends = {}
    while (now := partition.next_expiry()) is not None:
        before = dict(partition.leases)
        assert not ledger.expire(now - 0.01)
        ledger.expire(now)
        ends.update({token: now for token in before if token not in partition.leases})
    assert ends == dict(zip(tokens, (5.0, 3.0, 1.5), strict=True))


def test_concurrent_puts_cannot_give_a_field_two_kinds():
    ledger = new_ledger(num_samples=2)
    first = ledger.begin_put("p", ["a"], {"x": "torch.int64"})
    with pytest.raises(SchemaMismatchError):
        ledger.begin_put("p", ["b"], {"x": "torch.float32"})
    ledger.abort_put(first)
    second = ledger.begin_put("p", ["b"], {"x": "torch.float32"})
    ledger.commit_put(second, {"x": [1]}, None)
    assert ledger.partition("p").samples.kinds == {"x": "torch.float32"}


def test_used_queue_is_kept_when_others_are_built():
    ledger = new_ledger(num_samples=9)
    put(ledger, ["a"])
    queues = ledger.partition("p").tasks["a"].queues
    claim(ledger, 2, blocking=True)
    hot = next(iter(queues.values()))
    for seed in range(200):
        claim(ledger, 2, blocking=True, seed=seed)
        claim(ledger, 2, blocking=True)
    assert any(queue is hot for queue in queues.values())
    assert len(queues) < 100


@pytest.mark.parametrize("stale", [0, 120], ids=["nothing waits", "some never match"])
def test_changing_filter_does_not_slow_down_puts(stale, evaluated):
    ledger = new_ledger()
    put(ledger, [f"stale {i}" for i in range(stale)], tags=[{"v": -9}] * stale)
    costs = []
    for step in range(40):
        ids = [f"s{step}_{i}" for i in range(10)]
        evaluated.clear()
        put(ledger, ids, tags=[{"v": step}] * 10)
        costs.append(len(evaluated))
        assert claim(ledger, 10, where=(TagFilter("v", ">=", step - 2),)) == ids
    # The queue of the last step, and the rows that others get before they count as idle.
    assert max(costs) <= 20 + stale // 4
    assert len(ledger.partition("p").tasks["a"].queues) <= 3 + stale // 40


def test_constant_filter_is_evaluated_once_per_sample(evaluated):
    ledger = new_ledger()
    put(ledger, [f"stale {i}" for i in range(500)], tags=[{"v": -9}] * 500)
    filters = [(TagFilter("v", "==", value),) for value in range(3)]
    for where in filters:
        claim(ledger, 10, where=where)
    evaluated.clear()
    for step in range(200):
        put(ledger, [f"s{step}_{i}" for i in range(10)], tags=[{"v": 0}] * 10)
        for where in filters:
            claim(ledger, 10, where=where)
    assert len(evaluated) == 200 * 3 * 10


def test_expired_lease_is_ended_without_force():
    ledger = new_ledger(num_samples=2)
    put(ledger, ["a", "b"])
    partition = ledger.partition("p")
    claimed = partition.claim(ClaimRequest("a", ("x",), 2, lease_s=1.0, owner="host:1"), 5.0)
    [shown] = claims(partition, 5.5)
    assert (shown.owner, shown.samples, shown.age_s, shown.expires_in_s) == ("host:1", 2, 0.5, 0.5)
    with pytest.raises(SamplesLeasedError, match="2 samples are leased by 'host:1'"):
        end_claim(partition, shown.claim, 5.5, expired_only=True)
    assert end_claim(partition, shown.claim, 6.0, expired_only=True) == 2
    with pytest.raises(LeaseLostError):
        partition.acknowledge(claimed.token, ["a", "b"])
    assert claim(ledger, 2) == ["a", "b"]


def test_partly_reset_group_is_not_claimed_until_complete():
    ledger = new_ledger(num_samples=8, group_size=2)
    put(ledger, ["p0_g0", "p0_g1"])
    claim(ledger, 2)
    partition = ledger.partition("p")
    assert reset_consumption(partition, "a", ["p0_g0"]) == ["p0_g0"]
    assert claim(ledger, 2) == []
    assert reset_consumption(partition, "a", ["p0_g1"]) == ["p0_g1"]
    assert claim(ledger, 2) == ["p0_g0", "p0_g1"]


def test_store_without_byte_counts_reports_none():
    ledger = new_ledger(num_samples=1)
    put(ledger, ["a"])
    shown = summarize(ledger.partition("p"), 0.0)
    assert (shown.nbytes, [field.nbytes for field in shown.fields]) == (None, [None, None])


def test_field_with_unknown_bytes_leaves_others_known():
    ledger = new_ledger(num_samples=1, measure=nbytes)
    ticket = ledger.begin_put("p", ["a"], {"x": "torch.int64", "y": "object"})
    ledger.commit_put(ticket, {"x": [("x", "a", 7)], "y": ["text"]}, None, nbytes={"x": 7})
    shown = summarize(ledger.partition("p"), 0.0)
    assert (shown.nbytes, [field.nbytes for field in shown.fields]) == (7, [7, None])


def test_search_continues_where_its_last_step_ended():
    ledger = new_ledger(num_samples=0)
    count = 2 * SEARCH_WINDOW + 10
    for start in range(0, count, 10_000):
        ids = [f"s{i}" for i in range(start, min(start + 10_000, count))]
        put(ledger, ids, (), [{"last": i == f"s{count - 1}"} for i in ids])
    partition = ledger.partition("p")
    steps, start = [], 0
    while start is not None:
        matches, start = search(partition, "last", True, start, 5, 0.0)
        steps.append([state.sample_id for state in matches])
    assert steps == [[], [], [f"s{count - 1}"]]


KINDS = ["put", "write", "clear", "claim", "claim y", "release"]
CHANGES = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 299)), max_size=12)


@given(CHANGES, st.sampled_from([None, 2]), st.sampled_from([(), (TagFilter("even", "==", 1),)]))
def test_queue_built_in_parts_equals_one_built_at_once(changes, group_size, where):
    ledger = new_ledger(num_samples=1000, group_size=group_size)
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
                partition.release(lease.token, held)
        ready = partition.prepare(wanted) or ready
    while not partition.prepare(wanted):
        pass
    in_parts = dict(partition.tasks["a"].queues)
    partition.tasks["a"].queues.clear()
    got = partition.claim(ClaimRequest("a", ("x", "y"), 1000, where=where), 0.0)
    at_once = [row.sample_id for row in got.rows]
    key = frozenset(("x", "y")), frozenset(where), None
    taken = in_parts[key].take(1000, unit=1000, partial=False)
    assert [partition.rows.at(place).sample_id for place in taken] == at_once


def test_prepared_claim_scans_few_samples_at_once(evaluated):
    ledger = new_ledger()
    put(ledger, [f"s{i}" for i in range(1000)], tags=[{"v": 0}] * 1000)
    request = ClaimRequest("a", ("x",), 5, where=(TagFilter("v", "==", 0),))
    maximum, done = 0, False
    while not done:
        evaluated.clear()
        done = ledger.partition("p").prepare(request)
        maximum = max(maximum, len(evaluated))
    assert 0 < maximum <= 128
    assert len(claim(ledger, 5, where=request.where)) == 5


def test_detached_partition_is_gone_at_once_and_freed_in_parts():
    freed = []
    ledger = new_ledger(capacity=300, discard=freed.extend)
    ids = [f"s{i}" for i in range(300)]
    put(ledger, ids)
    held = ledger.partition("p").samples.lookup(ids[:2], ["x"])
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
