"""A broken collector causes one warning and dropped items, but never ends the run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from setup_processes import (
    Collector,
    ScriptResult,
    collector,
    hanging_collector,
    is_balanced,
    run_script,
    status,
)

from observability.receiver import Receiver

# It exports several batches of each signal, so that a warning per batch would be noticed.
EXPORT_SCRIPT = """
telemetry = setup("svc", endpoint=ENDPOINT, export_interval_s=0.05, shutdown_timeout_s=5.0)
for _ in range(3):
    spans(40)
    get_logger("test").emit(event_name="dataplane.put", body=["a"])
    telemetry.flush(1.0)
begin = time.monotonic()
telemetry.shutdown()
report(seconds=time.monotonic() - begin, counts=telemetry.counts())
"""


SPANS_ONLY = {"OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}


def run_export_script(endpoint: str) -> ScriptResult:
    result = run_script(EXPORT_SCRIPT, endpoint, OTEL_BSP_MAX_EXPORT_BATCH_SIZE="10")
    assert result.exit_code == 0
    assert is_balanced(result.reports[0]["counts"])
    assert (result.reports[0]["counts"]["spans"]["recorded"]) == 120
    assert result.reports[0]["seconds"] < 6
    return result


@pytest.mark.parametrize(
    ("answer", "trouble"),
    [
        (status(400), "collector answered 400"),
        (status(404, b"<html>" * 100_000), "collector answered 404"),
        (status(503), "collector answered 503"),
        (status(429, **{"Retry-After": "3600"}), "collector answered 429"),
        (status(302, Location="http://127.0.0.1:9/login"), "collector answered 302"),
        (lambda handler: handler.connection.close(), "collector is unreachable"),
        (lambda handler: handler.wfile.write(b"SSH-2.0 hello\r\n"), "collector is unreachable"),
    ],
    ids=["400", "404", "503", "429", "redirect", "hangs up", "speaks something else"],
)
def test_a_refusing_collector_costs_one_warning_and_its_items(
    answer: Callable[[Any], None], trouble: str
) -> None:
    with collector(answer) as server:
        result = run_export_script(server.endpoint)
    assert result.troubles == [trouble]
    assert all(each["exported"] == 0 for each in result.reports[0]["counts"].values())
    assert result.dropped["spans"]["dropped"] == 120


def test_hanging_collector_costs_one_warning_and_bounded_time() -> None:
    with hanging_collector() as server:
        result = run_script(
            EXPORT_SCRIPT.replace("flush(1.0)", "flush(0.1)"),
            server.endpoint,
            OTEL_EXPORTER_OTLP_TIMEOUT="0.5",
        )
    assert result.troubles == ["collector timed out"]
    assert result.reports[0]["seconds"] < 3
    assert is_balanced(result.reports[0]["counts"])


def trickles(beginning: bytes) -> Callable[[Any], None]:
    """Return an answer that continues with a byte every 50 ms for 20 s."""

    def answer(handler: Any) -> None:
        handler.close_connection = True
        handler.wfile.write(beginning)
        with suppress(OSError):  # the client closes the connection
            for _ in range(400):
                time.sleep(0.05)
                handler.wfile.write(b"x")

    return answer


@pytest.mark.parametrize(
    "beginning",
    [b"HTTP/1.1 200 OK\r\nX-Header: ", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n"],
    ids=["headers", "body"],
)
def test_trickling_collector_is_bounded_by_the_export_timeout(beginning: bytes) -> None:
    with collector(trickles(beginning)) as server:
        result = run_script(
            """
telemetry = setup("svc", endpoint=ENDPOINT, export_interval_s=3600)
spans(1)
begin = time.monotonic()
flushed = telemetry.flush(15)
report(flushed=flushed, seconds=time.monotonic() - begin)
telemetry.shutdown(1)
""",
            server.endpoint,
            **SPANS_ONLY,
            OTEL_EXPORTER_OTLP_TIMEOUT="0.5",
        )
    assert not result.reports[0]["flushed"]
    assert result.reports[0]["seconds"] < 8
    assert result.troubles == ["collector timed out"]


@pytest.mark.parametrize(
    "endpoint",
    [
        "http://user:secret@127.0.0.1:9",  # no listener
        "not a url",
        "http://127.0.0.1:99999",
        "ftp://127.0.0.1:4318",
        "http://user:secret@[bad",
        "http://user:secret/secret@bad",
        "http://" + "a" * 300 + ":4318",
    ],
)
def test_unreachable_endpoint_warns_once_without_password(
    endpoint: str,
) -> None:
    result = run_export_script(endpoint)
    assert len(result.troubles) == 1
    assert "secret" not in json.dumps(result.warnings)
    assert all(each["exported"] == 0 for each in result.reports[0]["counts"].values())


def test_interval_shorter_than_the_setup_costs_no_warning() -> None:
    result = run_script(
        """
