"""The OTLP receiver accepts, refuses and forwards requests over real sockets.

The tests lower its limits of half a minute and 256 connections in the receiver's internal modules.
Imports internals: a test delays the write of a request.
"""

from __future__ import annotations

import gzip
import http.client
import resource
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from otlp_requests import PROTOBUF, WAIT_S, logs, metrics, post, traces
from structlog.testing import capture_logs

from observability.receiver import Receiver, read_folder
from observability.receiver.frames import FrameWriter

HEAD = b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\n"

HTTP_MODULE = "observability.bounded_http"


def send_raw(receiver: Receiver, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", receiver.port), timeout=WAIT_S) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        response = b""
        while part := connection.recv(4096):
            response += part
        return response


def eventually(succeeds: Callable[[], bool]) -> bool:
    """Call a function until it returns True, for up to `WAIT_S` seconds."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with suppress(OSError, http.client.HTTPException):
            if succeeds():
                return True
    return False


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver(max_body=1 << 20) as result:
        yield result


def test_requests_get_otlp_responses(receiver: Receiver) -> None:
    for path, body, response_type in (
        ("/v1/traces", traces("a"), ExportTraceServiceResponse),
        ("/v1/logs", logs("put"), ExportLogsServiceResponse),
        ("/v1/metrics", metrics(), ExportMetricsServiceResponse),
    ):
        status, answer, headers = post(receiver, path, body)
        assert status == 200
        assert headers["Content-Type"] == "application/x-protobuf"
        assert response_type.FromString(answer) == response_type()
        assert post(receiver, path, b"\xff" * 10)[0] == 400
    receiver.snapshot().spans.clear()  # the caller's own list
    assert [span.name for span in receiver.snapshot().spans] == ["a"]
    assert [event.name for event in receiver.snapshot().events] == ["put"]
    assert receiver.counts()["received"] == 3


def test_a_gzip_bomb_is_refused_without_being_unpacked(receiver: Receiver) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = bytes(1 << 20)
    bomb = b"".join(packer.compress(zeros) for _ in range(512)) + packer.flush()
    assert len(bomb) < 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status, _, _ = post(receiver, body=bomb, Content_Encoding="gzip")
    assert status == 413
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@pytest.mark.parametrize(
    "body",
    [b"no gzip", gzip.compress(traces("a"))[:-5], gzip.compress(traces("a")) + b"more"],
    ids=["none", "half", "two"],
)
def test_invalid_gzip_is_refused(receiver: Receiver, body: bytes) -> None:
    assert post(receiver, body=body, Content_Encoding="gzip")[0] == 400


@pytest.mark.parametrize(
    ("path", "method", "headers", "status"),
    [
        ("/v1/other", "POST", {}, 404),
        ("/", "GET", {}, 404),
        ("/v1/traces", "GET", {}, 405),
        ("/v1/traces", "PUT", {}, 405),
        ("/v1/traces", "OPTIONS", {}, 405),
        ("/v1/traces", "BREW", {}, 405),
        ("/v1/traces", "POST", {"Content_Type": "application/json"}, 415),
        ("/v1/traces", "POST", {"Content_Type": ""}, 415),
        ("/v1/traces", "POST", {"Content_Encoding": "br"}, 415),
        ("/v1/traces", "POST", {"Content_Encoding": "gzip, gzip"}, 415),
        ("/v1/traces", "POST", {"Host": "attacker.example"}, 403),
        ("/v1/traces", "POST", {"Host": "127.0.0.1.attacker.example:80"}, 403),
        ("/v1/traces", "POST", {"Host": "192.168.0.1:4318"}, 403),
        ("/v1/traces", "POST", {"Host": ""}, 403),
    ],
)
def test_request_that_is_not_otlp_is_refused(
    receiver: Receiver, path: str, method: str, headers: dict[str, str], status: int
) -> None:
    actual_status, body, response_headers = post(receiver, path, traces("a"), method, **headers)
    assert actual_status == status
    assert response_headers["Content-Type"] == "application/x-protobuf"
    assert body[:1] == b"\x08"  # a google.rpc.Status: its code comes first
    assert receiver.snapshot().spans == []
    assert post(receiver, body=traces("a"))[0] == 200


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:1", "127.0.0.1", "127.8.8.8:4", "[::1]:4"]
)
def test_loopback_by_any_name_is_accepted(receiver: Receiver, host: str) -> None:
    assert post(receiver, body=traces("a"), Host=host)[0] == 200


def test_a_body_that_is_too_large_is_refused(receiver: Receiver) -> None:
    for length in (b"1048577", b"9" * 40):
        answer = send_raw(receiver, HEAD + b"Content-Length: " + length + b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413 ")
    assert post(receiver, body=bytes(8 << 20))[0] == 413  # also if most of the body is sent


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (b"", b"411"),
        (b"Content-Length: -1\r\n", b"400"),
        (b"Content-Length: x\r\n", b"400"),
        (b"Content-Length: 1\r\nContent-Length: 2\r\n", b"411"),
        (b"Transfer-Encoding: chunked\r\n", b"411"),
        (b"Content-Length: 1000\r\n", b"400"),  # the body never arrives
    ],
)
def test_invalid_content_length_is_refused(
    receiver: Receiver, headers: bytes, status: bytes
) -> None:
    assert send_raw(receiver, HEAD + headers + b"\r\n").startswith(b"HTTP/1.1 " + status + b" ")


@pytest.mark.parametrize("partial", [b"", b"POST /v1/tra", b"POST /v1/traces HTTP/1.1\r\nHost: lo"])
def test_a_silent_client_is_disconnected(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, partial: bytes
) -> None:
    monkeypatch.setattr(f"{HTTP_MODULE}.BoundedHandler.headers_s", 0.1)
    with socket.create_connection(("127.0.0.1", receiver.port), timeout=WAIT_S) as connection:
        connection.sendall(partial)
        assert connection.recv(1) == b""


def test_a_slow_client_has_one_deadline_for_all_headers(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{HTTP_MODULE}.BoundedHandler.headers_s", 0.5)
    with socket.create_connection(("127.0.0.1", receiver.port), timeout=WAIT_S) as connection:
        connection.settimeout(0.05)
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            with suppress(TimeoutError, ConnectionError):
                connection.sendall(b"X")
                if connection.recv(1) == b"":
                    break
        assert time.monotonic() < deadline


def test_silent_clients_do_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("observability.receiver.http.MAX_CONNECTIONS", 8)
    monkeypatch.setattr(f"{HTTP_MODULE}._MIN_IDLE_S", 0.0)
    with Receiver() as receiver, capture_logs() as logged, ExitStack() as stack:
        for _ in range(40):
            silent = socket.create_connection(("127.0.0.1", receiver.port), timeout=WAIT_S)
            stack.enter_context(silent).sendall(b"POST /the-secret HTTP/1.1\r\nHost: lo")
        assert post(receiver, body=traces("a"))[0] == 200
    assert [line["event"] for line in logged] == ["connection_dropped"]
    assert "the-secret" not in str(logged)


def test_a_grpc_exporter_is_refused_with_one_log_line() -> None:
    with Receiver() as receiver, capture_logs() as logged:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", receiver.port), timeout=WAIT_S) as peer:
                peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                assert peer.recv(1) == b""
    [line] = logged
    assert (line["event"], line["peer"]) == ("otlp_grpc_refused", "127.0.0.1")
    assert "http/protobuf" in line["expected"]


def test_a_long_refusal_reason_is_a_valid_status() -> None:
    with Receiver() as receiver:
        code, body, _ = post(receiver, Host="x" + "\xe9" * 100)
    assert code == 403
    # It has the fields of a google.rpc.Status: a number, and a text.
    status = ExportTracePartialSuccess.FromString(body)
    assert status.rejected_spans == 3
    assert status.error_message.startswith("Host 'x\xe9")


def test_connection_above_the_maximum_gets_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("observability.receiver.http.MAX_CONNECTIONS", 2)
    with Receiver() as receiver:
        connections = [http.client.HTTPConnection("127.0.0.1", receiver.port) for _ in range(2)]
        for connection in connections:
            connection.request("POST", "/v1/traces", traces("a"), PROTOBUF)
            assert connection.getresponse().read() == b""
        with socket.create_connection(("127.0.0.1", receiver.port), timeout=WAIT_S) as third:
            assert third.recv(4096).startswith(b"HTTP/1.1 503 ")
        for connection in connections:
            connection.close()
        assert eventually(lambda: post(receiver, body=traces("c"))[0] == 200)
        assert {span.name for span in receiver.snapshot().spans} == {"a", "c"}


def test_all_requests_of_concurrent_clients_are_received(receiver: Receiver) -> None:
    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", receiver.port, timeout=WAIT_S)
        for index in range(20):
            connection.request("POST", "/v1/traces", traces(f"{number}.{index}"), PROTOBUF)
            connection.getresponse().read()
        connection.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    records = receiver.wait_for(lambda records: len(records.spans) == 320, WAIT_S)
    for thread in threads:
        thread.join()
    assert len({span.name for span in records.spans}) == 320


def test_wait_for_returns_when_the_predicate_holds(receiver: Receiver) -> None:
    results = []
    called = threading.Event()

    def has_two_events(records: object) -> bool:
        called.set()
        return len(records.events) == 2  # type: ignore[attr-defined]

    thread = threading.Thread(
        target=lambda: results.append(receiver.wait_for(has_two_events, WAIT_S))
    )
    thread.start()
    assert called.wait(WAIT_S)
    post(receiver, "/v1/logs", logs("put"))
    post(receiver, "/v1/logs", logs("claimed"))
    thread.join(WAIT_S)
    assert [event.name for event in results[0].events] == ["put", "claimed"]


def test_wait_timeout_reports_received_counts(receiver: Receiver) -> None:
    post(receiver, body=traces("a"))
    with pytest.raises(TimeoutError, match=r"within 0\.01 s; spans received: 1, events"):
        receiver.wait_for(lambda records: len(records.spans) == 2, 0.01)


def test_invalid_host_and_max_body_are_refused() -> None:
    with pytest.raises(ValueError, match="max_body=0"):
        Receiver(max_body=0)
    for host in ("0.0.0.0", "192.168.0.1", "example.com", ""):
        with pytest.raises(ValueError, match="expected a loopback address"):
            Receiver(host=host)


def has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(
    not has_ipv6_loopback(), reason="needs IPv6 in the kernel, with ::1 on the loopback interface"
)
def test_receiver_listens_on_ipv6_loopback() -> None:
    with Receiver(host="::1") as receiver:
        assert receiver.endpoint == f"http://[::1]:{receiver.port}"


def test_requests_are_forwarded_unchanged() -> None:
    with Receiver() as collector:
        with Receiver(forward=collector.endpoint) as receiver:
            post(receiver, body=gzip.compress(traces("a")), Content_Encoding="gzip")
            post(receiver, "/v1/logs", logs("put"))
            post(receiver, "/v1/metrics", metrics())
        assert receiver.counts()["forwarded"] == collector.counts()["received"] == 3
        assert collector.snapshot() == receiver.snapshot()


def test_a_receiver_that_cannot_record_leaks_no_thread(tmp_path: Path) -> None:
    with Receiver(tmp_path):
        before = set(threading.enumerate())
        with pytest.raises(BlockingIOError):
            Receiver(tmp_path, forward="http://127.0.0.1:9")
        assert set(threading.enumerate()) <= before


def test_an_unreachable_collector_logs_one_warning() -> None:
    with capture_logs() as logged:
        with Receiver(forward="http://127.0.0.1:9") as receiver:
            for letter in "abcde":
                assert post(receiver, body=traces(letter))[0] == 200
        counts = receiver.counts()
    assert (counts["received"], counts["forwarded"], counts["not_forwarded"]) == (5, 0, 5)
    assert [line["event"] for line in logged] == ["forwarding_failed"]


def test_a_slow_collector_delays_neither_answers_nor_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("observability.receiver.forward._MAX_QUEUED_BYTES", 3 * len(traces("a")))
    with socket.create_server(("127.0.0.1", 0)) as silent, capture_logs() as logged:
        receiver = Receiver(forward=f"http://127.0.0.1:{silent.getsockname()[1]}")
        begin = time.monotonic()
        for letter in "abcdefghij":
            assert post(receiver, body=traces(letter))[0] == 200
        receiver.close(0.3)
        assert time.monotonic() - begin < 4
        counts = receiver.counts()
    # One is in flight, two were dropped from the queue at close, seven did not fit into it.
    assert (counts["received"], counts["not_forwarded"]) == (10, 9)
    assert [line["reason"] for line in logged] == ["the queue is full"]


def test_close_closes_idle_connections_and_is_idempotent() -> None:
    receiver = Receiver()
    idle = socket.create_connection(("127.0.0.1", receiver.port), timeout=WAIT_S)
    post(receiver, body=traces("a"))
    receiver.close()
    receiver.close()
    assert idle.recv(1) == b""
    idle.close()
    with pytest.raises(OSError, match="refused"):
        post(receiver, body=traces("a"))
    assert len(receiver.snapshot().spans) == 1


def test_a_client_that_disconnects_is_not_logged(
    receiver: Receiver, capfd: pytest.CaptureFixture[str]
) -> None:
    head = b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\n"
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", receiver.port)) as connection:
            connection.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
            )
            connection.sendall(head)
    assert post(receiver, body=traces("a"))[0] == 200
    assert capfd.readouterr() == ("", "")


def test_a_resent_request_counts_once(tmp_path: Path) -> None:
    with Receiver(tmp_path) as receiver:
        for body in (traces("a"), traces("b"), traces("a")):
            assert post(receiver, body=body)[0] == 200
        assert receiver.counts()["received"] == 2
        assert [span.name for span in receiver.snapshot().spans] == ["a", "b"]
    assert [span.name for span in read_folder(tmp_path).spans] == ["a", "b"]


@pytest.mark.parametrize(
    ("trace_id", "span_id"),
    [(b"", b"s" * 8), (bytes(16), b"s" * 8), (b"t" * 16, bytes(8)), (b"t" * 15, b"s" * 8)],
)
def test_only_the_span_without_valid_ids_is_rejected(trace_id: bytes, span_id: bytes) -> None:
    request = ExportTraceServiceRequest.FromString(traces("a", "b"))
    request.resource_spans[0].scope_spans[0].spans.add(trace_id=trace_id, span_id=span_id)
    with Receiver() as receiver:
        status, body, _ = post(receiver, body=request.SerializeToString())
        partial_success = ExportTraceServiceResponse.FromString(body).partial_success
        assert (status, partial_success.rejected_spans) == (200, 1)
        assert "all zero" in partial_success.error_message
        assert len(receiver.snapshot().spans) == 2


def test_a_repetition_is_answered_after_the_first_copy_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_write = threading.Event(), threading.Event()
    append = FrameWriter.append

    def append_later(self: FrameWriter, body: bytes) -> None:
        began.set()
        may_write.wait(WAIT_S)
        append(self, body)

    monkeypatch.setattr(FrameWriter, "append", append_later)
    body = traces("step")
    with Receiver(tmp_path) as receiver:
        first, repeated = (
            threading.Thread(target=post, args=(receiver, "/v1/traces", body)) for _ in range(2)
        )
        first.start()
        assert began.wait(WAIT_S)
        repeated.start()
        repeated.join(0.3)
        assert repeated.is_alive()
        may_write.set()
        for thread in (first, repeated):
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert len(receiver.snapshot().spans) == 1
    assert len(read_folder(tmp_path).spans) == 1
