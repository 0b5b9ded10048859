"""However many faults peers cause, the log stays short and has nothing that they sent.

Imports internals: servers of adapters use the module; a client has no peers to log.
"""

from __future__ import annotations

import structlog
from structlog.testing import capture_logs

from dataplane_core import peer_log
from dataplane_core.peer_log import PeerLog, fault


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(peer_log.time, "monotonic", lambda: self.now)


def test_a_peer_gets_one_line_a_minute_that_counts_the_rest(monkeypatch):
    clock = Clock(monkeypatch)
    log = PeerLog(structlog.get_logger())
    with capture_logs() as lines:
        for _ in range(50):
            log.warn("connection_refused", "a")
            log.warn("invalid_request", "a")
        log.warn("invalid_request", "b")
        clock.now += 60
        log.warn("invalid_request", "a")
    assert [(line["event"], line["peer"], line.get("left_out")) for line in lines] == [
        ("connection_refused", "a", None),
        ("invalid_request", "b", None),
        ("invalid_request", "a", "99 since the last line"),
    ]


def test_many_peers_get_sixty_lines_a_minute_together(monkeypatch):
    clock = Clock(monkeypatch)
    log = PeerLog(structlog.get_logger())
    with capture_logs() as lines:
        for number in range(5000):
            log.warn("invalid_request", f"peer {number}")
        clock.now += 60
        log.warn("invalid_request", "peer 0")
    assert len(lines) == 61


def test_a_fault_names_the_lines_and_not_the_text():
    def fail():
        raise KeyError("a sample id")

    try:
        fail()
    except KeyError as error:
        text = fault(error)
    assert text.startswith("KeyError at tests/test_peer_log.py:")
    assert text.count("test_peer_log.py") == 2
    assert "sample id" not in text
    assert fault(ValueError("never raised")) == "ValueError"
