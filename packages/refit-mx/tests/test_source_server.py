"""The source server serves its versions, refuses invalid requests, and survives bad clients.

These tests use internals: a hostile peer speaks the wire protocol directly.
"""

import contextlib
import socket
import struct
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
from control_clients import until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transport_processes import manifest, one_read, pattern, random_reads, soon

from refit_mx import (
    Manifest,
    ProtocolError,
    RefitTimeoutError,
    SourceLostError,
)
from refit_mx.manifest.byte_spans import ByteSpans
from refit_mx.manifest.digests import digest_of_reads
from refit_mx.memory.arena import Arena
from refit_mx.source.server import SourceServer
from refit_mx.transports import source_client, source_sockets
from refit_mx.transports import source_protocol as protocol
from refit_mx.transports.base import ReadTable, SourceReads
from refit_mx.transports.source_client import SourceClient, is_gone
from refit_mx.transports.source_sockets import receive_frame
from refit_mx.transports.tcp import TcpTransport

NBYTES = 1 << 20


@contextlib.contextmanager
def serving(nbytes: int = NBYTES, **options) -> Iterator[tuple[SourceServer, Arena, Manifest]]:
    arena = Arena(nbytes)
    arena.memory[:] = pattern(arena.nbytes, 1)
    with SourceServer(incarnation="life-1", **options) as server:
        server.serve_version("v1", arena.memory)
        yield server, arena, manifest(server, arena)


@contextlib.contextmanager
def raw(source: Manifest) -> Iterator[socket.socket]:
    host, _, port = source.endpoint.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as sock:
        sock.settimeout(None)
        yield sock


def greeted(sock: socket.socket, source: Manifest) -> None:
    sock.sendall(protocol.frame(protocol.Hello(source.incarnation)))
    assert answer(sock).status == "ok"


def answer(sock: socket.socket) -> protocol.Answer:
    return protocol.decode_answer(receive_frame(sock, protocol.MAX_FRAME, soon()))


def read(client: SourceClient, reads: ReadTable, scratch: torch.Tensor, version: str = "v1"):
    client.read(reads, ByteSpans(scratch), version_id=version, deadline=soon())


