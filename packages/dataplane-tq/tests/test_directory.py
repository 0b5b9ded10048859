"""The directory as a server: processes that die or stop, hostile bytes, many clients. No Ray."""

from __future__ import annotations

import inspect
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dataplane_core import (
    CapacityExceeded,
    ClaimTimeoutError,
    DataPlaneError,
    DeadlineExceededError,
    LeaseLostError,
    MissingDataError,
    PartitionNotFoundError,
    SchemaMismatchError,
    StorageSummary,
    TaskCounts,
    UnavailableError,
    errors,
)
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest
from dataplane_tq import connection
from dataplane_tq import protocol as p
from dataplane_tq.directory import Directory
from dataplane_tq.packed.layout import FieldLayout
from dataplane_tq.wire import HEADER, Address, Failure, Link

PATIENCE_S = 20.0

SERVER = """
import sys, threading
from dataplane_tq.directory import Directory
from dataplane_tq.packed.catalogue import UnitSpec
units = [UnitSpec(f"u{i}", "node", int(size)) for i, size in enumerate(sys.argv[2:])]
address = Directory(int(sys.argv[1]), units, "127.0.0.1").start()
assert "torch" not in sys.modules and "transfer_queue" not in sys.modules
print(address.port, address.token.hex(), flush=True)
threading.Event().wait()
"""

CLIENT = """
import sys, threading
from dataplane_core.ledger import ClaimRequest
from dataplane_tq import protocol as p
from dataplane_tq.wire import Address, Link
link = Link(Address("127.0.0.1", int(sys.argv[1]), bytes.fromhex(sys.argv[2])), timeout_s=20)
with link.session("child") as session:
    {action}
    print("done", flush=True)
    threading.Event().wait()
"""


def started(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


def end(process):
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.communicate(timeout=PATIENCE_S)


class Served:
    """A directory in a process of its own, and a link to it."""

    def __init__(self, capacity=100, unit_bytes=()):
        self.process = started(SERVER, capacity, *unit_bytes)
        self.port, self.token = self.process.stdout.readline().split()
        self.address = Address("127.0.0.1", int(self.port), bytes.fromhex(self.token))
        self.link = Link(self.address, timeout_s=PATIENCE_S)
        self.children = []

    def ask(self, request, answer=None, timeout_s=None):
        return self.link.ask("test", request, answer, timeout_s)

    def register(self, num_samples=100, name="p"):
        declaration = PartitionDeclaration.checked(name, ["x"], num_samples, ["train"])
        self.ask(p.Register(declaration))

    def put(self, ids, kind="torch.int64", tags=None, timeout_s=PATIENCE_S, layouts=()):
        with self.link.session("put") as session:
            request = p.BeginPut("p", ids, {"x": kind}, list(layouts), "node", None, timeout_s)
            answer = session.ask(request, p.PutAnswer)
            session.ask(p.CommitPut(tags), type(None))
        return answer

    def claim(self, size, *, timeout_s=0.0, lease_s=None, link=None):
        wanted = ClaimRequest("train", ("x",), size, whole=timeout_s > 0, lease_s=lease_s)
        request = p.Claim("p", wanted, timeout_s)
        return (link or self.link).ask("claim", request, p.ClaimAnswer, timeout_s + PATIENCE_S)

    def clear(self, ids, timeout_s=PATIENCE_S, name="p"):
        with self.link.session("clear") as session:
            answer = session.ask(p.Clear(name, ids, False, timeout_s), p.ClearAnswer)
            groups = list(answer.leftovers)
            while answer.more:
                answer = session.ask(p.NextLeftovers(), p.ClearAnswer)
                groups += answer.leftovers
            session.ask(p.Dropped(), type(None))
        return sorted(name for group in groups for name in group.sample_ids)

    def counts(self):
        return self.ask(p.Count("p", "train", ["x"]), TaskCounts)

    def usage(self):
        return sum(unit.used for unit in self.ask(p.ListStorage(), list[StorageSummary]))

    def child(self, action):
        """Another process that does something in one session and then keeps the session open."""
        child = started(CLIENT.replace("{action}", action), self.port, self.token)
        self.children.append(child)
        return child

    def close(self):
        self.link.close()
        for process in [*self.children, self.process]:
            end(process)


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


def stop(process):
    process.send_signal(signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])


