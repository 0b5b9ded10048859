"""The Prometheus endpoint serves scrapes despite silent peers and malformed requests."""

from __future__ import annotations

from setup_processes import run_script

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

def wait_for_disconnect(peer):
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
    result = run_script(
        f"{SCRAPE}\n"
        """
kinds = [b"", b"GET /the-secret", b"GET / HTTP/1.1\\r\\nX: the-secret"]
peers = []
for number in range(64):
    with contextlib.suppress(ConnectionError):  # the server may refuse the peer
        peers.append(connect(kinds[number % 3]))
deadline = time.monotonic() + 30
while (answer := scrape())[0] == 503 and time.monotonic() < deadline:
    time.sleep(0.05)
all_disconnected = all([wait_for_disconnect(peer) for peer in peers])
deadline = time.monotonic() + 30
def handler_threads():
    return sum("process_request" in thread.name for thread in threading.enumerate())
# The thread of the last scrape may still run.
while handler_threads() and time.monotonic() < deadline:
    time.sleep(0.05)
report(status=answer[0], scraped="tests_total" in answer[1],
       disconnected=all_disconnected, threads=handler_threads())
"""
    )
    assert result.reports == [{"status": 200, "scraped": True, "disconnected": True, "threads": 0}]
    assert len(result.warnings) == 1
    assert result.warnings[0]["peer"] == "127.0.0.1"
    assert "the-secret" not in str(result.warnings)
    assert result.stderr_lines == []


def test_malformed_requests_cost_one_line_without_their_text() -> None:
    result = run_script(
        f"{SCRAPE}\n"
        """
for sent in (b"the-secret\\r\\n\\r\\n", b"\\x16\\x03\\x01\\x02\\x00\\x01the-secret\\r\\n\\r\\n",
             b"BREW /the-secret HTTP/1.1\\r\\n\\r\\n", b"GET /" + b"x" * 70_000,
             b"GET / HTTP/1.1\\r\\n" + b"A: b\\r\\n" * 200):
    with contextlib.suppress(ConnectionError), connect(sent) as peer:
        wait_for_disconnect(peer)
report(status=scrape()[0], posted=scrape("POST")[0])
"""
    )
    assert result.reports == [{"status": 200, "posted": 501}]
    assert [line["event"] for line in result.warnings] == ["invalid_request"]
    assert "the-secret" not in str(result.warnings)
    assert result.stderr_lines == []
