"""A live rank retains its samples; those of a dead rank are delivered to the others.

Imports internals: hooks run at each check of live ranks, so that a rank dies between two checks.
"""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
from ledger_parts import claim as ledger_claim
from ledger_parts import claimed, new_ledger
from ledger_parts import put as ledger_put
from streaming_parts import SETUP, TIMEOUT_S, commit_all, counts, dataset, ids, leased, store

from dataplane_core import (
    ClaimTimeoutError,
    InMemoryDataPlaneClient,
    StreamingDataLoader,
)
from dataplane_core.ledger.inspect import assignments
from dataplane_core.streaming.lease_watch import LeaseWatch
from dataplane_core.testing.claims import put


def loader(make_client, *, size=2, renew_every_s=0.05, acknowledge_on="commit", **options):
    return StreamingDataLoader(
        dataset(make_client, size, **options),
        acknowledge_on=acknowledge_on,
        renew_every_s=renew_every_s,
    )


@pytest.mark.parametrize("count", [6, 5], ids=["even", "the last ones"])
def test_samples_assigned_to_a_dead_rank_reach_live_ranks(count):
    client = store(count)
    with (
        loader(leased(1.0), size=1, dp_rank=1, dp_world=3) as first,
        loader(leased(1.0), size=1, dp_rank=2, dp_world=3) as second,
        ThreadPoolExecutor(2) as threads,
    ):
        running = [threads.submit(ids, rank) for rank in (first, second)]
        trained = sorted(chain(*(rank.result(TIMEOUT_S) for rank in running)))
        assert trained == [f"s{i:02d}" for i in range(count)]
        for rank in (first, second):
            commit_all(rank)
    assert counts(client) == (0, 0, count)


def test_fast_rank_ends_while_slow_ranks_are_live():
    store(600)
    ended = threading.Event()

    def fast(rank):
        try:
            return ids(rank)
        finally:
            ended.set()

    def slow(rank):
        got = []
        for _, meta in rank:
            got += meta.sample_ids
            ended.wait(0.05)  # 200 batches take longer than the fast rank waits
        return got

    with (
        loader(leased(1000.0), size=1, dp_rank=0, dp_world=3, timeout_s=5.0) as first,
        loader(leased(1000.0), size=1, dp_rank=1, dp_world=3, renew_every_s=0.5) as second,
        loader(leased(1000.0), size=1, dp_rank=2, dp_world=3, renew_every_s=0.5) as third,
        ThreadPoolExecutor(3) as threads,
    ):
        late = [threads.submit(slow, rank) for rank in (second, third)]
        first_rank = threads.submit(fast, first)
        got = [first_rank.result(), *(rank.result() for rank in late)]
    assert [len(each) for each in got] == [200, 200, 200]
    assert len(set(chain(*got))) == 600


@pytest.fixture
def live_checks(monkeypatch):
    """Return hooks that run before each check of live ranks, and after it with the result."""
    hooks = {"before": lambda: None, "after": lambda is_live: None}
    all_live = LeaseWatch.all_live

    def look(watch):
        hooks["before"]()
        is_live = all_live(watch)
        hooks["after"](is_live)
        return is_live

    monkeypatch.setattr(LeaseWatch, "all_live", look)
    return hooks


def test_rank_waits_for_one_that_died_during_its_batch(live_checks):
    client = store(6)
    expiring, live = leased(3.0)(), leased(1000.0)()
    held = expiring.claim_meta("p", "a", ["x"], 2)
    other = live.claim_meta("p", "a", ["x"], 2)

    def before():
        expiring.renew(held)
        live.renew(other)

    def after(is_live):
        if is_live:
            live_checks["before"] = lambda: None
            live_checks["after"] = lambda is_live: None
            live.release(other)

    live_checks.update(before=before, after=after)
    with loader(leased(1000.0)) as alive:
        batches = iter(alive)
        next(batches)
        assert next(batches)[1].sample_ids == other.sample_ids
        assert ids(batches) == held.sample_ids
    assert counts(client) == (6, 0, 0)


def test_rank_waits_for_one_that_died_during_its_wait(live_checks):
    client = store(6)
    expiring, silent = leased(3.0)(), leased(1000.0)()
    held = expiring.claim_meta("p", "a", ["x"], 2)
    other = silent.claim_meta("p", "a", ["x"], 2)
    answers = []

    def before():
        if len(answers) < 6:
            expiring.renew(held)

    def after(is_live):
        answers.append(is_live)
        if len(answers) == 6:
            silent.acknowledge(other)

    live_checks.update(before=before, after=after)
    with loader(leased(1000.0)) as alive:
        assert ids(alive) == ["s04", "s05", *held.sample_ids]
    assert answers[:6] == [False] * 6
    assert counts(client) == (4, 0, 2)


def test_waiting_rank_notices_released_samples(live_checks):
    client = store(4)
    silent, busy = leased(1000.0)(), leased(1000.0)()
    held = silent.claim_meta("p", "a", ["x"], 2)
    answers, later = [], []

    def after(is_live):
        answers.append(is_live)
        if len(answers) == 2:
            put(client, "p", ["new0", "new1"])
            later.append(busy.claim_meta("p", "a", ["x"], 2))
        elif len(answers) == 4:
            silent.release(held)

    live_checks["after"] = after
    with loader(leased(1000.0), timeout_s=5.0) as alive:
        got = []
        for _, meta in alive:
            got += meta.sample_ids
            if len(got) == 4:
                busy.acknowledge(later[0])
    assert got == ["s02", "s03", *held.sample_ids]