BEGIN_PUT = (
    "session.ask(p.BeginPut('p', ['a', 'b'], {'x': 'torch.int64'}, [], 'n', None, 5.0), "
    "p.PutAnswer)"
)
READ = "session.ask(p.Read('p', ['a', 'b'], ['x']), p.ReadAnswer)"
CLAIM = (
    "session.ask(p.Claim('p', ClaimRequest('train', ('x',), 2, lease_s={lease}), 0.0), "
    "p.ClaimAnswer)"
)
WAIT_FOR_A_CLAIM = (
    "print('waiting', flush=True); "
    "session.ask(p.Claim('p', ClaimRequest('train', ('x',), 2, whole=True), 60.0), p.ClaimAnswer)"
)


def wait_for(child, word="done"):
    assert child.stdout.readline().strip() == word


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "the state did not come"
        threading.Event().wait(0.01)


def test_a_producer_killed_in_the_middle_of_a_put_leaves_nothing_behind(serve):
    served = serve(capacity=2)
    child = served.child(BEGIN_PUT)
    wait_for(child)
    with pytest.raises(CapacityExceeded):
        served.put(["c"], timeout_s=0.05)
    with pytest.raises(SchemaMismatchError):
        served.put([], kind="torch.bool")
    child.kill()
    answer = served.put(["a", "c"])
    assert [group.sample_ids for group in answer.leftovers] == [["a"]]
    assert served.counts() == TaskCounts(
        put=2, ready=2, not_ready=0, leased=0, acknowledged=0, cleared=0
    )


def test_a_claimer_killed_while_it_waits_takes_no_sample_with_it(served):
    child = served.child(WAIT_FOR_A_CLAIM)
    wait_for(child, "waiting")
    child.kill()
    child.wait(PATIENCE_S)
    served.put(["a", "b"])
    assert served.claim(2).sample_ids == ["a", "b"]


def test_what_a_killed_holder_had_claimed_is_handed_out_again(served):
    served.put(["a", "b"])
    child = served.child(CLAIM.format(lease=0.3))
    wait_for(child)
    child.kill()
    assert served.claim(2, timeout_s=PATIENCE_S).sample_ids == ["a", "b"]


def test_a_stopped_holder_that_wakes_after_its_lease_is_refused(served):
    served.put(["a", "b"])
    settle = (
        "token = " + CLAIM.format(lease=0.3) + ".token; print(token, flush=True); "
        "sys.stdin.readline()"
    )
    child = served.child(settle)
    token = child.stdout.readline().strip()
    stop(child)
    again = served.claim(2, timeout_s=PATIENCE_S, lease_s=PATIENCE_S)
    assert again.sample_ids == ["a", "b"]
    with pytest.raises(LeaseLostError, match="expired"):
        served.ask(p.Settle("p", token, ["a", "b"], "acknowledge"), list[str])
    served.ask(p.Settle("p", again.token, ["a", "b"], "acknowledge"), list[str])


def test_a_clear_waits_for_reads_and_goes_on_when_the_reader_is_killed(served):
    served.put(["a", "b", "c"])
    child = served.child(READ)
    wait_for(child)
    with ThreadPoolExecutor(1) as pool:
        clearing = pool.submit(served.clear, ["a", "c"])
        until(lambda: served.counts().cleared == 2)
        with pytest.raises(MissingDataError):
            served.ask(p.Read("p", ["a"], ["x"]), p.ReadAnswer)
        assert not clearing.done()
        child.kill()
        assert clearing.result(PATIENCE_S) == ["a", "c"]


