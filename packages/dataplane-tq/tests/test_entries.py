"""Puts that are visible before TransferQueue's controller has been told of them."""

import threading

import pytest

from dataplane_core import MissingDataError, TaskCounts
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest
from dataplane_tq import protocol as p
from dataplane_tq.directory import Directory
from dataplane_tq.wire import Link

PATIENCE_S = 20


class Asking:
    """A directory in this process, and two clients' connections to it."""

    def __init__(self):
        self.directory = Directory(100, (), "127.0.0.1")
        address = self.directory.start()
        self.link, self.other = (Link(address, timeout_s=PATIENCE_S) for _ in range(2))
        declaration = PartitionDeclaration.checked("p", ["x"], 100, ["train", "score"])
        self.link.ask("register", p.Register(declaration), type(None))

    def put(self, ids):
        """A put that is committed and still entering; its session."""
        with self.link.session("put") as session:
            kinds = {"x": "torch.int64"}
            session.ask(p.BeginPut("p", ids, kinds, [], "n", None, PATIENCE_S), p.PutAnswer)
            session.ask(p.CommitPut(None, entering=True), type(None))
            session.keep()
        return session

    def claim(self, task, size, lease_s=None):
        wanted = ClaimRequest(task, ("x",), size, lease_s=lease_s)
        return self.other.ask("claim", p.Claim("p", wanted, 0.0), p.ClaimAnswer)

    def clear(self, ids, timeout_s=PATIENCE_S):
        with self.other.session("clear") as session:
            answer = session.ask(p.Clear("p", ids, True, timeout_s), p.ClearAnswer)
            session.ask(p.Dropped(), type(None))
        return [sample_id for group in answer.leftovers for sample_id in group.sample_ids]

    def entered(self, session):
        """What is to be told of the put's consumption, now that it is entered."""
        consumed = session.ask(p.Entered(), list[p.Consumption])
        self.link.end(session)
        return {item.task_name: item.sample_ids for item in consumed}


@pytest.fixture
def asking():
    made = Asking()
    yield made
    made.link.close()
    made.other.close()


def test_a_put_that_is_entering_is_read_and_claimed(asking):
    asking.put(["a", "b"])
    with asking.other.session("get") as session:
        session.ask(p.Read("p", ["a", "b"], ["x"]), p.ReadAnswer)
        session.tell(p.Unpin())
    assert asking.claim("train", 2).sample_ids == ["a", "b"]


def test_who_enters_a_put_reports_what_was_claimed_of_it_meanwhile(asking):
    first, second = asking.put(["a", "b"]), asking.put(["b", "c"])
    assert asking.claim("train", 3).entered == []
    lease = asking.claim("score", 2, lease_s=60.0)
    assert lease.entered == []
    settle = p.Settle("p", lease.token, ["b"], "acknowledge")
    assert asking.other.ask("acknowledge", settle, list[str]) == []
    assert asking.entered(first) == {"train": ["a"]}  # "b" is still on its way in the second
    assert asking.entered(second) == {"train": ["b", "c"], "score": ["b"]}
    assert asking.claim("score", 1).entered == ["c"]
    settle = p.Settle("p", lease.token, ["a"], "acknowledge")
    assert asking.other.ask("acknowledge", settle, list[str]) == ["a"]
    assert not asking.directory.leftovers


def test_consumption_that_was_reset_is_not_told_with_the_put(asking):
    session = asking.put(["a", "b", "c"])
    asking.claim("train", 3)
    asking.claim("score", 1)
    reset = p.ResetConsumption("p", "train", ["a", "c"])
    assert asking.other.ask("reset", reset, int) == 2
    assert asking.claim("train", 1).sample_ids == ["a"]
    reset = p.ResetConsumption("p", "score", ["a", "b"])
    assert asking.other.ask("reset", reset, int) == 1
    assert asking.entered(session) == {"train": ["a", "b"]}
    assert asking.claim("train", 1).entered == ["c"]


def test_a_clear_waits_until_a_put_is_entered(asking):
    session = asking.put(["a"])
    cleared = []
    clearer = threading.Thread(target=lambda: cleared.extend(asking.clear(["a"])))
    clearer.start()
    counts = p.Count("p", "train", ["x"])
    while asking.link.ask("count", counts, TaskCounts).cleared == 0:
        pass  # the clear has been decided, and now waits for the put
    assert cleared == []
    asking.entered(session)
    clearer.join(PATIENCE_S)
    assert cleared == ["a"]
    assert not asking.directory.leftovers


def test_a_clear_whose_time_is_over_leaves_the_row_to_the_next(asking):
    session = asking.put(["a"])
    assert asking.clear(["a"], timeout_s=0.0) == []
    with asking.other.session("get") as reading, pytest.raises(MissingDataError):
        reading.ask(p.Read("p", ["a"], ["x"]), p.ReadAnswer)
    asking.entered(session)
    assert asking.clear(["nothing"]) == ["a"]


def test_a_client_that_dies_while_it_enters_holds_nobody_up(asking):
    session = asking.put(["a", "b"])
    asking.claim("train", 1)
    session.close()
    assert asking.clear(["a"]) == ["a"]
    assert asking.claim("train", 1).entered == ["b"]
    assert not asking.directory.leftovers
