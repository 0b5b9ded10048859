"""Lost connections to the directory: closed, reset, or to a machine that is gone. No Ray.

Imports internals: tests check sockets and their options.
"""

from __future__ import annotations

import inspect
import socket
import struct
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from dataplane_core import (
    DataPlaneError,
    InvalidRequestError,
    PartitionSummary,
    UnavailableError,
    errors,
)
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory import server, wire
from dataplane_tq.mirror import engine
from dataplane_tq.packed.layout import FieldLayout
from dataplane_tq.packed.unit_wire import UnitSpec

TIMEOUT_S = 20.0
SOON_S = 5.0
WANTED = ClaimRequest("train", ("x",), 2, blocking=True)


def partitions(link):
    return link.ask("list", p.ListPartitions(), list[PartitionSummary])


def wait_until_read(stepped, session):
    """Wait until the directory has read the session's request."""
    port = session.connection.getsockname()[1]
    stepped.until(lambda: all(line[4] == "00000000:00000000" for line in sockets_of(port)))
    partitions(stepped.link)


def sockets_of(port):
    """Return the established sockets of this machine with the port on either end."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mark = f":{port:04X}"
    return [line for line in lines if line[3] == "01" and mark in (line[1][-5:], line[2][-5:])]


def test_both_ends_of_a_connection_send_keepalive_probes(
    stepped,
):
    def watched():
        timers = [line[5].split(":") for line in sockets_of(port)]
        # Kind 02 is the keep-alive timer; ticks are hundredths of a second.
        return [kind == "02" and int(ticks, 16) <= 310 for kind, ticks in timers] == [True, True]

    with stepped.link.session("look") as session:
        session.ask(p.ListPartitions(), list[PartitionSummary])
        port = session.connection.getsockname()[1]
        stepped.until(watched)


WITHOUT_A_LINK = """
import subprocess, sys, threading, time
from dataplane_core import UnavailableError
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.server import Directory
from dataplane_tq.directory.wire import Link

def lo(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

lo("up")
directory = Directory(100, [], "127.0.0.1")
link = Link(directory.start(), timeout_s=20)
link.ask("register", p.Register(PartitionDeclaration.checked("p", ["x"], 2, ["train"])), type(None))
errors, ends = [], []
connected = threading.Barrier(3)

def claim(when):
    with link.session("claim") as session:
        session.ask(p.ListPartitions(), list)
        connected.wait(20)
        when.wait()
        try:
            session.ask(p.Claim("p", ClaimRequest("train", ("x",), 2, blocking=True), 3600.0),
                        p.ClaimAnswer, 3600.0)
        except UnavailableError as error:
            errors.append(error)
            ends.append(time.monotonic())

def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)

cut, now = threading.Event(), threading.Event()
now.set()
claims = [threading.Thread(target=claim, args=[when], daemon=True) for when in (now, cut)]
with link.session("put") as session:
    session.ask(p.BeginPut("p", ["a"], {"x": "torch.int64"}, [], "n", None, 5.0), p.PutAnswer)
    for thread in claims:
        thread.start()
    connected.wait(20)
    until(lambda: directory.store._changed.get("p"))  # the first claim is blocked
    started = time.monotonic()
    lo("down")
    cut.set()
    until(lambda: not directory.store.ledger.partition("p").reserved)
    ends.append(time.monotonic())
    for thread in claims:
        thread.join(20)
    print(ends, *errors, sep="\\n")
    lo("up")