telemetry = setup("svc", endpoint=ENDPOINT, export_interval_s=1e-5)
telemetry.shutdown()
report()
""",
        "http://127.0.0.1:9",
    )
    assert result.troubles == ["collector is unreachable"]


def test_a_malformed_endpoint_costs_one_warning_per_signal() -> None:
    result = run_script(
        "telemetry = setup('svc', endpoint='http://[::1'); spans(3); report(ok=telemetry.flush())",
        OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED="true",
    )
    assert result.reports == [{"ok": True}]
    assert result.troubles == ["invalid endpoint", "exporter not created: ValueError"]


def test_items_beyond_the_queue_are_counted_and_reported_once() -> None:
    with hanging_collector() as server:
        result = run_script(
            """
telemetry = setup("svc", endpoint=ENDPOINT)
pending = []
for _ in range(100):
    spans(1)
    get_logger("test").emit(event_name="dataplane.put", body=[])
    pending.append(max(each["pending"] for each in telemetry.counts().values()))
while requests_received() < 2:  # else a request may time out before shutdown does
    time.sleep(0.01)
telemetry.shutdown(0.2)
report(maximum=max(pending), counts=telemetry.counts())
""",
            server.endpoint,
            OTEL_BSP_MAX_QUEUE_SIZE="10",
            OTEL_BSP_MAX_EXPORT_BATCH_SIZE="5",
            OTEL_BLRP_MAX_QUEUE_SIZE="7",
            OTEL_METRICS_EXPORTER="none",
            OTEL_EXPORTER_OTLP_TIMEOUT="30",
        )
    assert result.reports[0]["maximum"] == 10
    spans, events = (result.reports[0]["counts"][each] for each in ("spans", "events"))
    assert (spans["recorded"], spans["queue_full"], spans["dropped"]) == (100, 90, 100)
    assert (events["recorded"], events["queue_full"], events["dropped"]) == (100, 93, 100)
    assert result.troubles == ["queue full", "shutdown timed out"]
    assert result.dropped["spans"]["dropped"] == 100


def test_flush_and_shutdown_time_out_in_many_threads() -> None:
    with hanging_collector() as server:
        result = run_script(
            """
telemetry = setup("svc", endpoint=ENDPOINT)
spans(600)
answers = []
def time_out():
    begin = time.monotonic()
    flushed = telemetry.flush(0.3)
    middle = time.monotonic()
    telemetry.shutdown(0.3)
    answers.append((flushed, middle - begin, time.monotonic() - middle))