def test_rows_that_a_stopped_reader_holds_are_dropped_by_a_later_clear(served):
    served.put(["a", "b", "c"])
    child = served.child(READ)
    wait_for(child)
    stop(child)
    assert served.clear(["a", "c"], timeout_s=0.1) == ["c"]
    with pytest.raises(DataPlaneError, match="still being cleared or read"):
        served.put(["a"], timeout_s=0.1)
    child.kill()
    child.send_signal(signal.SIGCONT)
    child.wait(PATIENCE_S)
    assert served.clear(["b"]) == ["a", "b"]
    served.put(["a"])


def test_a_clearer_killed_half_way_leaves_its_rows_to_the_next(served):
    served.put(["a", "b"])
    child = served.child("session.ask(p.Clear('p', ['a'], False, 5.0), p.ClearAnswer)")
    wait_for(child)
    child.kill()
    child.wait(PATIENCE_S)
    answer = served.put(["a"])
    assert [group.sample_ids for group in answer.leftovers] == [["a"]]


@pytest.mark.parametrize("again", ["before the put ends", "after the put has ended"])
def test_what_a_put_wrote_after_a_clear_of_its_partition_goes_with_the_next_put(served, again):
    served.put(["b"])
    with served.link.session("put") as session:
        begin = p.BeginPut("p", ["a", "b"], {"x": "torch.int64"}, [], "n", None, PATIENCE_S)
        session.ask(begin, p.PutAnswer)
        served.clear(None)
        # Here its client may still write to TransferQueue.
        if again == "before the put ends":
            served.register()
        with pytest.raises(PartitionNotFoundError):
            session.ask(p.CommitPut(None), type(None))
    if again == "after the put has ended":
        served.register()
    (left,) = served.put(["a", "b", "c"]).leftovers
    assert (left.sample_ids, left.fields) == (["a", "b"], ["x"])
    assert served.clear(None) == ["a", "b", "c"]


def test_bytes_of_a_put_that_dies_are_free_again(serve):
    served = serve(unit_bytes=[1 << 16])
    code = BEGIN_PUT.replace(
        "[], 'n'", "[FieldLayout('x', 'torch.int64', False, (), b'', 8, 2)], 'n'"
    )
    child = served.child("from dataplane_tq.packed.layout import FieldLayout; " + code)
    wait_for(child)
    assert served.usage() > 0
    child.kill()
    until(lambda: served.usage() == 0)


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
def test_overlapping_puts_are_read_as_they_were_last_committed(overlapping, steps):
    """Each step takes one of three connections on: begin a put, commit it, enter it."""
    name = next(overlapping.names)
    overlapping.register(name=name)
    begun, entering, committed, reads = {}, set(), {}, []
    with ExitStack() as ends:
        sessions = [ends.enter_context(overlapping.link.session("put")) for _ in range(3)]
        for at, ids, enters, asked in steps:
            session = sessions[at]
            if at in entering:
                session.ask(p.Entered(), list[p.Consumption])
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
                reads += [ids, asked]
            for wanted in reads:
                if committed.keys() >= set(wanted):
                    read = cells_of(overlapping, name, wanted)
                    assert read == [committed[sample_id] for sample_id in wanted]
        for at in begun:
            sessions[at].ask(p.CommitPut(None), type(None))
        for at in entering:
            sessions[at].ask(p.Entered(), list[p.Consumption])
    overlapping.clear(None, name=name)


def cells_of(served, name, ids):
    """In which block, and at which row of it, the directory says that each sample lies."""
    with served.link.session("read") as session:
        (part,) = session.ask(p.Read(name, ids, ["x"]), p.ReadAnswer).parts
        session.tell(p.Unpin())
    source = np.frombuffer(part.source, np.int32) if part.source else [0] * len(ids)
    rows = np.frombuffer(part.rows, np.int64) if part.rows else range(len(ids))
    return [(part.blocks[at].id, int(row)) for at, row in zip(source, rows, strict=True)]


def test_a_put_waits_for_bytes_and_says_how_many_were_free(serve):
    served = serve(unit_bytes=[1 << 16])
    layout = FieldLayout("x", "torch.int64", False, (6000,), b"", 48_000, 1)
    served.put(["a"], layouts=[layout])
    with pytest.raises(CapacityExceeded, match=r"48000 bytes, \d+ of 65536 free"):
        served.put(["b"], layouts=[layout], timeout_s=0.05)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.put, ["b"], layouts=[layout])
        served.clear(["a"])
        waiting.result(PATIENCE_S)
    assert served.counts().put == 2


