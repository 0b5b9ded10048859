"""One bad peer stops no other: listeners drop silent peers, and say so in one short line."""

from __future__ import annotations

import logging
import time

import pytest
from hostile_peers import SILENT, closed, connections, many_descriptors
from refit_fixtures import zeros
from refit_processes import same

from refit_mx import source_protocol as protocol
from refit_mx.arena import Arena
from refit_mx.listening import PeerLog, bounded_connections
from refit_mx.source_server import SourceServer

DEADLINE_S = 10.0


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.slow
def test_a_receiver_fetches_while_1200_peers_are_silent(world, published, caplog):
    publishers, weights = published
    with many_descriptors(6 * SILENT):
        endpoint = publishers[0]._server.endpoint
        with connections(endpoint, SILENT) as silent:
            live = zeros()
            started = time.monotonic()
            world.receiver().refit("v1", live, timeout_s=DEADLINE_S)
            assert time.monotonic() - started < DEADLINE_S
            assert same(live, weights)
            assert closed(silent, within_s=30) == SILENT
    assert len(lines(caplog)) == 1


@pytest.mark.parametrize(
    "sent",
    [b"", b"\x01", protocol.LENGTH.pack(100) + b"secret"],
    ids=["silent", "half a length", "half a greeting"],
)
def test_a_peer_without_a_greeting_is_dropped(caplog, sent):
    with (
        SourceServer(incarnation="life-1", handshake_timeout_s=0.2) as server,
        connections(server.endpoint, 20, sent) as peers,
    ):
        assert closed(peers, within_s=20) == 20
    assert lines(caplog) == ["source server: peer 127.0.0.1 sent no request within 0.2 s"]


def test_the_oldest_silent_peer_makes_room_for_a_new_one(caplog):
    with (
        SourceServer(incarnation="life-1", most_connections=2) as server,
        connections(server.endpoint, 3) as peers,
    ):
        assert closed(peers[:1], within_s=20) == 1
        assert closed(peers[1:], within_s=0.2) == 0
    assert lines(caplog) == ["source server: peer 127.0.0.1 was silent, and its place was needed"]


def test_malformed_requests_cost_one_line_and_none_of_their_content(caplog):
    wrong = protocol.LENGTH.pack(6) + b"secret"
    hello = protocol.frame(protocol.Hello("life-1"))
    with SourceServer(incarnation="life-1") as server:
        server.serve_version("v1", Arena(4096).memory)
        for sent in (wrong, hello + wrong):
            with connections(server.endpoint, 50, sent) as peers:
                assert closed(peers, within_s=20) == 50
    assert lines(caplog) == ["source server: peer 127.0.0.1 sent a malformed request"]


def test_a_peer_has_one_line_a_minute_and_all_have_sixty(caplog, monkeypatch):
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


def test_a_listener_leaves_descriptors_to_its_process():
    with many_descriptors(2048):
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        assert bounded_connections(1024, 0.5) == 512
        assert bounded_connections(100, 0.5) == 100
        assert bounded_connections(4, 0.001) == 4


@pytest.fixture(autouse=True)
def warnings_alone(caplog):
    caplog.set_level(logging.WARNING, "refit_mx")