threads = [threading.Thread(target=time_out) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
telemetry.shutdown()
report(answers=answers, flushed=telemetry.flush(0.0), counts=telemetry.counts())
""",
            server.endpoint,
        )
    assert all(
        not flushed and first < 2 and second < 2
        for flushed, first, second in result.reports[0]["answers"]
    )
    assert is_balanced(result.reports[0]["counts"])
    assert not result.reports[0]["flushed"]  # some items were dropped


def test_flushes_that_time_out_do_not_pile_up_threads() -> None:
    with hanging_collector() as server:
        result = run_script(
            """
telemetry = setup("svc", endpoint=ENDPOINT, shutdown_timeout_s=0.2)
before = threading.active_count()
spans(10)
flushed = [telemetry.flush(0.01) for _ in range(50)]
report(flushed=any(flushed), new_threads=threading.active_count() - before)
""",
            server.endpoint,
        )
    assert not result.reports[0]["flushed"]
    assert result.reports[0]["new_threads"] <= 3  # one per signal


def test_dropped_items_are_a_metric_by_signal_and_reason() -> None:
    with collector(status(400)) as server:
        result = run_script(
            """
import urllib.request
telemetry = setup("svc", endpoint=ENDPOINT, prometheus_port=0, export_interval_s=3600)
host, port = telemetry.prometheus_address
def lost():
    page = urllib.request.urlopen(f"http://{host}:{port}/metrics").read().decode()
    return [line for line in page.splitlines() if line.startswith("dataplane_telemetry_dropped")]
before = lost()
with trace.get_tracer("test").start_as_current_span("lost"):
    pass
telemetry.flush(10)
report(before=before, after=lost())
""",
            server.endpoint,
        )
    before, after = result.reports[0]["before"], result.reports[0]["after"]
    assert len(before) == 3 * 3
    assert all(line.endswith(" 0.0") for line in before)  # so that the first loss is an increase
    [line] = set(after) - set(before)
    assert 'dataplane_reason="export_failed"' in line
    assert 'dataplane_signal="spans"' in line
    assert line.endswith(" 1.0")


def test_a_repeated_log_of_the_sdk_is_reported_once(receiver: Receiver) -> None:
    result = run_script(
        """
setup("svc", endpoint=ENDPOINT)
span = trace.get_tracer("test").start_span("work")
for _ in range(50):
    span.set_attribute("tensor", object())
span.end()
""",
        receiver.endpoint,
    )
    assert len(result.troubles) == 1
    assert len(receiver.snapshot().spans) == 1


@pytest.mark.parametrize(
    ("answer", "rejected", "reason"),
    [
        (bytes([0x0A, 0x02, 0x08, 3]), 3, "3 items"),
        (bytes([0x0A, 0x0D, 0x08, 3, 0x12, 9]) + b"too\nlarge", 3, "3 items: too large"),
        (b"\xff" * 1000, 0, ""),
    ],
    ids=["partial_success { rejected_spans: 3 }", "with a message", "garbage"],
)
def test_items_that_a_collector_rejects_are_dropped(
    answer: bytes, rejected: int, reason: str
) -> None:
    with collector(status(200, answer)) as server:
        result = run_script(
            """
telemetry = setup("svc", endpoint=ENDPOINT)
spans(5)
telemetry.shutdown()
report(**telemetry.counts()["spans"])
""",
            server.endpoint,
            **SPANS_ONLY,
        )
    counts = result.reports[0]
    assert (counts["exported"], counts["export_failed"]) == (5 - rejected, rejected)
    assert result.troubles == ["collector rejected items"][: bool(rejected)]
    assert [each["reason"] for each in result.warnings if "reason" in each] == [reason] * bool(
        reason
    )


def unavailable_until_open() -> Callable[[Any], None]:
    """Return an answer of 503 until a request to ``/open``, then of 200."""
    is_open = threading.Event()

    def answer(handler: Any) -> None:
        if handler.path == "/open":
            is_open.set()
        status(200 if is_open.is_set() else 503)(handler)

    return answer


def received_span_names(server: Collector) -> list[str]:
    """Return the names of the spans received after the request to ``/open``."""
    opened = [path for path, _ in server.requests].index("/open")
    return [
        span.name
        for (path, _), body in list(zip(server.requests, server.bodies, strict=True))[opened + 1 :]
        if path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


RESTART_PREAMBLE = """
import urllib.request
telemetry = setup("svc", endpoint=ENDPOINT, export_interval_s=3600)
def record_spans(*names):
    for name in names:
        trace.get_tracer("test").start_span(str(name)).end()
def counts():
    return telemetry.counts()["spans"]
def open_collector():
    urllib.request.urlopen(urllib.request.Request(ENDPOINT + "/open", data=b"")).read()
def wait_until_sent():
    deadline = time.monotonic() + 30
    while counts()["pending"] and time.monotonic() < deadline:
        time.sleep(0.01)
"""


def run_with_restart(script: str, **variables: str) -> tuple[ScriptResult, list[str]]:
    """Run a script with a collector that is unavailable until it calls ``open_collector``."""
    with collector(unavailable_until_open()) as server:
        result = run_script(RESTART_PREAMBLE + script, server.endpoint, **SPANS_ONLY, **variables)
        return result, received_span_names(server) if "open_collector()" in script else []


def test_a_restarted_collector_gets_everything_once() -> None:
    result, names = run_with_restart("""
record_spans("a", "b")
in_outage = telemetry.flush(20), counts()
record_spans("c")
open_collector()
report(in_outage=in_outage, later=(telemetry.flush(20), counts()))
""")
    is_flushed, before = result.reports[0]["in_outage"]
    assert not is_flushed
    assert (before["pending"], before["dropped"]) == (2, 0)
    is_flushed, after = result.reports[0]["later"]
    assert is_flushed
    assert (after["exported"], after["dropped"]) == (3, 0)
    assert names == ["a", "b", "c"]
    assert result.troubles == ["collector answered 503"]


@pytest.mark.parametrize(
    ("spans", "script", "variables"),
    [
        (1, "open_collector(); wait_until_sent()", {"OTEL_BSP_SCHEDULE_DELAY": "200"}),
        (4, "open_collector(); telemetry.flush(20)", {"OTEL_BSP_MAX_QUEUE_SIZE": "4"}),
        # So short that the SDK passes a timeout of 0 to the request.
        (
            1,
            "open_collector()\nfor _ in range(100): telemetry.flush(20) or time.sleep(0.05)",
            {"OTEL_EXPORTER_OTLP_TIMEOUT": "0.000000001"},
        ),
    ],
    ids=["without more spans", "as large as the queue", "no time for an attempt"],
)
def test_a_retained_batch_is_sent_after_the_outage(
    spans: int, script: str, variables: dict[str, str]
) -> None:
    script = f"record_spans(*range({spans})); telemetry.flush(20); report(**counts())\n{script}"
    if "OTEL_BSP_SCHEDULE_DELAY" in variables:
        script = f"telemetry.shutdown(); telemetry = setup('svc', endpoint=ENDPOINT)\n{script}"
    result, names = run_with_restart(f"{script}\nreport(**counts())", **variables)
    retained, sent = result.reports
    assert (retained["pending"], retained["dropped"]) == (spans, 0)
    assert (sent["exported"], sent["dropped"]) == (spans, 0)
    # A batch that arrived, but was not answered in time, is sent again.
    assert sorted(set(names)) == [str(number) for number in range(spans)]


def test_the_newest_half_of_the_queue_is_retained_in_an_outage() -> None:
    result, names = run_with_restart(
        """
for number in range(10):
    record_spans(*range(4 * number, 4 * number + 4))
    telemetry.flush(20)
    report(**counts())
open_collector()
telemetry.flush(20)
report(**counts())
""",
        OTEL_BSP_MAX_QUEUE_SIZE="20",
        OTEL_BSP_MAX_EXPORT_BATCH_SIZE="4",
    )
    *during_outage, last = result.reports
    assert all(each["pending"] <= 10 for each in during_outage)
    assert all(
        each["recorded"] == each["pending"] + each["export_failed"] for each in during_outage
    )
    assert (last["exported"], last["export_failed"]) == (8, 32)
    assert names == [str(number) for number in range(32, 40)]


def test_retained_batches_are_dropped_in_time_at_process_end() -> None:
    result, _ = run_with_restart("""
record_spans("a")
telemetry.flush(20)
began = time.monotonic()
telemetry.shutdown()
report(seconds=time.monotonic() - began, **counts())
""")
    assert result.reports[0]["seconds"] < 7  # 5 s are the default
    assert (result.reports[0]["pending"], result.reports[0]["dropped"]) == (0, 1)


def test_only_the_item_that_cannot_be_encoded_is_lost(
    receiver: Receiver,
) -> None:
    result = run_script(
        """
telemetry = setup("svc", endpoint=ENDPOINT, export_interval_s=3600)
tracer, log = trace.get_tracer("test"), get_logger("test")
with tracer.start_as_current_span("half a surrogate pair \\ud800"):
    tracer.start_span("größe").end()
tracer.start_span(7).end()
for body in ('["half \\ud800"]', object()):
    log.emit(event_name="dataplane.put", body=body)
report(flushed=telemetry.flush())
telemetry.shutdown()
report(**telemetry.counts())
""",
        receiver.endpoint,
    )
    sent, counts = result.reports
    assert [span.name for span in receiver.snapshot().spans] == ["größe", "half a surrogate pair ?"]
    assert [event.sample_ids for event in receiver.snapshot().events] == [("half ?",)]
    assert is_balanced({name: counts[name] for name in ("spans", "events")})
    assert (counts["spans"]["exported"], counts["spans"]["export_failed"]) == (2, 1)
    assert (counts["events"]["exported"], counts["events"]["export_failed"]) == (1, 1)
    assert sent == {"flushed": False}
    assert result.troubles == ["items not exported"]
