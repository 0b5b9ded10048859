"""Puts that are visible, but not yet reported to TransferQueue's controller.

Imports internals: tests pause between a put and its report.
"""

import asyncio
import threading
from types import SimpleNamespace

import pytest
from directory_calls import TIMEOUT_S, Calls, until
from structlog.testing import capture_logs

from dataplane_core import MissingDataError
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.server import Directory
from dataplane_tq.directory.wire import Link
from dataplane_tq.mirror import rows
from dataplane_tq.mirror.engine import Engine
from dataplane_tq.mirror.reporter import Reporter


class DirectoryClient(Calls):
    """Directory in this process, and a client that puts without a report."""

    def __init__(self):
        self.directory = Directory(100, (), "127.0.0.1")
        address = self.directory.start()
        super().__init__(Link(address, timeout_s=TIMEOUT_S))
        self.register(tasks=["train", "score"])

    def put(self, ids):
        """Commit a put without its report; return the session."""
        with self.link.session("put") as session:
            kinds = {"x": "torch.int64"}
            session.ask(p.BeginPut("p", ids, kinds, [], "n", None, TIMEOUT_S), p.PutAnswer)
            session.ask(p.CommitPut(None, will_report=True), type(None))
            session.detach()
        return session

    def report(self, session):
        """Report the put; return the consumption to report with it."""
        consumed = session.ask(p.Reported(), list[p.Consumption])
        self.link.end(session)
        return {item.task_name: item.sample_ids for item in consumed}


@pytest.fixture
def client():
    client = DirectoryClient()
    yield client
    client.link.close()


def test_unreported_put_is_read_and_claimed(client):
    client.put(["a", "b"])
    with client.link.session("get") as session:
        session.ask(p.Read("p", ["a", "b"], ["x"]), p.ReadAnswer)
        session.send(p.Unpin())
    assert client.claim(2).sample_ids == ["a", "b"]


def test_report_of_a_put_includes_claims_made_meanwhile(client):
    first, second = client.put(["a", "b"]), client.put(["b", "c"])
    assert client.claim(3).mirrored_ids == []
    lease = client.claim(2, task="score", lease_s=60.0)
    assert lease.mirrored_ids == []
    acknowledgment = p.UpdateLease("p", lease.token, ["b"], "acknowledge")
    assert client.ask(acknowledgment, list[str]) == []
    assert client.report(first) == {"train": ["a"]}  # the second put will report "b"
    assert client.report(second) == {"train": ["b", "c"], "score": ["b"]}
    assert client.claim(1, task="score").mirrored_ids == ["c"]
    acknowledgment = p.UpdateLease("p", lease.token, ["a"], "acknowledge")
    assert client.ask(acknowledgment, list[str]) == ["a"]
    assert not client.directory.store.backlog


def test_reset_consumption_is_not_reported_with_the_put(client):
    session = client.put(["a", "b", "c"])
    client.claim(3)
    client.claim(1, task="score")
    reset = p.ResetConsumption("p", "train", ["a", "c"])
    assert client.ask(reset, int) == 2
    assert client.claim(1).sample_ids == ["a"]
    reset = p.ResetConsumption("p", "score", ["a", "b"])
    assert client.ask(reset, int) == 1
    assert client.report(session) == {"train": ["a", "b"]}
    assert client.claim(1).mirrored_ids == ["c"]


def test_clear_waits_for_the_report_of_a_put(client):
    session = client.put(["a"])
    cleared = []
    clearer = threading.Thread(target=lambda: cleared.extend(client.clear(["a"])))
    clearer.start()
    until(lambda: client.counts().cleared)  # the clear is applied, and blocked on the report
    assert cleared == []
    client.report(session)
    clearer.join(TIMEOUT_S)
    assert cleared == ["a"]
    assert not client.directory.store.backlog


def test_expired_clear_leaves_its_rows_to_the_next_clear(client):
    session = client.put(["a"])
    assert client.clear(["a"], timeout_s=0.0) == []
    with client.link.session("get") as reading, pytest.raises(MissingDataError):
        reading.ask(p.Read("p", ["a"], ["x"]), p.ReadAnswer)
    client.report(session)
    assert client.clear(["nothing"]) == ["a"]


def test_client_that_dies_in_its_report_blocks_no_other(client):
    session = client.put(["a", "b"])
    client.claim(1)
    session.close()
    assert client.clear(["a"]) == ["a"]
    assert client.claim(1).mirrored_ids == ["b"]
    assert not client.directory.store.backlog


@pytest.mark.parametrize("is_silent", [True, False])
def test_failed_report_of_claims_stops_no_later_report(client, monkeypatch, is_silent):
    reports = []

    async def connect(*_):
        return SimpleNamespace(close=lambda: None)

    async def enter(_client, sample_ids, *_):
        reports.append(sample_ids)

    async def consume(*_):
        if is_silent:
            await asyncio.Event().wait()
        raise TypeError("answer of another version")

    monkeypatch.setattr(Engine, "_connect", connect)
    monkeypatch.setattr(rows, "enter", enter)
    monkeypatch.setattr(rows, "consume", consume)
    first, second = client.put(["a"]), client.put(["b"])
    client.claim(1)
    engine = Engine(None, "", {}, {}, timeout_s=0.2)
    reporter = Reporter(engine, client.link)
    try:
        with capture_logs() as logs:
            reporter.report_put(first, "p", ["a"], None, [], ["x"])
            reporter.report_put(second, "p", ["b"], None, [], ["x"])
            until(lambda: reports == [["a"], ["b"]])
            reporter.report_claim(["b"], "p", "train")
            until(lambda: len(logs) == 2)
    finally:
        engine.close()
    assert {log["event"] for log in logs} == {"transfer_queue_report_failed"}