def test_failed_tcp_read_keeps_the_connections_of_other_sources(stack):
    transport = stack.enter_context(contextlib.closing(TcpTransport()))
    scratch = torch.zeros(NBYTES, dtype=torch.uint8)
    transport.register(scratch)
    servers, sources = [], []
    for _ in range(2):
        server, _, source = stack.enter_context(serving())
        servers.append(server)
        sources.append(SourceReads(source, one_read(NBYTES // 2, len(sources) * NBYTES // 2)))
    assert transport.read(sources, scratch, deadline=soon()).connected == 2
    servers[0].close()
    with pytest.raises(SourceLostError):
        transport.read(sources[:1], scratch, deadline=soon())
    assert transport.read(sources[1:], scratch, deadline=soon()).connected == 0


def test_client_gets_the_bytes_and_the_digests_of_any_reads():
    with serving() as (_, arena, source), contextlib.closing(SourceClient(source)) as client:
        reads = random_reads(NBYTES, 20, 7, max_run=40_000)
        scratch = torch.zeros(NBYTES, dtype=torch.uint8)
        read(client, reads, scratch)
        there = client.digests(reads, version_id="v1", deadline=soon())
        assert there == digest_of_reads(arena.memory, reads, side="source")
        assert there == digest_of_reads(scratch, reads, side="scratch")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9"])
def test_client_recognizes_a_local_source(host):
    with (
        serving(host=host) as (_, _, source),
        contextlib.closing(SourceClient(source)) as client,
    ):
        assert not client.local, "it is not connected yet"
        client.connect(soon())
        assert client.local
    assert not client.local


class _ConnectedFromElsewhere(socket.socket):
    """A connection whose addresses look like those between two machines."""

    def getpeername(self):
        return ("192.0.2.7", 4000)

    def getsockname(self):
        return ("192.0.2.8", 5000)


def test_client_recognizes_a_remote_source(monkeypatch):
    with serving() as (_, _, source), contextlib.closing(SourceClient(source)) as client:
        connect = source_sockets.connect

        def from_elsewhere(*arguments):
            return _ConnectedFromElsewhere(fileno=connect(*arguments).detach())

        monkeypatch.setattr(source_client, "connect", from_elsewhere)
        client.connect(soon())
        assert not client.local


def test_many_reads_take_several_requests():
    count = protocol.MAX_READS + 10
    rows = np.zeros((count, 9), np.int64)
    rows[:, 0] = np.arange(count)
    rows[:, [2, 3, 6]] = 1
    with serving() as (_, arena, source), contextlib.closing(SourceClient(source)) as client:
        there = client.digests(ReadTable(rows), version_id="v1", deadline=soon(120))
        assert there == digest_of_reads(arena.memory, ReadTable(rows), side="source")


def _end_of_read(sock: socket.socket, in_chunk: int) -> protocol.Answer:
    stream = sock.makefile("rb")
    while in_chunk:
        assert len(stream.read(in_chunk)) == in_chunk
        (in_chunk,) = protocol.LENGTH.unpack(stream.read(4))
    (length,) = protocol.LENGTH.unpack(stream.read(4))
    return protocol.decode_answer(stream.read(length))


def test_another_incarnation_is_refused():
    with serving() as (_, _, source):
        older = msgspec.structs.replace(source, incarnation="life-0")
        with (
            contextlib.closing(SourceClient(older)) as client,
            pytest.raises(SourceLostError, match="another process"),
        ):
            client.check_held(version_id="v1", deadline=soon())
        assert is_gone(older, 10)
        assert not is_gone(source, 10)
    assert is_gone(source, 10)


def test_silent_server_is_lost_but_is_not_reported_gone():
    with socket.create_server(("127.0.0.1", 0)) as silent, serving() as (_, _, source):
        port = silent.getsockname()[1]
        silent_source = msgspec.structs.replace(source, endpoint=f"127.0.0.1:{port}")
        client = SourceClient(silent_source, connect_timeout_s=0.05)
        with pytest.raises(SourceLostError, match=r"did not answer for 0\.05 s"):
            client.connect(soon())
        client = SourceClient(silent_source, connect_timeout_s=10)
        with pytest.raises(RefitTimeoutError, match=r"not done after 0\.05 s"):
            client.connect(soon(0.05))
        assert not is_gone(silent_source, 0.05)


def test_abort_ends_a_call_of_another_thread():
    with socket.create_server(("127.0.0.1", 0)) as silent, serving() as (_, _, source):
        port = silent.getsockname()[1]
        client = SourceClient(msgspec.structs.replace(source, endpoint=f"127.0.0.1:{port}"))
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                client.connect(soon(300))
            except SourceLostError as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        silent.accept()[0].recv(1)  # its HELLO is there, so it waits for the answer
        client.abort()
        waiting.join(20)
        assert len(raised) == 1


def test_closed_idle_connection_is_reopened():
    with serving(idle_timeout_s=0.05) as (_, _, source):
        client = SourceClient(source)
        client.connect(soon())
        assert client._sock is not None
        assert client._sock.recv(1, socket.MSG_PEEK) == b""
        client.check_held(version_id="v1", deadline=soon())
        client.close()


@pytest.mark.parametrize("endpoint", ["", "nowhere", "127.0.0.1:", "127.0.0.1:x"])
def test_invalid_endpoint_is_a_protocol_error(endpoint):
    with serving() as (_, _, source):
        client = SourceClient(msgspec.structs.replace(source, endpoint=endpoint))
        with pytest.raises(ProtocolError, match="expected host:port"):
            client.connect(soon())


@pytest.mark.parametrize(
    "rows",
    [
        [0, 0, NBYTES + 1, 1, 0, 0, 1, 0, 0],
        [NBYTES, 0, 1, 1, 0, 0, 1, 0, 0],
        [-1, 0, 1, 1, 0, 0, 1, 0, 0],
        [0, 0, 1, 2**62, 4, 0, 2**62, 0, 0],
        [0, 0, 2**32, 2**32, 0, 0, 1, 0, 0],
        [0, 0, 1024, 2048, 0, 0, 1, 0, 0],
    ],
)
def test_reads_outside_the_arena_are_refused(rows):
    with serving() as (_, _, source), raw(source) as sock:
        greeted(sock, source)
        data = np.array(rows, "<i8").tobytes()
        sock.sendall(protocol.frame(protocol.Read("v1", data)))
        assert _end_of_read(sock, struct.unpack("<I", sock.recv(4))[0]).status == "refused"
        sock.sendall(protocol.frame(protocol.Digest("v1", data)))
        refused = answer(sock)
        assert refused.status == "refused"
        assert "not inside the source" in refused.message
        sock.sendall(protocol.frame(protocol.Get("v1")))
        assert answer(sock).status == "ok"


def test_repeated_bytes_of_one_request_are_bounded():
    nbytes = 1 << 20
    rows = np.repeat(one_read(nbytes).rows, protocol.MAX_READ_BYTES // nbytes + 1, axis=0)
    with serving(nbytes) as (_, _, source), raw(source) as sock:
        greeted(sock, source)
        sock.sendall(protocol.frame(protocol.Digest("v1", rows.astype("<i8").tobytes())))
        assert "at most" in answer(sock).message


def test_too_long_frame_is_refused_by_its_length():
    with serving() as (_, _, source), raw(source) as sock:
        sock.sendall(protocol.LENGTH.pack(protocol.MAX_HELLO_FRAME + 1))
        refused = answer(sock)
        assert refused.status == "refused"
        assert "announced 4097 bytes" in refused.message
        assert sock.recv(1) == b""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\n",
        msgspec.msgpack.encode({"type": "Hello"}),
        msgspec.msgpack.encode({"type": "Hello", "incarnation": 5}),
        msgspec.msgpack.encode({"type": "Hello", "incarnation": "life-1", "format": "other/1"}),
        msgspec.msgpack.encode({"type": "Exec", "code": "1"}),
        msgspec.msgpack.encode({"type": "Read", "version_id": "v1", "rows": b""}),
    ],
)
def test_invalid_greeting_is_refused(data):
    with serving() as (_, _, source), raw(source) as sock:
        sock.sendall(protocol.LENGTH.pack(len(data)) + data)
        assert answer(sock).status == "refused"
        assert sock.recv(1) == b""


def test_truncated_rows_are_refused():
    with serving() as (_, _, source), raw(source) as sock:
        greeted(sock, source)
        sock.sendall(protocol.frame(protocol.Digest("v1", b"\0" * 71)))
        assert "71 bytes; expected a multiple of 72" in answer(sock).message


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=200), max_size=4))
def test_garbage_never_ends_the_server(garbage_server, parts):
    source, known = garbage_server
    with raw(source) as sock:
        with contextlib.suppress(OSError):
            if known:
                greeted(sock, source)
            for part in parts:
                sock.sendall(protocol.LENGTH.pack(len(part)) + part)
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(OSError):
            while sock.recv(4096):
                pass
    with contextlib.closing(SourceClient(source)) as client:
        client.check_held(version_id="v1", deadline=soon())