def test_watch_distinguishes_live_from_dead_claims():
    store(9)
    client = leased(1000.0)()

    def claim(*rank):
        more = {"dp_rank": rank[0], "dp_world": 2} if rank else {}
        return client.claim_meta("p", "a", ["x"], 1, **more)

    def finds_all_live():
        # Activity shortly after the first check may show at the next check only.
        until = time.monotonic() + TIMEOUT_S
        while not watch.all_live() and time.monotonic() < until:
            pass
        return watch.all_live()

    watch = LeaseWatch(client.inspector, "p", "a")
    assert not any(watch.all_live() for _ in range(2))  # there is no claim
    held = [claim(0), claim(0), claim(0)]
    client.acknowledge(claim(1))  # two are assigned to it
    watch = LeaseWatch(client.inspector, "p", "a")
    assert not any(watch.all_live() for _ in range(2))
    for meta in held:
        client.renew(meta)
    assert not any(watch.all_live() for _ in range(2))  # rank 1 was not active since
    held.append(claim(1))
    assert finds_all_live()
    held.append(claim(1))  # nothing is assigned to it any more

    watch = LeaseWatch(client.inspector, "p", "a")
    assert not any(watch.all_live() for _ in range(2))
    for meta in held[1:]:
        client.renew(meta)
    # The first claim may belong to a dead process of a live rank.
    assert not any(watch.all_live() for _ in range(2))
    client.renew(held[0])
    assert finds_all_live()
    free = claim()
    assert not any(watch.all_live() for _ in range(2))
    client.renew(free)
    assert finds_all_live()


def test_timeout_without_leases_reports_assigned_samples():
    client = store(4)
    alone = functools.partial(InMemoryDataPlaneClient, SETUP, bootstrap=False)
    with loader(alone, dp_rank=0, dp_world=2, timeout_s=0.1, acknowledge_on="next") as rank:
        batches = iter(rank)
        next(batches)
        with pytest.raises(
            ClaimTimeoutError, match="2 samples are still assigned to data-parallel ranks"
        ) as caught:
            next(batches)
        assert "reset_consumption" in str(caught.value)
        assert "leased" not in str(caught.value)
        client.register_partition("p", ["x"], 4, ["a"])
    assert client.claim_meta("p", "a", ["x"], 4, blocking=False).size == 2


def test_timeout_counts_leased_and_assigned_apart():
    store(6)
    leased(1000.0)().claim_meta("p", "a", ["x"], 1)
    with loader(
        leased(1000.0), dp_rank=0, dp_world=2, timeout_s=0.1, acknowledge_on="next"
    ) as rank:
        batches = iter(rank)
        with pytest.raises(ClaimTimeoutError, match="1 are leased: 1 by") as caught:
            list(batches)
        assert "2 are assigned to data-parallel ranks" in str(caught.value)
        assert (caught.value.leased, caught.value.missing) == (1, 2)


def test_claiming_rank_gets_part_of_few_reopened_samples():
    ledger = new_ledger()
    partition = ledger.partition("p")

    def claim(rank, now):
        return ledger_claim(ledger, 1, now=now, dp_rank=rank, dp_world=3, lease_s=10.0)

    ledger_put(ledger, ["a", "b"])
    assert claim(2, 0.0) == []  # they are assigned to ranks 0 and 1
    ledger.expire(10.0)
    assert claim(2, 10.0) == ["a"]
    assert [each.rank for each in assignments(partition, 10.0)] == [1]
    ledger_put(ledger, ["c"])
    assert claim(2, 10.0) == []
    ledger.clear("p", ["a", "b", "c"], force=True)
    assert partition.tasks["a"].assignments.missed == set()


def test_assignment_summary_has_rank_and_activity():
    ledger = new_ledger(9)
    ledger_put(ledger, [f"s{i:02d}" for i in range(9)])
    partition = ledger.partition("p")

    def claim(rank, now):
        return claimed(ledger, 1, now=now, dp_rank=rank, dp_world=3, lease_s=10.0)

    def summaries(now):
        current = assignments(partition, now)
        assert {(each.task, each.world) for each in current} <= {("a", 3)}
        return {each.rank: (each.samples, each.expires_in_s, each.seen_s) for each in current}

    claim(0, 0.0)
    claim(0, 1.0)
    assert summaries(2.0) == {1: (2, 8.0, None), 2: (2, 8.0, None)}
    held = claim(1, 3.0)
    assert summaries(4.0) == {1: (1, 9.0, 1.0), 2: (2, 6.0, None)}
    partition.renew(held.token, [row.sample_id for row in held.rows], 5.0)
    claim(0, 6.0)
    assert summaries(7.0) == {1: (2, 8.0, 2.0), 2: (3, 3.0, None)}
    ledger.expire(11.5)
    assert summaries(11.5) == {1: (2, 3.5, 6.5), 2: (1, 4.5, None)}
