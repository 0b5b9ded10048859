"""How connections to the directory end: closed, reset, or with a machine that is gone. No Ray."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from dataplane_core import ClosedError, InvalidRequestError, PartitionSummary
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.ledger import ClaimRequest
from dataplane_tq import directory, liveness, wire
from dataplane_tq import protocol as p
from dataplane_tq.packed.catalogue import UnitSpec
from dataplane_tq.packed.layout import FieldLayout

PATIENCE_S = 20.0
SOON_S = 5.0
WANTED = ClaimRequest("train", ("x",), 2, whole=True)


def partitions(link):
    return link.ask("list", p.ListPartitions(), list[PartitionSummary])


def until_it_waits(stepped, session):
    """Until the directory has read what the session asked."""
    port = session.connection.getsockname()[1]
    stepped.until(lambda: all(line[4] == "00000000:00000000" for line in sockets_of(port)))
    partitions(stepped.link)


def sockets_of(port):
    """The established sockets of this machine that have the port on either end."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mark = f":{port:04X}"
    return [line for line in lines if line[3] == "01" and mark in (line[1][-5:], line[2][-5:])]


def test_both_ends_of_a_connection_ask_every_few_seconds_whether_the_other_machine_is_there(
    stepped,
):
    def watched():
        timers = [line[5].split(":") for line in sockets_of(port)]
        # Of keepalive, in hundredths of a second.
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
from dataplane_tq import protocol as p
from dataplane_tq.directory import Directory
from dataplane_tq.wire import Link

def lo(state):
    subprocess.run(["ip", "link", "set", "lo", state], check=True)

lo("up")
directory = Directory(100, [], "127.0.0.1")
link = Link(directory.start(), timeout_s=20)
link.ask("register", p.Register(PartitionDeclaration.checked("p", ["x"], 2, ["train"])), type(None))
errors = []

def claim(when):
    with link.session("claim") as session:
        session.ask(p.ListPartitions(), list)
        when.wait()
        try:
            session.ask(p.Claim("p", ClaimRequest("train", ("x",), 2, whole=True), 3600.0),
                        p.ClaimAnswer, 3600.0)
        except UnavailableError as error:
            errors.append(error)

cut, now = threading.Event(), threading.Event()
now.set()
claims = [threading.Thread(target=claim, args=[when], daemon=True) for when in (now, cut)]
with link.session("put") as session:
    session.ask(p.BeginPut("p", ["a"], {"x": "torch.int64"}, [], "n", None, 5.0), p.PutAnswer)
    for thread in claims:
        thread.start()
    time.sleep(1)  # both have their connections
    started = time.monotonic()
    lo("down")
    cut.set()
    time.sleep(5)
    assert directory.ledger.partition("p").reserved and not errors
    for thread in claims:
        thread.join(20)
    while directory.ledger.partition("p").reserved:
        assert time.monotonic() - started < 20
        time.sleep(0.1)
    print(time.monotonic() - started, *errors, sep="\\n")
    lo("up")
assert link.ask("list", p.ListPartitions(), list)
assert len(errors) == 2
print("done")
"""


@pytest.mark.slow
@pytest.mark.debian("iproute2")
def test_a_machine_gone_without_a_word_ends_its_puts_and_claims_after_some_twelve_seconds():
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
    """A session with a directory in this process, and the sockets of its ends: client, server."""
    served = []

    class Kept(directory.Connection):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            served.append(self._socket)

    monkeypatch.setattr(directory, "Connection", Kept)
    made = directory.Directory(20_000, [UnitSpec("u0", "node", 1 << 20)], "127.0.0.1")
    link = wire.Link(made.start(), timeout_s=PATIENCE_S)
    declaration = PartitionDeclaration.checked("p", ["x"], 0, ["train"])
    link.ask("register", p.Register(declaration), type(None))
    with link.session("test") as session:
        (its,) = served
        yield session, (session.connection, its)
    link.close()


def test_a_message_that_a_stopped_process_may_not_take_is_not_given_up_after_twelve_seconds(
    both_ends,
):
    """Its kernel refuses what does not fit, and to the sender's it might as well be gone."""
    session, ends = both_ends
    ids = [f"sample {i}" for i in range(10_000)]
    layout = FieldLayout("x", "torch.int64", False, (), b"", 8, len(ids))
    begin = p.BeginPut("p", ids, {"x": layout.kind}, [layout], "node", None, PATIENCE_S)
    limits = []

    def ask(request, answer):
        session.ask(request, answer)
        limits.append(
            tuple(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for end in ends)
        )

    ask(begin, p.PutAnswer)  # large only on its way there
    ask(p.CommitPut(None), type(None))
    ask(p.Read("p", ids[::-1], ["x"]), p.ReadAnswer)  # on both ways
    ask(p.ListPartitions(), list[PartitionSummary])
    ask(p.ListSamples("p", 0, 1000), list)  # only on its way back
    assert limits == [(0, 10_500), (10_500, 10_500), (0, 0), (10_500, 10_500), (10_500, 0)]


