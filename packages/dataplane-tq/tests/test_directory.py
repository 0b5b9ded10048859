"""The directory as a server: processes that die or stop, hostile bytes, many clients. No Ray.

Imports internals: tests send hostile bytes and requests in any order, which a client never does.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from directory_calls import TIMEOUT_S, Calls, until
from hypothesis import example, given
from hypothesis import strategies as st
from stepped_store import CLIENT, SERVERS, Child

from dataplane_core import (
    CapacityExceeded,
    DataPlaneError,
    InvalidRequestError,
    MissingDataError,
    PartitionNotFoundError,
    UnavailableError,
)
from dataplane_tq.directory import connection
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.operations import State
from dataplane_tq.directory.server import Directory
from dataplane_tq.directory.wire import HEADER, Address, Link
from dataplane_tq.packed.layout import FieldLayout


class Served(Calls):
    """Directory in a separate process, and a link to it."""

    def __init__(self, capacity=100, unit_bytes=(), code=SERVERS):
        self.process = Child(code, "directory", capacity, *unit_bytes)
        self.encoded_address = self.process.read_line()
        self.address = msgspec.json.decode(self.encoded_address, type=Address)
        super().__init__(Link(self.address, timeout_s=TIMEOUT_S))
        self.children = []

    def child(self, request):
        """Start a process that sends a request in a session; return it after the answer."""
        action = f"with link.session('child') as s: s.ask({request}, object); step('answered')"
        child = Child(CLIENT.replace("{action}", action), self.encoded_address, "null", "tcp")
        self.children.append(child)
        assert child.read_line() == "answered"
        return child

    def close(self):
        self.link.close()
        for process in [*self.children, self.process]:
            process.close()


@pytest.fixture
def serve():
    running = []

    def make(**options):
        running.append(Served(**options))
        running[-1].register()
        return running[-1]

    yield make
    for served in running:
        served.close()


@pytest.fixture
def served(serve):
    return serve()


def test_later_clear_drops_rows_that_a_stopped_reader_held(served):
    served.put(["a", "b", "c"])
    child = served.child("p.Read('p', ['a', 'b'], ['x'])")
    child.stop()
    assert served.clear(["a", "c"], timeout_s=0.1) == ["c"]
    with pytest.raises(DataPlaneError, match="still being cleared or read"):
        served.put(["a"], timeout_s=0.1)
    child.kill()
    assert served.clear(["b"]) == ["a", "b"]
    served.put(["a"])


def test_next_put_drops_rows_of_a_killed_clear(served):
    served.put(["a", "b"])
    served.child("p.Clear('p', ['a'], False, 5.0)").kill()
    answer = served.put(["a"])
    assert [group.sample_ids for group in answer.orphans] == [["a"]]


@pytest.mark.parametrize("again", ["before the put ends", "after the put"])
def test_next_put_drops_rows_written_after_a_partition_clear(served, again):
    served.put(["b"])
    with served.link.session("put") as session:
        begin = p.BeginPut("p", ["a", "b"], {"x": "torch.int64"}, [], "n", None, TIMEOUT_S)
        session.ask(begin, p.PutAnswer)
        served.clear(None)
        # The put's client may still write to TransferQueue now.
        if again == "before the put ends":
            served.register()
        with pytest.raises(PartitionNotFoundError):
            session.ask(p.CommitPut(None), type(None))
    if again == "after the put":
        served.register()
    (orphans,) = served.put(["a", "b", "c"]).orphans
    assert (orphans.sample_ids, orphans.fields) == (["a", "b"], ["x"])
    assert served.clear(None) == ["a", "b", "c"]


@pytest.fixture(scope="module")
def overlapping():
    served = Served(unit_bytes=[1 << 20])
    served.names = map(str, itertools.count())
    yield served
    served.close()


some_ids = st.lists(st.sampled_from("abcd"), min_size=1, unique=True)


@given(
    steps=st.lists(st.tuples(st.integers(0, 2), some_ids, st.booleans(), some_ids), max_size=12),
)
@example(
    [
        (0, ["a", "b"], True, ["b"]),
        (1, ["b", "c"], True, ["c"]),
        (0, [], True, []),
        (1, [], True, []),
    ]
)
def test_overlapping_puts_are_read_as_last_committed(overlapping, steps):
    """Each step advances one of three connections: begin a put, commit it, report it."""
    name = next(overlapping.names)
    overlapping.register(name)
    begun, entering, committed, reads = {}, set(), {}, []
    with ExitStack() as ends:
        sessions = [ends.enter_context(overlapping.link.session("put")) for _ in range(3)]
        for at, ids, enters, read_ids in steps:
            session = sessions[at]
            if at in entering:
                session.ask(p.Reported(), list[p.Consumption])
                entering.remove(at)
            elif at in begun:
                session.ask(p.CommitPut(None, enters), type(None))
                committed |= begun.pop(at)
                entering |= {at} if enters else set()
            else:
                layout = FieldLayout("x", "torch.int64", False, (), b"", 8, len(ids))
                begin = p.BeginPut(name, ids, {"x": layout.kind}, [layout], "node", None, 5.0)
                (block,) = session.ask(begin, p.PutAnswer).blocks
                begun[at] = {sample_id: (block.id, i) for i, sample_id in enumerate(ids)}
                reads += [ids, read_ids]
            for wanted in reads:
                if committed.keys() >= set(wanted):
                    read = cells_of(overlapping, name, wanted)
                    assert read == [committed[sample_id] for sample_id in wanted]
        for at in begun:
            sessions[at].ask(p.CommitPut(None), type(None))
        for at in entering:
            sessions[at].ask(p.Reported(), list[p.Consumption])
    overlapping.clear(None, partition=name)


LAYOUT = FieldLayout("x", "torch.int64", False, (), b"", 8, 1)
REQUESTS = {
    "begin": lambda name: p.BeginPut(name, ["b"], {"x": LAYOUT.kind}, [LAYOUT], "n", None, 0.0),
    "check": lambda name: p.CheckPut(),
    "commit": lambda name: p.CommitPut(None),
    "commit, to be reported": lambda name: p.CommitPut(None, will_report=True),
    "reported": lambda name: p.Reported(),
    "read": lambda name: p.Read(name, ["a"], ["x"]),
    "clear": lambda name: p.Clear(name, ["a"], False, 0.0),
    "next": lambda name: p.NextOrphans(),
    "dropped": lambda name: p.Dropped(),
}


@given(st.lists(st.sampled_from(list(REQUESTS)), max_size=10))
def test_out_of_order_requests_are_refused_and_leave_nothing(overlapping, steps):
    name = next(overlapping.names)
    overlapping.register(name)
    overlapping.put(["a"], layouts=[LAYOUT], partition=name)
    state, cleared = State.IDLE, False
    with overlapping.link.session("any") as session:
        for step in steps:
            request = REQUESTS[step](name)
            allowed = connection.TRANSITIONS[type(request)].get(state)
            if allowed is None:
                with pytest.raises(InvalidRequestError, match=f"has {state.value} under way"):
                    session.ask(request, Any)
            elif step == "read" and cleared:
                with pytest.raises(MissingDataError):
                    session.ask(request, Any)
            else:
                session.ask(request, Any)
                wanted = State.REPORTING if "reported" in step else State.IDLE
                state = wanted if len(allowed) > 1 else min(allowed, key=str)
                cleared = cleared or step == "clear"
        session.detach()
        session.close()  # as if the process died here
    overlapping.clear(None, partition=name)
    until(lambda: overlapping.used() == 0)


def cells_of(served, name, ids):
    """Return the block id and the row in the block of each sample."""
    with served.link.session("read") as session:
        (part,) = session.ask(p.Read(name, ids, ["x"]), p.ReadAnswer).parts
        session.send(p.Unpin())
    return [(part.blocks[at].id, int(row)) for at, row in zip(*part.locate(), strict=True)]


def test_put_waits_for_bytes_and_reports_the_free_ones(serve):
    served = serve(unit_bytes=[1 << 16])
    layout = FieldLayout("x", "torch.int64", False, (6000,), b"", 48_000, 1)
    served.put(["a"], layouts=[layout])
    with pytest.raises(CapacityExceeded, match=r"48000 bytes, \d+ of 65536 free"):
        served.put(["b"], layouts=[layout], timeout_s=0.05)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.put, ["b"], layouts=[layout])
        served.clear(["a"])
        waiting.result(TIMEOUT_S)
    assert served.counts().put == 2
    totals = served.ask(p.ReadTotals(), dict[str, int])
    assert (totals["puts"], totals["puts_aborted"]) == (2, 0)


def exchange(served, data):
    """Send raw bytes; return the bytes received until the server closed the connection."""
    with socket.create_connection((served.address.host, served.address.port)) as raw:
        raw.settimeout(TIMEOUT_S)
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        received = b""
        while part := raw.recv(4096):
            received += part
        return received


def test_put_blocked_by_fragmentation_names_the_cause(serve):
    served = serve(unit_bytes=[1 << 16])
    ids = [f"s{i}" for i in range(8)]
    for sample_id in ids:
        layout = FieldLayout("x", "torch.uint8", False, (8192,), b"", 8192, 1)
        served.put([sample_id], kind="torch.uint8", layouts=[layout])
    served.clear(ids[::2])
    layout = FieldLayout("x", "torch.uint8", False, (16384,), b"", 16384, 1)
    message = r"16384 bytes, 32768 of 65536 free in pieces of at most 8192: the free memory is frag"
    with pytest.raises(CapacityExceeded, match=message):
        served.put(["large"], kind="torch.uint8", layouts=[layout], timeout_s=0.05)


def test_clear_of_a_dead_client_frees_the_remaining_pages(serve):
    rows = 3000
    served = serve(capacity=2 * rows, unit_bytes=[64 * rows])
    ids = [f"s{i}" for i in range(rows)]
    layout = FieldLayout("x", "torch.uint8", False, (1,), b"", 1, rows)
    served.put(ids, kind="torch.uint8", layouts=[layout])
    child = served.child("p.Clear('p', None, False, 5.0)")
    with pytest.raises(PartitionNotFoundError):
        served.counts()
    child.kill()
    served.register()
    layout = FieldLayout("x", "torch.uint8", False, (1,), b"", 1, 1)
    served.put(["again"], kind="torch.uint8", layouts=[layout])
    assert served.counts().put == 1
    assert served.used() <= 64
    assert len(served.clear(None)) == rows + 1


def test_malformed_requests_are_refused_and_logged_without_ids(served):
    request = {"type": "Read", "partition_id": "p", "sample_ids": ["secret-id", 7], "fields": []}
    bodies = [msgspec.msgpack.encode(request), b"\xa9secret-id", b"\xc1", b"\x93\x01", b"\x80"]
    for body in bodies * 200:
        answer = exchange(served, served.address.token + HEADER.pack(len(body)) + body)
        assert b"InvalidRequestError" in answer
    assert served.counts().put == 0
    served.process.process.terminate()
    logged = served.process.stdout.read()
    assert logged.count("\n") == 1, logged
    assert "request_refused" in logged
    assert "127.0.0.1" in logged
    assert "secret" not in logged


def test_silent_connections_do_not_exhaust_the_limit():
    # A small limit of descriptors, so that a few connections exceed it.
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))"
    served = Served(code=few + SERVERS)
    address = served.address.host, served.address.port
    with ExitStack() as silent:
        silent.callback(served.close)
        for _ in range(300):
            silent.enter_context(socket.create_connection(address))
        began = time.monotonic()
        assert served.ask(p.ListPartitions(), list) == []
        assert time.monotonic() - began < 4.0  # before the time-out of the silent connections


def test_incomplete_request_closes_its_connection(monkeypatch):
    monkeypatch.setattr(connection, "_REQUEST_S", 0.1)
    address = Directory(100, [], "127.0.0.1").start()
    with socket.create_connection((address.host, address.port)) as half:
        half.settimeout(TIMEOUT_S)
        half.sendall(address.token + HEADER.pack(100) + b"half")
        assert half.recv(1) == b""


def test_host_that_is_not_local_is_refused_at_once():
    with pytest.raises(UnavailableError, match=r"cannot listen on 192\.0\.2\.1: .*assign"):
        Directory(100, [], "192.0.2.1").start()


def test_wrong_token_and_oversized_frame_get_no_answer(served):
    request = HEADER.pack(5) + b"hello"
    assert exchange(served, bytes(32) + request) == b""
    assert exchange(served, served.address.token + HEADER.pack(0xFFFFFFFF)) == b""
    assert served.counts().put == 0


def test_link_works_on_both_sides_of_a_fork(served):
    served.counts()
    child = os.fork()
    if child == 0:
        try:
            served.put(["from the child"])
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert served.counts().put == 1
