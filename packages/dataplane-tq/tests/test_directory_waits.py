"""Who waits for the directory is told of what happened meanwhile. No Ray."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dataplane_core import PartitionNotFoundError
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest, TagFilter
from dataplane_tq import protocol as p
from dataplane_tq.directory import Directory
from dataplane_tq.wire import Link

PATIENCE_S = 20.0
SOON_S = 5.0


class Here:
    """A directory in this process, and a client of it that waits in a thread of its own."""

    def __init__(self, pool):
        self.directory = Directory(3, [], "127.0.0.1")
        self.link = Link(self.directory.start(), timeout_s=PATIENCE_S)
        self._pool = pool

    def register(self, num_samples):
        declaration = PartitionDeclaration.checked("p", ["x", "y"], num_samples, ["train"])
        self.link.ask("register", p.Register(declaration), type(None))

    def put(self, ids, fields=("x",), tags=None):
        kinds = dict.fromkeys(fields, "torch.int64")
        with self.link.session("put") as session:
            begin = p.BeginPut("p", ids, kinds, [], "node", None, PATIENCE_S)
            session.ask(begin, p.PutAnswer)
            session.ask(p.CommitPut(tags), type(None))

    def claim(self, size, *, fields=("x",), timeout_s=0.0, **more):
        wanted = ClaimRequest("train", fields, size, whole=timeout_s > 0, **more)
        answer = self.link.ask("claim", p.Claim("p", wanted, timeout_s), p.ClaimAnswer, timeout_s)
        return answer.sample_ids

    def waiting(self, ask, *arguments, **more):
        """What ``ask`` comes to; it waits by now."""
        future = self._pool.submit(ask, *arguments, **more)
        deadline = time.monotonic() + PATIENCE_S
        while not self.directory._changed.get("p"):
            assert time.monotonic() < deadline, "it does not wait"
            threading.Event().wait(0.005)
        return future


@pytest.fixture
def here():
    with ThreadPoolExecutor(1) as pool:
        made = Here(pool)
        yield made
        made.link.close()


def test_a_rank_that_waits_is_told_when_a_final_claim_draws_its_share(here):
    here.register(4)
    here.put(["a", "b"])
    waiting = here.waiting(here.claim, 2, timeout_s=PATIENCE_S, dp_rank=1, dp_world=2)
    assert here.claim(2, dp_rank=0, dp_world=2) == ["a"]
    assert waiting.result(SOON_S) == ["b"]


def test_a_claim_that_waits_is_told_when_a_final_claim_takes_what_it_waited_for(here):
    here.register(2)
    here.put(["a", "b"])
    waiting = here.waiting(here.claim, 2, fields=("x", "y"), timeout_s=PATIENCE_S)
    assert here.claim(2) == ["a", "b"]
    assert waiting.result(SOON_S) == []


def test_a_claim_that_waits_is_told_of_shares_that_a_claim_that_waits_too_has_opened(here):
    here.register(3)
    here.put(["a", "b"], ["x", "y"], [{"v": 2}] * 2)
    here.put(["c"], ["x"], [{"v": 1}])
    assert here.claim(1, fields=("x", "y"), dp_rank=0, dp_world=2) == ["a"]
    waiting = here.waiting(
        here.claim, 1, fields=("x", "y"), where=(TagFilter("v", "<=", 2),), timeout_s=PATIENCE_S
    )
    # This one opens what waits for rank 1, waits for its z, and is told in turn when it is gone.
    assert here.claim(1, fields=("z",), where=(TagFilter("v", "==", 2),), timeout_s=SOON_S) == []
    assert waiting.result(SOON_S) == ["b"]


def test_a_share_is_open_at_its_deadline_also_if_the_claim_that_drew_it_got_nothing(here):
    here.register(4)
    here.put(["a"])
    assert here.claim(2, dp_rank=1, dp_world=2, lease_s=0.3) == []
    waiting = here.waiting(here.claim, 1, timeout_s=PATIENCE_S)
    assert waiting.result(SOON_S) == ["a"]


def test_a_put_that_waits_for_room_does_not_land_in_a_partition_registered_meanwhile(here):
    here.register(3)
    here.put(["a", "b", "c"])
    stale = here.waiting(here.put, ["stale"])
    with here.link.session("clear") as session:
        session.ask(p.Clear("p", None, False, PATIENCE_S), p.ClearAnswer)
        here.register(3)  # while TransferQueue is still told of the clear
        session.ask(p.Dropped(), type(None))
    with pytest.raises(PartitionNotFoundError):
        stale.result(SOON_S)
    assert here.directory.ledger.partition("p").held == 0
