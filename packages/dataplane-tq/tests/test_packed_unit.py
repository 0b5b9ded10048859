"""Storage units over both transports, and with processes that stop or die.

Imports internals: tests use a unit without a directory, and send it hostile bytes.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from directory_calls import TIMEOUT_S, stop
from stepped_store import SERVERS, Child

from dataplane_core import DeadlineExceededError, InvalidRequestError, UnavailableError
from dataplane_tq.packed import unit_wire as wire
from dataplane_tq.packed.arena import Arena
from dataplane_tq.packed.slices import Slices
from dataplane_tq.packed.unit import UnitServer
from dataplane_tq.packed.unit_client import UnitClient

CAPACITY = 1 << 20
TOKEN = b"secret"


@pytest.fixture
def unit():
    with Arena.create("u0", CAPACITY) as arena, UnitServer(arena, TOKEN, "127.0.0.1") as server:
        yield server


@pytest.fixture
def child():
    """Yield the address of a unit in another process."""
    process = Child(SERVERS, "unit", CAPACITY)
    yield msgspec.json.decode(process.read_line(), type=wire.UnitAddress)
    process.close()


@contextmanager
def client_of(address, transport="auto", token=TOKEN):
    client = UnitClient(address, token, transport=transport)
    try:
        yield client
    finally:
        client.close()


def pattern(seed, nbytes=1000):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def slices(data):
    return Slices(np.frombuffer(data, np.uint8), [0], [len(data)])


both = pytest.mark.parametrize("transport", ["shm", "tcp"])


@both
def test_reads_return_the_written_bytes(child, transport):
    with client_of(child, transport) as client:
        a, b = pattern(1), pattern(2)
        scattered = Slices(a, [997, 0, 5], [3, 0, 2])
        client.write([(0, slices(a)), (5000, slices(b)), (7, slices(b"")), (6000, scattered)], 10)
        data = client.read([(5000, 6000), (6000, 6005), (4, 4), (0, 1000)], 10)
        assert data.tolist() == [*b, *a[997:], *a[5:7], *a]
        assert client.read([(0, 1000)], 10).tolist() == a.tolist()
        assert client.zero_copy == (transport == "shm")


@both
def test_writes_of_more_pieces_than_a_frame_holds_are_complete(unit, transport, monkeypatch):
    monkeypatch.setattr(wire, "MAX_RANGES", 1500)
    with client_of(unit.address, transport) as client:
        data = pattern(3, 4000)
        client.write([(8 * at, slices(data[at : at + 1])) for at in range(4000)], 10)
        received = client.read([(8 * at, 8 * at + 1) for at in range(4000)], 10)
        assert received.tolist() == data.tolist()


def test_auto_uses_shared_memory_on_the_units_node_only(unit):
    elsewhere = msgspec.structs.replace(unit.address, unix="not-on-this-node")
    for address, zero_copy in ((unit.address, True), (elsewhere, False)):
        with client_of(address) as client:
            client.connect(10)
            assert client.zero_copy == zero_copy
    with client_of(elsewhere, "shm") as client, pytest.raises(UnavailableError, match="'u0'"):
        client.connect(10)


def test_views_cannot_be_written_and_outlive_the_client(unit):
    with client_of(unit.address, "shm") as client:
        client.write([(0, slices(pattern(1)))], 10)
        view = client.read([(0, 1000)], 10)
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
    assert view.tolist() == pattern(1).tolist()


@both
@pytest.mark.parametrize("start", [-1, CAPACITY - 3])
def test_ranges_outside_the_memory_are_refused_before_sending(unit, transport, start):
    with client_of(unit.address, transport) as client:
        with pytest.raises(InvalidRequestError, match="'u0'"):
            client.write([(0, slices(b"1234")), (start, slices(b"1234"))], 10)
        with pytest.raises(InvalidRequestError, match="'u0'"):
            client.read([(start, start + 4)], 10)
        assert client.read([(0, 4)], 10).tolist() == [0] * 4


def test_process_without_a_free_descriptor_gets_one_error(unit, monkeypatch):
    def receive_without_descriptors(sock, nbytes, count, flags):
        return sock.recv(nbytes), [], socket.MSG_CTRUNC, None  # as the kernel does

    monkeypatch.setattr(socket, "recv_fds", receive_without_descriptors)
    with (
        client_of(unit.address, "shm") as client,
        pytest.raises(UnavailableError, match="Too many open files"),
    ):
        client.connect(TIMEOUT_S)


@both
def test_wrong_token_is_refused(unit, transport):
    with (
        client_of(unit.address, transport, b"guess") as client,
        pytest.raises(UnavailableError, match="refused the token"),
    ):
        client.connect(10)


def frame(command=wire.READ, ranges=((0, 8),), count=None, nbytes=None):
    count = len(ranges) if count is None else count
    nbytes = sum(size for _, size in ranges) if nbytes is None else nbytes
    header = wire.FRAME.pack(command, count, 10_000, nbytes)
    return header + np.array(ranges, wire.RANGES).tobytes() + b"\xff" * 8


@pytest.mark.parametrize(
    "data",
    [
        frame(b"X"),
        frame(count=0),
        frame(count=2**32 - 1),
        frame(nbytes=9),
        frame(wire.WRITE, nbytes=2**63),
        frame(wire.WRITE, [(CAPACITY, 8)]),
        frame(wire.WRITE, [(0, 8), (CAPACITY - 7, 8)]),
        frame(wire.WRITE, [(2**64 - 8, 16)], nbytes=16),
        frame(wire.WRITE, [(8, 2**64 - 1)], nbytes=2**64 - 1),
        frame(wire.WRITE, [(0, 2**63), (0, 2**63), (0, 8)], nbytes=8),
    ],
)
def test_bad_frame_closes_its_connection_and_writes_nothing(unit, data):
    with client_of(unit.address, "tcp") as client:
        client.connect(10)
        with socket.create_connection((unit.address.host, unit.address.port), 10) as sock:
            sock.sendall(wire.hello(TOKEN) + data)
            answer = b""
            try:
                while part := sock.recv(100):
                    answer += part
            except ConnectionResetError:
                pass  # closed with unread bytes
            assert answer in (b"", wire.ACCEPTED)
        assert not client.read([(0, CAPACITY)], 10).any()


@both
def test_silent_peers_block_no_other_client(unit, transport):
    address = unit.address
    with (
        socket.create_connection((address.host, address.port)) as silent,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.connect("\0" + address.unix)
        unix.sendall(b"pack")
        silent.sendall(wire.hello(TOKEN) + frame(wire.WRITE, [(0, 100)])[:30])
        with client_of(address, transport) as client:
            client.write([(0, slices(pattern(1)))], 10)
            assert client.read([(0, 1000)], 10).tolist() == pattern(1).tolist()


def test_silent_connections_do_not_exhaust_the_limit(unit):
    address = unit.address
    silent = [socket.create_connection((address.host, address.port)) for _ in range(300)]
    try:
        with client_of(address, "tcp") as client:
            started = time.monotonic()
            assert not client.read([(0, CAPACITY)], 10).any()
        assert time.monotonic() - started < 4.0  # before the time-out of the silent connections
    finally:
        for sock in silent:
            sock.close()


@both
def test_unit_accepts_again_after_threads_ran_out(unit, transport, monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    with client_of(unit.address, transport) as client:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(UnavailableError):
                client.read([(0, 8)], 10)
        assert not client.read([(0, 8)], 10).any()


def test_stopped_reader_blocks_no_other_client(unit):
    address = unit.address
    with socket.create_connection((address.host, address.port)) as stopped:
        request = wire.FRAME.pack(wire.READ, 64, 600_000, 64 * CAPACITY)
        stopped.sendall(wire.hello(TOKEN) + request)
        stopped.sendall(np.array([(0, CAPACITY)] * 64, wire.RANGES).tobytes())
        assert len(stopped.recv(100, socket.MSG_WAITALL)) == 100
        with client_of(address, "tcp") as client:
            client.write([(0, slices(pattern(1)))], 10)
            assert client.read([(0, 1000)], 10).tolist() == pattern(1).tolist()


@both
def test_threads_share_a_client(child, transport):
    failures = []

    def work(client, number):
        at = number * 4096
        for turn in range(50):
            data = pattern(1000 * number + turn, 4096)
            client.write([(at, slices(data))], 30)
            if client.read([(at, at + 4096)], 30).tolist() != data.tolist():
                failures.append((number, turn))

    with client_of(child, transport) as client:
        threads = [threading.Thread(target=work, args=(client, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


FORK = """
import os, sys, msgspec
import numpy as np
from dataplane_tq.packed.slices import Slices
from dataplane_tq.packed.unit_client import UnitClient
from dataplane_tq.packed.unit_wire import UnitAddress
address = msgspec.json.decode(sys.argv[1], type=UnitAddress)
client = UnitClient(address, sys.argv[3].encode(), transport=sys.argv[2])
slices = lambda data: Slices(np.frombuffer(data, np.uint8), [0], [len(data)])
client.write([(0, slices(b"parent"))], 10)
with client._connections.lock:  # as if another thread held it
    pid = os.fork()
    if pid == 0:
        client.write([(6, slices(b"child!"))], 10)
        assert client.read([(0, 12)], 10).tobytes() == b"parentchild!"
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
assert client.read([(0, 12)], 10).tobytes() == b"parentchild!"
"""


@both
def test_client_works_on_both_sides_of_a_fork(child, transport):
    address = msgspec.json.encode(child).decode()
    command = [sys.executable, "-c", FORK, address, transport, TOKEN.decode()]
    subprocess.run(command, check=True, timeout=60)


def until_unavailable(client):
    """Write until a call detects the unit's death; return its error."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            client.write([(0, slices(b"late"))], 1)
        except UnavailableError as error:
            return error
    raise AssertionError("no call detected the unit's death")