@pytest.fixture(params=[False, True], ids=["first frame", "after handshake"])
def garbage_server(request):
    with serving() as (_, _, source):
        yield source, request.param


def test_slowly_sending_client_is_disconnected():
    with serving(timeout_s=0.2) as (_, _, source), raw(source) as sock:
        ended = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not ended.wait(0.02):
                    sock.sendall(b"\0")

        sock.sendall(protocol.LENGTH.pack(4000))
        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            sock.settimeout(20)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
        finally:
            ended.set()
            dripping.join(20)


def test_client_that_does_not_read_is_disconnected():
    nbytes = 64 << 20
    with serving(nbytes, timeout_s=0.2) as (server, _, source), raw(source) as sock:
        greeted(sock, source)
        sock.sendall(protocol.frame(protocol.Read("v1", protocol.encode_reads(one_read(nbytes)))))
        (connection,) = server._listener.connections
        connection.thread.join(20)
        assert not connection.thread.is_alive()


def test_excess_connection_waits_for_a_free_slot():
    with serving(max_connections=1) as (_, _, source), raw(source) as first:
        greeted(first, source)  # it counts as idle only after a second
        second = SourceClient(source)
        with pytest.raises(RefitTimeoutError, match="is full: too many connections are open"):
            second.connect(soon(0.3))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(second.connect, soon())
            first.close()
            assert waiting.result(30)
        second.check_held(version_id="v1", deadline=soon())
        second.close()


