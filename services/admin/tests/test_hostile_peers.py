"""Peers that send partial requests, guess tokens or use other protocols do not affect others."""

import collections
import concurrent.futures
import contextlib
import signal
import socket
import sys
import time
import urllib.error
import urllib.request

import pytest

TOKEN = "3f2b8c0d9e7a6b5c"
TIMEOUT_S = 60.0
SECRET = "what-the-peer-sent"
HALF = f"GET /{SECRET} HTTP/1.1\r\nHost: loc".encode()
HALF_BODY = b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\nabc"
# Deadlines are short for the test; the open files allow about 140 connections.
SERVICE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
from dataplane_admin import Settings, create_app, serve
from dataplane_admin.serving import connections

connections.REQUEST_S, connections._BODY_S, connections.READ_S = map(float, sys.argv[1:4])
app = create_app(Settings(store_url="sqlite:///hostile.sqlite", token=sys.argv[4]))

@app.get("/static/fail/now")
async def fail(text: str):
    raise RuntimeError(text)

app.router.routes.insert(0, app.router.routes.pop())
serve(app, port=0, shutdown_timeout_s=1)
"""


def serve(start, request_s=60.0, body_s=60.0, read_s=60.0):
    deadlines = [str(seconds) for seconds in (request_s, body_s, read_s)]
    return start(*deadlines, TOKEN, command=(sys.executable, "-c", SERVICE))


def status_of(url, data=None, **headers):
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@contextlib.contextmanager
def peers(port, number, sent):
    """Open connections that send ``sent`` and stay open here if the service closes them."""
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(number):
            peer = stack.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT_S))
            with contextlib.suppress(ConnectionError):
                peer.sendall(sent)
            connections.append(peer)
        yield connections


def read_until_closed(peer):
    """Return the data that arrives before the service closes the connection."""
    arrived = b""
    with contextlib.suppress(ConnectionError):
        while chunk := peer.recv(65_536):
            arrived += chunk
    return arrived


@pytest.mark.parametrize("sent", [b"", HALF, HALF_BODY], ids=["nothing", "half", "half a body"])
def test_silent_peers_do_not_block_others(start, sent):
    service = serve(start)
    with peers(service.port, 600, sent):
        assert status_of(f"{service.url}/healthz") == 200
        assert status_of(f"{service.url}/v1/traces", b"", authorization=f"Bearer {TOKEN}") == 415
    status, _, written = service.stop(signal.SIGTERM)
    assert status == 0
    # One line per address for any number of attempts.
    assert written.count("\n") == 1, written[:2000]
    assert "connection_dropped" in written
    assert SECRET not in written


def test_an_incomplete_request_times_out(start):
    service = serve(start, request_s=0.3, body_s=0.3)
    authorized = f"\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\nContent"
    for sent, answer in (
        (b"", b"HTTP/1.1 408 "),
        (HALF, b"HTTP/1.1 408 "),
        (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /", b" 200 OK"),
        (HALF_BODY.replace(b"\r\nContent", authorized.encode()), b"HTTP/1.1 408 "),
    ):
        with peers(service.port, 1, sent) as [peer]:
            assert answer in read_until_closed(peer), sent
    _, _, written = service.stop(signal.SIGTERM)
    assert "request_timed_out" in written


def test_an_unread_answer_times_out(start):
    service = serve(start, read_s=0.3)
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.settimeout(TIMEOUT_S)
        peer.connect(("127.0.0.1", service.port))
        request = "GET /api/v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n"
        request += f"Authorization: Bearer {TOKEN}\r\n\r\n"
        # Until the buffers in between are full, and for some time afterwards.
        deadline = time.monotonic() + TIMEOUT_S
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                peer.sendall(request.encode())
        assert time.monotonic() < deadline
    _, _, written = service.stop(signal.SIGTERM)
    assert "answer_not_read" in written


def test_peers_can_neither_flood_nor_write_the_log(start):
    service = serve(start)
    hostile = (
        f"{SECRET}\r\n\r\n",
        f"GET / HTTP/1.1\r\n{SECRET}\r\n\r\n",
        f"GET /{SECRET} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\n"
        "Connection: Upgrade, close\r\n\r\n",
        f"GET /static/fail/now?text={SECRET} HTTP/1.1\r\nHost: localhost\r\n"
        "Connection: close\r\n\r\n",
    )
    for sent in hostile:
        for _ in range(20):
            with peers(service.port, 1, sent.encode()) as [peer]:
                assert read_until_closed(peer).startswith(b"HTTP/1.1 ")
    _, _, written = service.stop(signal.SIGTERM)
    assert written.count("\n") <= len(hostile), written[:2000]
    assert SECRET not in written


def test_guesses_are_slow_and_do_not_block_the_right_token(start):
    service = serve(start)
    ends = time.monotonic() + 3

    wrong = {"authorization": f"Bearer {0:032}"}
    requests = (
        {"url": f"{service.url}/login", "data": f"token={0:032}".encode()},
        {"url": f"{service.url}/api/v1/status", **wrong},
        {"url": f"{service.url}/api/v1/status", "host": "other.example", **wrong},
    )

    def guess(request):
        statuses = collections.Counter()
        while time.monotonic() < ends:
            statuses[status_of(**request)] += 1
        return statuses

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        guesses = [pool.submit(guess, request) for request in requests * 4]
        latencies = []
        while time.monotonic() < ends:
            start_s = time.monotonic()
            right = {"authorization": f"Bearer {TOKEN}"}
            assert status_of(f"{service.url}/api/v1/version", **right) == 200
            latencies.append(time.monotonic() - start_s)
            right_form = f"token={TOKEN}&next=/healthz".encode()
            assert status_of(f"{service.url}/login", right_form) == 200
        statuses = [future.result() for future in guesses]
    for place in range(len(requests)):
        assert sum(each[429] for each in statuses[place::3]), "each kind of guess is limited"
    answers = sum(statuses, collections.Counter())
    assert answers.keys() <= {400, 401, 429}
    # The others take a second each, five at a time.
    assert answers.total() - answers[429] <= 5 * 5
    assert sorted(latencies)[len(latencies) // 2] < 1
    _, _, written = service.stop(signal.SIGTERM)
    assert [line for line in written.splitlines() if "wrong_token" not in line] == []
    assert written.count("\n") == 1


@pytest.mark.slow
def test_a_grpc_exporter_gets_the_setting_to_change(start):
    import grpc

    service = serve(start)
    with grpc.insecure_channel(f"127.0.0.1:{service.port}") as channel:
        export = channel.unary_unary(
            "/opentelemetry.proto.collector.trace.v1.TraceService/Export", bytes, bytes
        )
        with pytest.raises(grpc.RpcError) as refused:
            export(b"", timeout=TIMEOUT_S)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf" in refused.value.details()
    _, _, written = service.stop(signal.SIGTERM)
    assert written.count("otlp_grpc_refused") == 1