@pytest.mark.parametrize("transport", ["shm", "tcp", "auto"])
def test_dead_unit_is_detected_and_leaves_no_file(child, transport):
    with client_of(child, transport) as client:
        client.write([(0, slices(pattern(1)))], 10)
        assert "/dev/shm" not in Path(f"/proc/{child.pid}/maps").read_text()
        os.kill(child.pid, signal.SIGKILL)
        assert "'u0'" in str(until_unavailable(client))
        with pytest.raises(UnavailableError, match="'u0'"):
            client.read([(0, 1)], 1)
    with client_of(child, transport) as client, pytest.raises(UnavailableError, match="'u0'"):
        client.connect(1)


@pytest.mark.parametrize("transport", ["shm", "tcp", "auto"])
def test_calls_to_a_stopped_unit_end_at_the_deadline(unit, child, transport):
    with client_of(child, "tcp") as connected, client_of(child, transport) as fresh:
        connected.write([(0, slices(pattern(1)))], 10)
        stop(child.pid)
        with pytest.raises(DeadlineExceededError, match="'u0'"):
            connected.write([(0, slices(pattern(2, CAPACITY)))], 0.2)
        with pytest.raises(DeadlineExceededError, match="'u0'"):
            fresh.read([(0, 1000)], 0.2)
        with client_of(unit.address) as other:
            other.write([(0, slices(pattern(3)))], 10)
        os.kill(child.pid, signal.SIGCONT)
        connected.write([(0, slices(pattern(4)))], 10)
        assert fresh.read([(0, 1000)], 10).tolist() == pattern(4).tolist()


def test_closing_ends_every_connection_and_thread():
    before = threading.active_count()
    with Arena.create("u0", CAPACITY) as arena:
        server = UnitServer(arena, TOKEN, "127.0.0.1")
        with client_of(server.address, "shm") as shm, client_of(server.address, "tcp") as tcp:
            shm.connect(10)
            tcp.connect(10)
            server.close()
            server.close()
            assert threading.active_count() == before
            for client in (shm, tcp):
                with pytest.raises(UnavailableError, match="'u0'"):
                    client.read([(0, 1)], 1)


def test_shared_memory_cannot_be_shrunk():
    with Arena.create("sealed", 8192) as arena:
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, 0)
        with Arena.attach(os.dup(arena.fd), 8192) as other:
            other.buffer[5] = 7
        assert arena.buffer[5] == 7
