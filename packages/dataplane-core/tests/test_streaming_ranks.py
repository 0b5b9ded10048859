"""What a live rank holds, or what waits for it, is its own; what a dead one leaves is delivered."""

from __future__ import annotations

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
from streaming_parts import SETUP, counts, ids, leased, store

from dataplane_core import ClaimTimeoutError, InMemoryDataPlaneClient
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.lease_watch import LeaseWatch
from dataplane_core.ledger import ClaimRequest, Ledger
from dataplane_core.ledger.inspect import shares
from dataplane_core.streaming import StreamingDataLoader, StreamingDataset
from dataplane_core.testing.claims import put

PATIENCE_S = 20.0


def loader(make_client, *, size=2, timeout_s=PATIENCE_S, renew_every_s=0.05, settle="commit", **of):
    return StreamingDataLoader(
        StreamingDataset(
            make_client, "p", "a", required_fields=["x"], batch_size=size, timeout_s=timeout_s, **of
        ),
        settle=settle,
        renew_every_s=renew_every_s,
    )


def test_what_is_drawn_for_a_dead_rank_comes_to_ranks_that_commit_after_their_loops():
    client = store(6)
    with (
        loader(leased(1.0), size=1, dp_rank=0, dp_world=3) as one,
        loader(leased(1.0), size=1, dp_rank=1, dp_world=3) as other,
        ThreadPoolExecutor(2) as threads,
    ):
        found = [threads.submit(ids, rank) for rank in (one, other)]
        trained = sorted(chain(*(rank.result() for rank in found)))
        assert trained == [f"s{i:02d}" for i in range(6)]
        for rank in (one, other):
            rank.state_dict()
            rank.commit()
    assert counts(client) == (0, 0, 6)


def test_the_last_samples_are_not_drawn_for_a_dead_rank_for_ever():
    client = store(5)
    with (
        loader(leased(1.0), size=1, dp_rank=1, dp_world=3) as one,
        loader(leased(1.0), size=1, dp_rank=2, dp_world=3) as other,
        ThreadPoolExecutor(2) as threads,
    ):
        found = [threads.submit(ids, rank) for rank in (one, other)]
        trained = sorted(chain(*(rank.result(PATIENCE_S) for rank in found)))
        assert trained == [f"s{i:02d}" for i in range(5)]
    assert counts(client) == (5, 0, 0)


def test_a_rank_that_is_ahead_ends_beside_live_ranks_that_work_their_shares_off():
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
        early = threads.submit(fast, first)
        got = [early.result(), *(rank.result() for rank in late)]
    assert [len(each) for each in got] == [200, 200, 200]
    assert len(set(chain(*got))) == 600


@pytest.fixture
def looks(monkeypatch):
    """Functions to call before each look for signs of life, and after each with what it found."""
    hooks = {"before": lambda: None, "after": lambda found: None}
    all_live = LeaseWatch.all_live

    def look(watch):
        hooks["before"]()
        found = all_live(watch)
        hooks["after"](found)
        return found

    monkeypatch.setattr(LeaseWatch, "all_live", look)
    return hooks


def test_a_rank_that_dies_while_another_trains_on_a_batch_is_waited_for(looks):
    client = store(6)
    dying, live = leased(3.0)(), leased(1000.0)()
    held = dying.claim_meta("p", "a", ["x"], 2)
    other = live.claim_meta("p", "a", ["x"], 2)

    def before():
        dying.renew(held)
        live.renew(other)

    def after(found):
        if found:
            looks["before"] = lambda: None
            looks["after"] = lambda found: None
            live.release(other)

    looks.update(before=before, after=after)
    with loader(leased(1000.0)) as alive:
        batches = iter(alive)
        next(batches)
        assert next(batches)[1].sample_ids == other.sample_ids
        assert ids(batches) == held.sample_ids
    assert counts(client) == (6, 0, 0)


def test_a_rank_that_dies_while_another_waits_is_waited_for(looks):
    client = store(6)
    dying, silent = leased(3.0)(), leased(1000.0)()
    held = dying.claim_meta("p", "a", ["x"], 2)
    other = silent.claim_meta("p", "a", ["x"], 2)
    told = []

    def before():
        if len(told) < 6:
            dying.renew(held)

    def after(found):
        told.append(found)
        if len(told) == 6:
            silent.acknowledge(other)

    looks.update(before=before, after=after)
    with loader(leased(1000.0)) as alive:
        assert ids(alive) == ["s04", "s05", *held.sample_ids]
    assert told[:6] == [False] * 6
    assert counts(client) == (4, 0, 2)


def test_a_rank_that_waits_notices_what_comes_back_though_others_claim_more(looks):
    client = store(4)
    silent, busy = leased(1000.0)(), leased(1000.0)()
    held = silent.claim_meta("p", "a", ["x"], 2)
    told, later = [], []

    def after(found):
        told.append(found)
        if len(told) == 2:
            put(client, "p", ["new0", "new1"])
            later.append(busy.claim_meta("p", "a", ["x"], 2))
        elif len(told) == 4:
            silent.release(held)

    looks["after"] = after
    with loader(leased(1000.0), timeout_s=5.0) as alive:
        got = []
        for _, meta in alive:
            got += meta.sample_ids
            if len(got) == 4:
                busy.acknowledge(later[0])
    assert got == ["s02", "s03", *held.sample_ids]