def test_a_killed_directory_is_an_error_at_once_also_for_those_who_wait(served):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.claim, 2, timeout_s=600.0, link=served.link)
        served.put(["a"])
        served.process.kill()
        assert isinstance(waiting.exception(PATIENCE_S), UnavailableError)
    with pytest.raises(UnavailableError, match="directory is gone"):
        served.counts()


def test_the_end_of_a_process_that_is_tied_fails_every_request_and_a_stopped_one_fails_none(served):
    tied = served.child("session.ask(p.Tie('controller'), type(None))")
    assert tied.stdout.readline() == "done\n"
    stop(tied)
    served.put(["a"])
    assert served.counts().put == 1
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(served.claim, 2, timeout_s=600.0, link=served.link)
        tied.kill()
        with pytest.raises(UnavailableError, match="controller is dead: its process ended"):
            waiting.result(PATIENCE_S)
    with pytest.raises(UnavailableError, match="controller is dead"):
        served.counts()


def test_a_stopped_directory_is_an_error_at_the_deadline_and_recovers(served):
    stop(served.process)
    try:
        with pytest.raises(DeadlineExceededError, match=r"after 0\.2 s"):
            served.ask(p.Count("p", "train", ["x"]), TaskCounts, timeout_s=0.2)
    finally:
        os.kill(served.process.pid, signal.SIGCONT)
    assert served.counts().put == 0


def test_a_claim_past_its_deadline_says_what_is_missing(served):
    served.put(["a"])
    with pytest.raises(ClaimTimeoutError) as caught:
        served.claim(2, timeout_s=0.05)
    assert (caught.value.ready, caught.value.missing) == (1, 1)


def exchange(served, data):
    """Send raw bytes; what came back before the server closed the connection or fell silent."""
    with socket.create_connection((served.address.host, served.address.port)) as raw:
        raw.settimeout(PATIENCE_S)
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
        received = b""
        while part := raw.recv(4096):
            received += part
        return received


@pytest.mark.parametrize("body", [b"\xc1", b"\x93\x01", b'{"type":"Nothing"}', b"\x80"])
def test_a_malformed_request_is_refused_and_the_server_goes_on(served, body):
    answer = exchange(served, served.address.token + HEADER.pack(len(body)) + body)
    assert b"InvalidRequestError" in answer
    assert served.counts().put == 0


def test_a_put_that_fragmentation_keeps_out_says_so(serve):
    served = serve(unit_bytes=[1 << 16])
    ids = [f"s{i}" for i in range(8)]
    for sample_id in ids:
        layout = FieldLayout("x", "torch.uint8", False, (8192,), b"", 8192, 1)
        served.put([sample_id], kind="torch.uint8", layouts=[layout])
    served.clear(ids[::2])
    layout = FieldLayout("x", "torch.uint8", False, (16384,), b"", 16384, 1)
    said = r"16384 bytes, 32768 of 65536 free in pieces of at most 8192: the free memory is frag"
    with pytest.raises(CapacityExceeded, match=said):
        served.put(["large"], kind="torch.uint8", layouts=[layout], timeout_s=0.05)


def test_a_clear_whose_client_dies_between_pages_frees_the_rest(serve):
    rows = 3000
    served = serve(capacity=2 * rows, unit_bytes=[64 * rows])
    ids = [f"s{i}" for i in range(rows)]
    layout = FieldLayout("x", "torch.uint8", False, (1,), b"", 1, rows)
    served.put(ids, kind="torch.uint8", layouts=[layout])
    child = served.child("session.ask(p.Clear('p', None, False, 5.0), p.ClearAnswer)")
    wait_for(child)
    with pytest.raises(PartitionNotFoundError):
        served.counts()
    child.kill()
    child.wait(PATIENCE_S)
    served.register()
    layout = FieldLayout("x", "torch.uint8", False, (1,), b"", 1, 1)
    served.put(["again"], kind="torch.uint8", layouts=[layout])
    assert served.counts().put == 1
    assert served.usage() <= 64
    assert len(served.clear(None)) == rows + 1