def test_longest_idle_connection_is_closed_and_reopened(monkeypatch):
    monkeypatch.setattr("refit_mx.listening.threaded._IDLE_S", 0.0)
    with serving(max_connections=2) as (server, _, source):
        clients = [SourceClient(source) for _ in range(3)]
        connections = server._listener.connections
        for number, client in enumerate(clients):
            client.check_held(version_id="v1", deadline=soon())
            # The server notes that a connection is idle after it has answered.
            until(lambda: all(each.idle_since is not None for each in connections))
            assert len(connections) == min(number + 1, 2)
        until(lambda: not clients[0].connected)
        assert clients[1].connected
        for client in clients:
            client.check_held(version_id="v1", deadline=soon())
            client.close()


def test_server_recovers_from_a_lack_of_descriptors():
    program = """
        import os, resource, sys
        import torch
        from refit_mx.memory.arena import Arena
        from refit_mx.source.server import SourceServer
        arena = Arena(4096)
        with SourceServer(incarnation="life-1") as server:
            server.serve_version("v1", arena.memory)
            print(server.endpoint, flush=True)
            limit = max(map(int, os.listdir("/proc/self/fd"))) + 4
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            print("few", flush=True)
            sys.stdin.read()
    """
    with (
        serving() as (_, _, source),
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        small_source = msgspec.structs.replace(source, endpoint=process.stdout.readline().strip())
        assert process.stdout.readline() == "few\n"
        with contextlib.ExitStack() as stack:
            for _ in range(12):
                stack.enter_context(raw(small_source))
            with pytest.raises((SourceLostError, RefitTimeoutError)):
                SourceClient(small_source, connect_timeout_s=0.5).connect(soon(1))
        client = SourceClient(small_source)
        client.check_held(version_id="v1", deadline=soon())
        client.close()
        process.stdin.close()
        assert process.wait(30) == 0


def test_client_works_with_descriptors_above_1024(many_descriptors):
    with serving() as (_, _, source), contextlib.closing(SourceClient(source)) as client:
        assert client.connect(soon())
        assert client._sock.fileno() >= many_descriptors
        assert not client.connect(soon())
        client.check_held(version_id="v1", deadline=soon())


def _hostile_server(answers: list[bytes]) -> tuple[socket.socket, threading.Thread]:
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            for data in answers:
                receive_frame(connection, protocol.MAX_FRAME, soon())
                connection.sendall(data)
            # Wait until the client closes the connection.
            with contextlib.suppress(OSError):
                connection.recv(1)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listener, thread


OK = protocol.frame(protocol.Answer("ok"))


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (protocol.LENGTH.pack(2**32 - 1), "announced 4294967295 bytes"),
        (protocol.LENGTH.pack(5) + b"12345", "a chunk of 5 bytes; expected 100"),
        (protocol.LENGTH.pack(0) + OK, "ended its chunks early"),
        (protocol.LENGTH.pack(100) + bytes(100) + protocol.LENGTH.pack(7), "announced 7 bytes"),
        (protocol.LENGTH.pack(0) + protocol.LENGTH.pack(3) + b"abc", "answer: "),
    ],
)
def test_invalid_answer_is_a_protocol_error(sent, message):
    listener, thread = _hostile_server([OK, sent])
    with listener, serving() as (_, _, source):
        port = listener.getsockname()[1]
        client = SourceClient(msgspec.structs.replace(source, endpoint=f"127.0.0.1:{port}"))
        scratch = torch.zeros(100, dtype=torch.uint8)
        with pytest.raises(ProtocolError, match=message):
            read(client, one_read(100), scratch)
        thread.join(20)


def test_wrong_number_of_digests_is_a_protocol_error():
    listener, thread = _hostile_server([OK, protocol.frame(protocol.Answer("ok", data=b"x" * 15))])
    with listener, serving() as (_, _, source):
        port = listener.getsockname()[1]
        client = SourceClient(msgspec.structs.replace(source, endpoint=f"127.0.0.1:{port}"))
        with pytest.raises(ProtocolError, match="15 bytes of digests for 1 reads"):
            client.digests(one_read(100), version_id="v1", deadline=soon())
        thread.join(20)
