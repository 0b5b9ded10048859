"""Requests blocked in the directory react to changes by other requests. No Ray.

Imports internals: tests check that the directory has a blocked request, which a client cannot.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore

import pytest
from directory_calls import TIMEOUT_S, Calls, until

from dataplane_core import PartitionNotFoundError
from dataplane_core.ledger import TagFilter
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.server import Directory
from dataplane_tq.directory.wire import Link

SOON_S = 5.0


class LocalDirectory(Calls):
    """Directory in this process, and a client that makes blocking calls in a thread."""

    def __init__(self, pool, *, mirrored=True):
        self.directory = Directory(3, [], "127.0.0.1", mirrored=mirrored)
        super().__init__(Link(self.directory.start(), timeout_s=TIMEOUT_S))
        self._pool = pool

    def block(self, ask, *arguments, **more):
        """Start ``ask`` in the thread; return its future once it is blocked."""
        future = self._pool.submit(ask, *arguments, **more)
        until(lambda: self.directory.store._changed.get("p"))
        return future


@pytest.fixture
def local():
    with ThreadPoolExecutor(1) as pool:
        local = LocalDirectory(pool)
        yield local
        local.link.close()


def test_blocked_claim_wakes_when_another_claim_assigns(local):
    local.register(num_samples=3, fields=["x", "y"])
    local.put(["a", "b"], fields=["x", "y"], tags=[{"v": 2}] * 2)
    local.put(["c"], tags=[{"v": 1}])
    assert local.claim(1, fields=("x", "y"), dp_rank=0, dp_world=2).sample_ids == ["a"]
    blocked = local.block(
        local.claim, 1, fields=("x", "y"), where=(TagFilter("v", "<=", 2),), timeout_s=TIMEOUT_S
    )
    # This claim is blocked on "z". It releases the assignment of rank 1 to the first claim.
    assert (
        local.claim(1, fields=("z",), where=(TagFilter("v", "==", 2),), timeout_s=SOON_S).sample_ids
        == []
    )
    assert blocked.result(SOON_S).sample_ids == ["b"]


def test_blocked_put_does_not_enter_a_new_partition(local):
    local.register(num_samples=3, fields=["x", "y"])
    local.put(["a", "b", "c"])
    stale = local.block(local.put, ["stale"])
    with local.link.session("clear") as session:
        session.ask(p.Clear("p", None, False, TIMEOUT_S), p.ClearAnswer)
        # The clear is still being reported to TransferQueue.
        local.register(num_samples=3, fields=["x", "y"])
        session.ask(p.Dropped(), type(None))
    with pytest.raises(PartitionNotFoundError):
        stale.result(SOON_S)
    assert local.directory.store.ledger.partition("p").held == 0


def test_without_a_mirror_reports_of_a_row_have_the_order_of_its_puts():
    with ThreadPoolExecutor(1) as pool:
        local = LocalDirectory(pool, mirrored=False)
        local.register(num_samples=3)
        with local.link.session("put") as session:
            begin = p.BeginPut("p", ["a"], {"x": "torch.int64"}, [], "n", None, TIMEOUT_S)
            session.ask(begin, p.PutAnswer)
            session.ask(p.CommitPut(None, will_report=True), type(None))
            blocked = local.block(local.put, ["a", "b"])
            local.put(["c"])
            assert not blocked.done()
            session.send(p.Unpin())  # the rows are reported
        blocked.result(SOON_S)
        local.link.close()


def test_without_a_mirror_the_next_put_is_committed_after_the_last_report():
    next_report = Semaphore(0)

    def report(local):
        with local.link.session("put") as session:
            begin = p.BeginPut("p", ["a"], {"x": "torch.int64"}, [], "n", None, TIMEOUT_S)
            session.ask(begin, p.PutAnswer)
            session.ask(p.CommitPut(None, will_report=True), type(None))
            assert next_report.acquire(timeout=SOON_S)
            session.send(p.Unpin())

    with ThreadPoolExecutor(3) as pool:
        local = LocalDirectory(pool, mirrored=False)
        local.register(num_samples=3)
        store = local.directory.store
        puts = [pool.submit(report, local) for _ in range(3)]
        until(lambda: len(store._changed.get("p", ())) == 2)
        for blocked in (2, 1, 0):
            until(lambda: len(store._changed.get("p", ())) == blocked)  # noqa: B023  # at once
            assert store.backlog["p"].reporting["a"] == 1
            next_report.release()
        for put in puts:
            put.result(SOON_S)
        local.link.close()
