"""Bad peers block no other: silent connections, half requests and nonsense cost one log line."""

from __future__ import annotations

import contextlib
import queue
import resource
import signal
import socket
import sysconfig
import threading
import time
import urllib.request
from pathlib import Path

import grpc
import pytest

from refit_mx import ControlClient, Deadline, retry_idempotent
from refit_mx.control import WorkerRole

COMMAND = str(Path(sysconfig.get_path("scripts")) / "refit-server")
TIMEOUT_S = 60.0

SILENT = 1200
METHOD = "/model_express.refit.RefitService/GetWeightVersion"


@contextlib.contextmanager
def descriptors(needed):
    """Allow this process ``needed`` open files, whatever the shell's soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def connections(address, count, sent=b""):
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        stack.enter_context(descriptors(count + 256))
        opened = []
        for _ in range(count):
            opened.append(stack.enter_context(socket.create_connection((host, int(port)), 30)))
            with contextlib.suppress(OSError):
                opened[-1].sendall(sent)
        yield opened


def all_end(sockets):
    """Return whether the other side closes all connections."""
    until = time.monotonic() + TIMEOUT_S
    for sock in sockets:
        sock.settimeout(max(0.01, until - time.monotonic()))
        try:
            while sock.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except OSError:
            continue
    return True


def register(client):
    # On a busy machine the client's own handshake may exceed the server's limit: then it retries.
    retry_idempotent(
        client,
        lambda control: control.register_worker("w", WorkerRole.TRAINER, "m", ttl_s=60),
        deadline=Deadline(TIMEOUT_S, "a call"),
        retry_s=TIMEOUT_S,
    )


def written(server):
    """Stop the server and return the lines that it wrote."""
    server.signal(signal.SIGTERM)
    status, _, text = server.wait()
    assert status == 0, text
    return text.splitlines()


def test_1200_silent_connections_leave_capacity_for_calls(start):
    few = ("prlimit", "--nofile=1024:16384", COMMAND, "serve", "--address", "127.0.0.1:0")
    server = start(command=few)
    with ControlClient(server.address, rpc_timeout_s=5) as client:
        with connections(server.address, SILENT) as silent:
            register(client)
            assert all_end(silent)
        register(client)
    assert len(written(server)) <= 1


def test_incomplete_tls_handshakes_are_dropped(start, certificate, token_file):
    pair = certificate("refit")
    server = start(*pair.options, "--token-file", str(token_file))
    hello = bytes.fromhex("160301020001")  # only the head of a ClientHello
    client = ControlClient(
        server.address, tls_ca=pair.cert, token=token_file.read_text().strip(), rpc_timeout_s=5
    )
    with client, connections(server.address, 200, hello) as half:
        with connections(server.address, 200, b"GET / HTTP/1.1\r\n\r\n") as wrong:
            register(client)
            assert all_end(wrong)
        assert all_end(half)
    assert len(written(server)) <= 1


def test_half_sent_calls_block_no_other_and_are_dropped(start):
    server = start()
    stop = threading.Event()
    ended = queue.SimpleQueue()
    with grpc.insecure_channel(server.address) as channel:

        def never():
            stop.wait(TIMEOUT_S)
            yield from ()

        for _ in range(64):
            channel.stream_unary(METHOD).future(never()).add_done_callback(ended.put)
        with ControlClient(server.address, rpc_timeout_s=5) as client:
            register(client)
        codes = {ended.get(timeout=30).code() for _ in range(64)}
        stop.set()
    assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
    (line,) = written(server)
    assert line == "control plane: peer 127.0.0.1 sent no request within 5 s"


def test_bad_and_unauthorized_calls_log_one_line_without_content(start, token_file):
    token = (("authorization", "Bearer " + token_file.read_text().strip()),)
    server = start("--token-file", str(token_file))
    with grpc.insecure_channel(server.address) as channel:
        for metadata in (token, (("authorization", "Bearer secret"),)):
            for _ in range(30):
                with pytest.raises(grpc.RpcError) as raised:
                    channel.unary_unary(METHOD)(b"\xffsecret", metadata=metadata, timeout=30)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
    (line,) = written(server)
    assert line == "control plane: peer 127.0.0.1 sent a malformed request"


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nHost"], ids=["silent", "half"])
def test_metrics_are_served_while_peers_are_silent(start, sent):
    server = start("--metrics-port", "0")
    url = server.process.stderr.readline().split()[-1]
    with connections(url.split("/")[2], SILENT // 4, sent) as silent:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            assert b"refit_control_leases 0.0" in answer.read()
        assert all_end(silent)
    (line,) = written(server)
    assert line.startswith("metrics: peer 127.0.0.1 ")
