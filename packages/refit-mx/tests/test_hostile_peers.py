"""A bad peer blocks no other: listeners drop silent peers and log one short line.

These tests use internals: peers that violate the wire protocol, and small bounds.
"""

from __future__ import annotations

import errno
import itertools
import logging
import queue
import socket
import threading
import time

import grpc
import pytest
import torch
from hostile_peers import SILENT, closed, connections, many_descriptors
from refit_fixtures import a_world, zeros
from refit_processes import same

from refit_mx.control import WorkerRole
from refit_mx.control.embedded import THREADS
from refit_mx.listening.grpc_server import host_of
from refit_mx.listening.peers import PeerLog, bounded_connections
from refit_mx.source.server import SourceServer
from refit_mx.transports import source_protocol as protocol

DEADLINE_S = 10.0
METHOD = "/model_express.refit.RefitService/GetWeightVersion"


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.slow
@pytest.mark.parametrize("listener", ["source server", "manifest service", "control plane"])
def test_receiver_fetches_while_1200_peers_are_silent(stack, listener, caplog):
    # Each listener takes its share of 1,024 descriptors, the default limit of a process.
    stack.enter_context(many_descriptors(1024))
    world = stack.enter_context(a_world())
    publisher = world.publisher()
    weights = world.publish([publisher], "v1", 1)
    receiver = world.receiver()
    stack.enter_context(many_descriptors(6 * SILENT))
    endpoint = {
        "source server": publisher._server.endpoint,
        "manifest service": publisher._manifests.endpoint,
        "control plane": world.server.address,
    }[listener]
    with connections(endpoint, SILENT) as silent:
        live = zeros()
        started = time.monotonic()
        receiver.refit("v1", live, timeout_s=DEADLINE_S)
        assert time.monotonic() - started < DEADLINE_S
        assert same(live, weights)
        assert closed(silent, within_s=30) == SILENT
    assert len(lines(caplog)) <= 1


@pytest.mark.slow
def test_half_sent_calls_block_no_others_and_time_out(server, client, caplog):
    over, ended = threading.Event(), queue.SimpleQueue()

    def never():
        over.wait(60)
        yield from ()

    with grpc.insecure_channel(server.address) as channel:
        for _ in range(2 * THREADS):
            channel.stream_unary(METHOD).future(never()).add_done_callback(ended.put)
        started = time.monotonic()
        client.register_worker("w", WorkerRole.TRAINER, "m", ttl_s=60)
        assert time.monotonic() - started < 2
        codes = {ended.get(timeout=30).code() for _ in range(2 * THREADS)}
        over.set()
    assert codes == {grpc.StatusCode.CANCELLED}
    assert len(lines(caplog)) == 1


def test_malformed_calls_are_one_line_without_content(server, caplog):
    with grpc.insecure_channel(server.address) as channel:
        for _ in range(30):
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(METHOD)(b"\xffsecret", timeout=30)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert lines(caplog) == ["control plane: peer 127.0.0.1 sent a malformed request"]


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:4000", "10.0.0.1"),
        ("ipv6:%5B::1%5D:4000", "::1"),
        ("ipv6:[fe80::1]:4000", "fe80::1"),
        ("unknown", "unknown"),
    ],
)
def test_host_is_parsed_from_every_form_of_peer_name(peer, host):
    assert host_of(peer) == host


@pytest.mark.parametrize(
    "sent",
    [b"", b"\x01", protocol.LENGTH.pack(100) + b"secret"],
    ids=["silent", "half a length", "half a greeting"],
)
def test_peer_without_a_greeting_is_dropped(caplog, sent):
    with (
        SourceServer(incarnation="life-1", handshake_timeout_s=0.2) as server,
        connections(server.endpoint, 20, sent) as peers,
    ):
        assert closed(peers, within_s=20) == 20
    assert lines(caplog) == ["source server: peer 127.0.0.1 sent no request within 0.2 s"]


def test_oldest_silent_peer_is_dropped_for_a_new_one(caplog):
    with (
        SourceServer(incarnation="life-1", max_connections=2) as server,
        connections(server.endpoint, 3) as peers,
    ):
        assert closed(peers[:1], within_s=20) == 1
        assert closed(peers[1:], within_s=0.2) == 0
    assert lines(caplog) == [
        "source server: peer 127.0.0.1 was silent and was dropped for a newer peer"
    ]


def test_aborted_client_closes_no_other_connection(caplog, monkeypatch):
    accept = socket.socket.accept
    calls, retried = itertools.count(1), threading.Event()

    def aborting(sock):
        call = next(calls)
        if call == 2:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the client disconnected")
        if call == 3:
            retried.set()
        return accept(sock)

    monkeypatch.setattr(socket.socket, "accept", aborting)
    with (
        SourceServer(incarnation="life-1") as server,
        connections(server.endpoint, 1) as peers,
    ):
        assert retried.wait(DEADLINE_S)
        assert closed(peers, within_s=0.2) == 0
    assert lines(caplog) == []


def test_refusal_without_a_thread_names_its_reason(caplog, monkeypatch):
    start = threading.Thread.start

    def failing(thread):
        if thread.name == "refit-peer":
            raise RuntimeError("can't start new thread")
        start(thread)

    with SourceServer(incarnation="life-1") as server:
        monkeypatch.setattr(threading.Thread, "start", failing)
        with connections(server.endpoint, 1) as peers:
            assert closed(peers, within_s=20) == 1
    assert lines(caplog) == ["source server: peer 127.0.0.1 was refused: no thread can be started"]


def test_malformed_requests_are_one_line_without_content(caplog):
    wrong = protocol.LENGTH.pack(6) + b"secret"
    hello = protocol.frame(protocol.Hello("life-1"))
    with SourceServer(incarnation="life-1") as server:
        server.serve_version("v1", torch.zeros(4096, dtype=torch.uint8))
        for sent in (wrong, hello + wrong):
            with connections(server.endpoint, 50, sent) as peers:
                assert closed(peers, within_s=20) == 50
    assert lines(caplog) == ["source server: peer 127.0.0.1 sent a malformed request"]


def test_log_lines_are_limited_per_peer_and_in_total(caplog, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    log = PeerLog("test")
    for _ in range(5):
        log.warn("10.0.0.1", "is silent")
    now[0] += 61
    log.warn("10.0.0.1", "is silent")
    assert lines(caplog) == [
        "test: peer 10.0.0.1 is silent",
        "test: peer 10.0.0.1 is silent (4 more like this since the last line)",
    ]
    for peer in range(5000):
        log.warn(f"10.0.{peer // 256}.{peer % 256}", "is silent")
    assert len(caplog.records) == 61


def test_listener_leaves_descriptors_to_its_process():
    with many_descriptors(1024):
        assert bounded_connections(1024, 0.5) == 512
        assert bounded_connections(100, 0.5) == 100
        assert bounded_connections(4, 0.001) == 4


@pytest.fixture(autouse=True)
def warnings_alone(caplog):
    caplog.set_level(logging.WARNING, "refit_mx")


@pytest.mark.slow
def test_peers_without_a_call_are_dropped(server, client, stack):
    stack.enter_context(many_descriptors(1024))
    settings = bytes.fromhex("000000040000000000")  # an empty frame of HTTP/2
    greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings
    count = 150  # below the limit, a quarter of the descriptors
    with connections(server.address, count, greeting) as idle:
        started = time.monotonic()
        client.register_worker("w", WorkerRole.TRAINER, "m", ttl_s=60)
        assert time.monotonic() - started < 2
        assert closed(idle, within_s=40) == count