def test_a_claimer_whose_connection_is_reset_while_it_waits_takes_no_sample_with_it(stepped):
    with stepped.link.session("claim") as session:
        session.keep()
        session.tell(p.Claim("p", WANTED, 60.0))
        until_it_waits(stepped, session)
        reset = struct.pack("ii", 1, 0)
        session.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    session.close()
    stepped.put(["a", "b"])
    assert stepped.claim(2).sample_ids == ["a", "b"]


def test_closing_a_link_ends_the_claims_that_wait_and_they_take_no_sample_with_them(stepped):
    link = wire.Link(stepped.link._address, timeout_s=PATIENCE_S)
    partitions(link)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            link.ask, "claim", p.Claim("p", WANTED, 600.0), p.ClaimAnswer, timeout_s=600.0
        )
        stepped.until(lambda: len(link._open) == 1)
        started = time.monotonic()
        link.close()
        with pytest.raises(ClosedError, match="claim: the TransferQueue client was closed"):
            waiting.result(PATIENCE_S)
        assert time.monotonic() - started < SOON_S
    with pytest.raises(ClosedError, match="was closed"):
        partitions(link)
    stepped.put(["a", "b"])
    assert stepped.claim(2).sample_ids == ["a", "b"]


def test_what_an_operation_goes_on_with_is_ended_by_whoever_kept_it_and_not_with_the_link(stepped):
    link = wire.Link(stepped.link._address, timeout_s=PATIENCE_S)
    with link.session("put") as session:
        session.keep()
    link.close()
    assert session.ask(p.ListPartitions(), list)
    link.end(session)
    assert session.connection.fileno() == -1


def test_a_connection_that_ended_while_nobody_used_it_is_replaced(stepped):
    partitions(stepped.link)
    (idle,) = stepped.link._idle
    idle.shutdown(socket.SHUT_RDWR)
    assert partitions(stepped.link)


def test_a_request_that_is_too_large_is_refused_before_it_is_sent(stepped, monkeypatch):
    monkeypatch.setattr(wire, "MAX_FRAME", 10_000)
    ids = [f"sample {i}" for i in range(1000)]
    with pytest.raises(InvalidRequestError, match=r"put: .* takes \d{5} bytes, 10000 at most"):
        stepped.link.ask("put", p.Clear("p", ids, False, 1.0), p.ClearAnswer)
    assert partitions(stepped.link)


UNKNOWN = """
from dataplane_core import PartitionNotFoundError
from dataplane_tq import protocol as p
from dataplane_tq.directory import Directory
from dataplane_tq.wire import Link
directory = Directory(100, [], "127.0.0.1")
link = Link(directory.start(), timeout_s=20)
for i in range(100):
    try:
        link.ask("put", p.BeginPut(str(i), ["a"], {}, [], "n", None, 0.0), p.PutAnswer)
    except PartitionNotFoundError:
        link.ask("clear", p.Clear(str(i), ["a"], False, 0.0), p.ClearAnswer)
        link.close()
        link = Link(link._address, timeout_s=20)
while directory.leftovers:
    pass
"""


def test_puts_and_clears_of_unknown_partitions_leave_nothing_in_the_directory():
    subprocess.run([sys.executable, "-c", UNKNOWN], check=True, timeout=60)


class Actor:
    """A handle whose probe has one outcome."""

    def __init__(self, outcome):
        self.outcome = outcome

    @property
    def __ray_ready__(self):
        return self

    def remote(self):
        return self


def test_an_actor_that_ray_cannot_reach_for_the_moment_is_not_dead(monkeypatch):
    """Ray itself says so when the connection of a living actor breaks."""

    def get(probe, timeout):
        raise probe.outcome

    monkeypatch.setattr(liveness.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(liveness.ray, "wait", lambda probes, num_returns, timeout: (probes, []))
    monkeypatch.setattr(liveness.ray, "get", get)
    away = Actor(ActorUnavailableError("connection broke", None))
    assert liveness.first_dead({"unit": away}) is None
    assert "controller is dead" in liveness.first_dead(
        {"unit": away, "controller": Actor(ActorDiedError())}
    )
