"""The Prometheus endpoint serves a scrape whatever other peers do."""

from __future__ import annotations

from setup_processes import run

SCRAPE = """
import contextlib, socket, urllib.error, urllib.request
telemetry = setup("svc", prometheus_port=0)
metrics.get_meter("test").create_counter("tests").add(1)
host, port = telemetry.prometheus_address

def scrape(method="GET"):
    request = urllib.request.Request(f"http://{host}:{port}/metrics", method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()

def ended(peer):
    peer.settimeout(30)
    with contextlib.suppress(ConnectionError):
        while peer.recv(4096):
            pass
    return True

def connect(sent=b""):
    peer = socket.create_connection((host, port), timeout=30)
    peer.sendall(sent)
    return peer
"""


def test_silent_peers_block_no_scrape_and_are_disconnected() -> None:
    ran = run(
        f"{SCRAPE}\n"
        """
kinds = [b"", b"GET /the-secret", b"GET / HTTP/1.1\\r\\nX: the-secret"]
peers = []
for number in range(64):
    with contextlib.suppress(ConnectionError):  # the server may refuse the peer
        peers.append(connect(kinds[number % 3]))
until = time.monotonic() + 30
while (answer := scrape())[0] == 503 and time.monotonic() < until:
    time.sleep(0.05)
gone = all([ended(peer) for peer in peers])
until = time.monotonic() + 30
def serving():
    return sum("process_request" in thread.name for thread in threading.enumerate())
while serving() and time.monotonic() < until:  # the last scrape returned, its thread may remain
    time.sleep(0.05)
report(status=answer[0], scraped="tests_total" in answer[1], ended=gone, threads=serving())
"""
    )
    assert ran.report == [{"status": 200, "scraped": True, "ended": True, "threads": 0}]
    assert len(ran.warnings) == 1
    assert ran.warnings[0]["peer"] == "127.0.0.1"
    assert "the-secret" not in str(ran.warnings)
    assert ran.noise == []


def test_malformed_requests_cost_one_line_without_their_text() -> None:
    ran = run(
        f"{SCRAPE}\n"
        """
for sent in (b"the-secret\\r\\n\\r\\n", b"\\x16\\x03\\x01\\x02\\x00\\x01the-secret\\r\\n\\r\\n",
             b"BREW /the-secret HTTP/1.1\\r\\n\\r\\n", b"GET /" + b"x" * 70_000,
             b"GET / HTTP/1.1\\r\\n" + b"A: b\\r\\n" * 200):
    with contextlib.suppress(ConnectionError), connect(sent) as peer:
        ended(peer)
report(status=scrape()[0], posted=scrape("POST")[0])
"""
    )
    assert ran.report == [{"status": 200, "posted": 501}]
    assert [line["event"] for line in ran.warnings] == ["invalid_request"]
    assert "the-secret" not in str(ran.warnings)
    assert ran.noise == []