assert Link(link._address, timeout_s=20).ask("list", p.ListPartitions(), list)
assert len(errors) == 2
assert min(ends) - started > 5, "a moment of silence ended something"
print("done")
"""


@pytest.mark.slow
@pytest.mark.debian("iproute2")
def test_puts_and_claims_of_a_silent_machine_end_in_seconds():
    command = ["unshare", "--user", "--map-root-user", "--net"]
    if subprocess.run([*command, "ip", "link"], capture_output=True).returncode:
        pytest.skip("needs a kernel with user namespaces")
    ran = subprocess.run(
        [*command, sys.executable, "-c", WITHOUT_A_LINK],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout.endswith("done\n"), ran.stdout + ran.stderr


@pytest.fixture
def both_ends(monkeypatch):
    """Yield a session with a directory in this process, and its sockets: client, server."""
    served = []

    class Recorded(server.Connection):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            served.append(self._socket)

    monkeypatch.setattr(server, "Connection", Recorded)
    directory = server.Directory(20_000, [UnitSpec("u0", "node", 1 << 20)], "127.0.0.1")
    link = wire.Link(directory.start(), timeout_s=TIMEOUT_S)
    declaration = PartitionDeclaration.checked("p", ["x"], 0, ["train"])
    link.ask("register", p.Register(declaration), type(None))
    with link.session("test") as session:
        (server_socket,) = served
        yield session, (session.connection, server_socket)
    link.close()


def test_large_messages_to_a_stopped_process_have_no_time_limit(
    both_ends,
):
    """Check that a stopped process does not count as gone because its receive buffer is full."""
    session, ends = both_ends
    ids = [f"sample {i}" for i in range(10_000)]
    layout = FieldLayout("x", "torch.int64", False, (), b"", 8, len(ids))
    begin = p.BeginPut("p", ids, {"x": layout.kind}, [layout], "node", None, TIMEOUT_S)
    limits = []

    def ask(request, answer):
        session.ask(request, answer)
        limits.append(
            tuple(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for end in ends)
        )

    ask(begin, p.PutAnswer)  # a large request
    ask(p.CommitPut(None), type(None))
    ask(p.Read("p", ids[::-1], ["x"]), p.ReadAnswer)  # a large request and a large answer
    ask(p.ListPartitions(), list[PartitionSummary])
    ask(p.ListSamples("p", 0, 1000), list)  # a large answer
    assert limits == [(0, 10_500), (10_500, 10_500), (0, 0), (10_500, 10_500), (10_500, 0)]


def test_claim_with_a_reset_connection_takes_no_sample(stepped):
    with stepped.link.session("claim") as session:
        session.detach()
        session.send(p.Claim("p", WANTED, 60.0))
        wait_until_read(stepped, session)
        reset = struct.pack("ii", 1, 0)
        session.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    session.close()
    stepped.put(["a", "b"])
    assert stepped.claim(2).sample_ids == ["a", "b"]


def test_kept_session_outlives_its_link(stepped):
    link = wire.Link(stepped.link._address, timeout_s=TIMEOUT_S)
    with link.session("put") as session:
        session.detach()
    link.close()
    assert session.ask(p.ListPartitions(), list)
    link.end(session)
    assert session.connection.fileno() == -1


def test_idle_connections_are_few_and_replaced_once_closed(stepped):
    with ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(stepped.link.session("test"))
    assert len(stepped.link._idle) == 8
    for idle in stepped.link._idle:
        idle.shutdown(socket.SHUT_RDWR)
    assert partitions(stepped.link)


def test_oversized_request_is_refused_before_sending(stepped, monkeypatch):
    monkeypatch.setattr(wire, "MAX_FRAME", 10_000)
    ids = [f"sample {i}" for i in range(1000)]
    with pytest.raises(InvalidRequestError, match=r"put: .* has \d{5} bytes, .* limit is 10000"):
        stepped.link.ask("put", p.Clear("p", ids, False, 1.0), p.ClearAnswer)
    assert partitions(stepped.link)


UNKNOWN = """
from dataplane_core import PartitionNotFoundError
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.server import Directory
from dataplane_tq.directory.wire import Link
directory = Directory(100, [], "127.0.0.1")
link = Link(directory.start(), timeout_s=20)
for i in range(100):
    try:
        link.ask("put", p.BeginPut(str(i), ["a"], {}, [], "n", None, 0.0), p.PutAnswer)
    except PartitionNotFoundError:
        link.ask("clear", p.Clear(str(i), ["a"], False, 0.0), p.ClearAnswer)
        link.close()
        link = Link(link._address, timeout_s=20)
while directory.store.backlog:
    pass
"""


def test_requests_for_unknown_partitions_leave_no_backlog():
    subprocess.run([sys.executable, "-c", UNKNOWN], check=True, timeout=60)


class Actor:
    """Actor handle whose probe always has the same outcome."""

    def __init__(self, outcome):
        self.outcome = outcome

    @property
    def __ray_ready__(self):
        return self

    def remote(self):
        return self


def test_actor_that_is_briefly_unreachable_is_not_dead(monkeypatch):
    """Ray raises `ActorUnavailableError` when the connection of a living actor breaks."""

    def get(probe, timeout):
        raise probe.outcome

    monkeypatch.setattr(engine.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(engine.ray, "wait", lambda probes, num_returns, timeout: (probes, []))
    monkeypatch.setattr(engine.ray, "get", get)
    away = Actor(ActorUnavailableError("connection broke", None))
    assert engine.first_dead({"unit": away}) is None
    assert "controller is dead" in engine.first_dead(
        {"unit": away, "controller": Actor(ActorDiedError())}
    )


def test_every_error_class_survives_serialization():
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, DataPlaneError):
            assert type(wire.Failure.of(kind("text")).raised()) is kind, name
    assert isinstance(wire.Failure("SystemExit", "no").raised(), UnavailableError)