def test_a_claim_is_a_live_ones_if_renewed_or_made_by_a_rank_under_watch_and_so_is_a_share():
    store(9)
    client = leased(1000.0)()

    def claim(*rank):
        more = {"dp_rank": rank[0], "dp_world": 2} if rank else {}
        return client.claim_meta("p", "a", ["x"], 1, **more)

    def finds_all_live():
        # A sign shortly after the first look may show at the next only.
        until = time.monotonic() + PATIENCE_S
        while not watch.all_live() and time.monotonic() < until:
            pass
        return watch.all_live()

    watch = LeaseWatch(client, "p", "a")
    assert not any(watch.all_live() for _ in range(2))  # nobody is there
    held = [claim(0), claim(0), claim(0)]
    client.acknowledge(claim(1))  # two wait for it
    watch = LeaseWatch(client, "p", "a")
    assert not any(watch.all_live() for _ in range(2))
    for meta in held:
        client.renew(meta)
    assert not any(watch.all_live() for _ in range(2))  # rank 1 gave no sign since
    held.append(claim(1))
    assert finds_all_live()
    held.append(claim(1))  # nothing waits for it any more

    watch = LeaseWatch(client, "p", "a")
    assert not any(watch.all_live() for _ in range(2))
    for meta in held[1:]:
        client.renew(meta)
    # The first may be of a process that is gone, though its rank lives.
    assert not any(watch.all_live() for _ in range(2))
    client.renew(held[0])
    assert finds_all_live()
    free = claim()
    assert not any(watch.all_live() for _ in range(2))
    client.renew(free)
    assert finds_all_live()


def test_without_leases_the_error_of_a_rank_names_the_ranks_that_it_waited_for():
    client = store(4)
    alone = functools.partial(InMemoryDataPlaneClient, SETUP, bootstrap=False)
    with loader(alone, dp_rank=0, dp_world=2, timeout_s=0.1, settle="next") as rank:
        batches = iter(rank)
        next(batches)
        with pytest.raises(ClaimTimeoutError, match="2 samples still wait for") as caught:
            next(batches)
        assert "the data-parallel ranks that they were drawn for" in str(caught.value)
        assert "reset_consumption" in str(caught.value)
        assert "leased" not in str(caught.value)
        client.register_partition("p", ["x"], 4, ["a"])
    assert client.claim_meta("p", "a", ["x"], 4, blocking=False).size == 2


def test_leases_and_samples_that_wait_for_a_rank_are_told_apart():
    store(6)
    leased(1000.0)().claim_meta("p", "a", ["x"], 1)
    with loader(leased(1000.0), dp_rank=0, dp_world=2, timeout_s=0.1, settle="next") as rank:
        batches = iter(rank)
        with pytest.raises(ClaimTimeoutError, match="1 are leased: 1 by") as caught:
            list(batches)
        assert "2 wait for the data-parallel ranks" in str(caught.value)
        assert (caught.value.leased, caught.value.missing) == (1, 2)


def test_of_little_that_came_back_from_a_rank_who_asks_gets_some_rather_than_nothing():
    ledger = Ledger(None)
    ledger.register(PartitionDeclaration.checked("p", ["x"], 0, ["a"]))
    book = ledger.partition("p")

    def put_more(*ids):
        ticket = ledger.begin_put("p", list(ids), {"x": "torch.int64"})
        ledger.commit_put(ticket, {"x": list(ids)}, None)

    def claim(rank, now):
        request = ClaimRequest("a", ("x",), 1, dp_rank=rank, dp_world=3, lease_s=10.0)
        return [row.sample_id for row in book.claim(request, now).rows]

    put_more("a", "b")
    assert claim(2, 0.0) == []  # they are of ranks 0 and 1
    ledger.expire(10.0)
    assert claim(2, 10.0) == ["a"]
    assert [each.rank for each in shares(book, 10.0)] == [1]
    put_more("c")
    assert claim(2, 10.0) == []
    ledger.clear("p", ["a", "b", "c"], force=True)
    assert book.tasks["a"].missed == set()


def test_a_share_tells_whose_it_is_and_when_its_rank_gave_a_sign_of_life():
    ledger = Ledger(None)
    ledger.register(PartitionDeclaration.checked("p", ["x"], 9, ["a"]))
    ticket = ledger.begin_put("p", [f"s{i:02d}" for i in range(9)], {"x": "torch.int64"})
    ledger.commit_put(ticket, {"x": list(range(9))}, None)
    book = ledger.partition("p")

    def claim(rank, now):
        return book.claim(ClaimRequest("a", ("x",), 1, dp_rank=rank, dp_world=3, lease_s=10.0), now)

    def told(now):
        found = shares(book, now)
        assert {(each.task, each.world) for each in found} <= {("a", 3)}
        return {each.rank: (each.samples, each.expires_in_s, each.seen_s) for each in found}

    claim(0, 0.0)
    claim(0, 1.0)
    assert told(2.0) == {1: (2, 8.0, None), 2: (2, 8.0, None)}
    held = claim(1, 3.0)
    assert told(4.0) == {1: (1, 9.0, 1.0), 2: (2, 6.0, None)}
    book.renew(held.token, [row.sample_id for row in held.rows], 5.0)
    claim(0, 6.0)
    assert told(7.0) == {1: (2, 8.0, 2.0), 2: (3, 3.0, None)}
    ledger.expire(11.5)
    assert told(11.5) == {1: (2, 3.5, 6.5), 2: (1, 4.5, None)}