def test_a_whole_clear_tells_of_every_sample_page_by_page(served):
    ids = [f"s{i}" for i in range(100)]
    served.put(ids)
    assert served.clear(None) == sorted(ids)


def test_a_thousand_malformed_requests_log_one_line_without_ids(served):
    request = {"type": "Read", "partition_id": "p", "sample_ids": ["secret-id", 7], "fields": []}
    bodies = [msgspec.msgpack.encode(request), b"\xa9secret-id"]
    for _ in range(500):
        for body in bodies:
            exchange(served, served.address.token + HEADER.pack(len(body)) + body)
    assert served.counts().put == 0
    served.process.terminate()
    logged = served.process.stdout.read()
    assert logged.count("\n") == 1, logged
    assert "request_refused" in logged
    assert "127.0.0.1" in logged
    assert "secret" not in logged


def test_silent_connections_beyond_the_limit_lock_nobody_out():
    # A small limit of descriptors, so that few connections are too many.
    few = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))"
    process = started(few + SERVER, 100)
    port, token = process.stdout.readline().split()
    address = Address("127.0.0.1", int(port), bytes.fromhex(token))
    silent = []
    try:
        silent += [socket.create_connection((address.host, address.port)) for _ in range(300)]
        began = time.monotonic()
        link = Link(address, timeout_s=PATIENCE_S)
        assert link.ask("list", p.ListPartitions(), list) == []
        assert time.monotonic() - began < 4.0  # before the silent ones run into their time-out
        link.close()
    finally:
        for sock in silent:
            sock.close()
        end(process)


def test_a_request_that_is_sent_half_ends_its_connection(monkeypatch):
    monkeypatch.setattr(connection, "_REQUEST_S", 0.1)
    address = Directory(100, [], "127.0.0.1").start()
    with socket.create_connection((address.host, address.port)) as half:
        half.settimeout(PATIENCE_S)
        half.sendall(address.token + HEADER.pack(100) + b"half")
        assert half.recv(1) == b""


def test_a_wrong_token_or_an_endless_frame_gets_no_answer(served):
    request = HEADER.pack(5) + b"hello"
    assert exchange(served, bytes(32) + request) == b""
    assert exchange(served, served.address.token + HEADER.pack(0xFFFFFFFF)) == b""
    assert served.counts().put == 0


def test_two_hundred_clients_at_once_are_all_served(served):
    served.put([f"s{i}" for i in range(100)])
    links = [Link(served.address, timeout_s=PATIENCE_S) for _ in range(200)]
    barrier = threading.Barrier(50)

    def work(link):
        barrier.wait(PATIENCE_S)
        return served.claim(1, link=link).sample_ids

    with ThreadPoolExecutor(50) as pool:
        claimed = [name for ids in pool.map(work, links) for name in ids]
    for link in links:
        link.close()
    assert sorted(claimed) == sorted(f"s{i}" for i in range(100))


def test_a_link_works_on_both_sides_of_a_fork(served):
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


@pytest.mark.parametrize(
    "error",
    [
        ClaimTimeoutError("late", ready=1, missing=2, missing_fields={"x": 3}),
        MissingDataError("gone", sample_ids=["a"], fields=["x"]),
        PartitionNotFoundError("nowhere"),
    ],
)
def test_an_error_crosses_the_wire_with_its_class_text_and_facts(error):
    raised = Failure.of(error).raised()
    assert type(raised) is type(error)
    assert str(raised) == str(error)
    assert vars(raised) == vars(error)


def test_every_error_of_the_tree_can_cross_the_wire():
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, DataPlaneError):
            assert type(Failure.of(kind("text")).raised()) is kind, name
    assert isinstance(Failure("SystemExit", "no").raised(), UnavailableError)
