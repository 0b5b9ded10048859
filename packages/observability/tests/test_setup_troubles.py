"""What is wrong with a collector costs a warning and what was meant for it, never the run."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from setup_processes import Collector, Ran, balanced, collector, hanging, run, status

from observability.receiver import Receiver

# Several batches of each signal, so that a warning per batch would show.
TROUBLE = """
telemetry = setup("svc", endpoint=ENDPOINT, export_interval_s=0.05, shutdown_timeout_s=5.0)
for _ in range(3):
    spans(40)
    get_logger("test").emit(event_name="dataplane.put", body=["a"])
    telemetry.flush(1.0)
begin = time.monotonic()
telemetry.shutdown()
tell(seconds=time.monotonic() - begin, counts=telemetry.counts())
"""


def troubled(endpoint: str) -> Ran:
    ran = run(TROUBLE, endpoint, OTEL_BSP_MAX_EXPORT_BATCH_SIZE="10")
    assert ran.code == 0
    assert balanced(ran.told[0]["counts"])
    assert (ran.told[0]["counts"]["spans"]["made"]) == 120
    assert ran.told[0]["seconds"] < 6
    return ran


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
def test_a_collector_that_refuses_costs_one_warning_and_what_was_meant_for_it(
    answer: Callable[[Any], None], trouble: str
) -> None:
    with collector(answer) as made:
        ran = troubled(made.endpoint)
    assert ran.troubles == [trouble]
    assert all(each["exported"] == 0 for each in ran.told[0]["counts"].values())
    assert [each["event"] for each in ran.warnings][-1] == "telemetry_dropped"


def test_a_collector_that_is_down_costs_one_warning_without_its_password() -> None:
    ran = troubled("http://user:secret@127.0.0.1:9")
    assert ran.troubles == ["collector is unreachable"]
    assert "secret" not in json.dumps(ran.warnings)


def test_a_collector_that_hangs_costs_one_warning_and_bounded_time() -> None:
    with hanging() as made:
        ran = run(
            TROUBLE.replace("flush(1.0)", "flush(0.1)"),
            made.endpoint,
            OTEL_EXPORTER_OTLP_TIMEOUT="0.5",
        )
    assert ran.troubles == ["collector timed out"]
    assert ran.told[0]["seconds"] < 3
    assert balanced(ran.told[0]["counts"])


@pytest.mark.parametrize(
    "endpoint",
    [
        "not a url",
        "http://[::1",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:0",
        "ftp://127.0.0.1:4318",
        "http://",
        "http://user:secret@[bad",
        "http://user:secret/secret@bad",
        "http://" + "a" * 300 + ":4318",
    ],
)
def test_an_endpoint_that_is_none_costs_one_warning(endpoint: str) -> None:
    ran = troubled(endpoint)
    assert len(ran.troubles) == 1
    assert "secret" not in json.dumps(ran.warnings)
    assert all(each["exported"] == 0 for each in ran.told[0]["counts"].values())


def test_an_endpoint_the_sdk_chokes_on_costs_one_warning_per_kind_and_no_run() -> None:
    ran = run(
        "telemetry = setup('svc', endpoint='http://[::1'); spans(3); tell(ok=telemetry.flush())",
        OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED="true",
    )
    assert ran.told == [{"ok": True}]
    assert ran.troubles == ["invalid endpoint", "exporter not made: ValueError"]


def test_an_answer_of_garbage_with_status_200_counts_as_exported() -> None:
    with collector(status(200, b"\xff" * 1000)) as made:
        ran = troubled(made.endpoint)
    assert ran.warnings == []
    assert ran.told[0]["counts"]["spans"]["exported"] == 120


def test_what_a_collector_rejects_of_a_batch_is_dropped_and_told() -> None:
    rejected = bytes([0x0A, 0x02, 0x08, 3])  # partial_success { rejected_spans: 3 }
    with collector(status(200, rejected)) as made:
        ran = run(
            """
telemetry = setup("svc", endpoint=ENDPOINT)
spans(5)
telemetry.shutdown()
tell(**telemetry.counts()["spans"])
""",
            made.endpoint,
            OTEL_METRICS_EXPORTER="none",
        )
    assert (ran.told[0]["exported"], ran.told[0]["export_failed"]) == (2, 3)
    assert ran.troubles == ["collector rejected a part"]


def test_what_does_not_fit_the_queue_is_dropped_counted_exactly_and_told_once() -> None:
    with hanging() as made:
        ran = run(
            """
telemetry = setup("svc", endpoint=ENDPOINT)
pending = []
for _ in range(100):
    spans(1)
    get_logger("test").emit(event_name="dataplane.put", body=[])
    pending.append(max(each["pending"] for each in telemetry.counts().values()))
telemetry.shutdown(0.2)
tell(most=max(pending), counts=telemetry.counts())
""",
            made.endpoint,
            OTEL_BSP_MAX_QUEUE_SIZE="10",
            OTEL_BSP_MAX_EXPORT_BATCH_SIZE="5",
            OTEL_BLRP_MAX_QUEUE_SIZE="7",
            OTEL_METRICS_EXPORTER="none",
        )
    assert ran.told[0]["most"] == 10
    spans, events = (ran.told[0]["counts"][each] for each in ("spans", "events"))
    assert (spans["made"], spans["queue_full"], spans["dropped"]) == (100, 90, 100)
    assert (events["made"], events["queue_full"], events["dropped"]) == (100, 93, 100)
    assert ran.troubles == ["queue full", "shutdown ran out of time"]
    assert ran.warnings[-1]["event"] == "telemetry_dropped"
    assert ran.warnings[-1]["spans"]["dropped"] == 100


def test_flush_and_shutdown_keep_to_their_time_from_many_threads() -> None:
    with hanging() as made:
        ran = run(
            """
telemetry = setup("svc", endpoint=ENDPOINT)
spans(600)
answers = []
def impatient():
    begin = time.monotonic()
    flushed = telemetry.flush(0.3)
    middle = time.monotonic()
    telemetry.shutdown(0.3)
    answers.append((flushed, middle - begin, time.monotonic() - middle))
threads = [threading.Thread(target=impatient) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
telemetry.shutdown()
tell(answers=answers, flushed=telemetry.flush(0.0), counts=telemetry.counts())
""",
            made.endpoint,
        )
    assert all(
        not flushed and first < 2 and second < 2
        for flushed, first, second in ran.told[0]["answers"]
    )
    assert balanced(ran.told[0]["counts"])
    assert not ran.told[0]["flushed"]  # some was given up


def test_impatient_flushes_do_not_pile_up_threads() -> None:
    with hanging() as made:
        ran = run(
            """
telemetry = setup("svc", endpoint=ENDPOINT, shutdown_timeout_s=0.2)
before = threading.active_count()
spans(10)
flushed = [telemetry.flush(0.01) for _ in range(50)]
tell(flushed=any(flushed), more=threading.active_count() - before)
""",
            made.endpoint,
        )
    assert not ran.told[0]["flushed"]
    assert ran.told[0]["more"] <= 3  # one per signal


def test_what_is_lost_is_a_metric_by_signal_and_reason() -> None:
    with collector(status(400)) as made:
        ran = run(
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
tell(before=before, after=lost())
""",
            made.endpoint,
        )
    before, after = ran.told[0]["before"], ran.told[0]["after"]
    assert len(before) == 2 * 3
    assert all(line.endswith(" 0.0") for line in before)  # so that the first loss is an increase
    [line] = set(after) - set(before)
    assert 'dataplane_reason="export_failed"' in line
    assert 'dataplane_signal="spans"' in line
    assert line.endswith(" 1.0")


def test_what_the_sdk_logs_per_item_is_told_once(receiver: Receiver) -> None:
    ran = run(
        """
setup("svc", endpoint=ENDPOINT)
span = trace.get_tracer("test").start_span("work")
for _ in range(50):
    span.set_attribute("tensor", object())
span.end()
""",
        receiver.endpoint,
    )
    assert len(ran.troubles) == 1
    assert len(receiver.snapshot().spans) == 1


def restarting() -> Callable[[Any], None]:
    """Of a collector that asks for patience until it is told, at ``/open``, that it is up."""
    up = threading.Event()

    def answer(handler: Any) -> None:
        if handler.path == "/open":
            up.set()
        status(200 if up.is_set() else 503)(handler)

    return answer


def received(made: Collector) -> list[str]:
    """Names of the spans of the requests that came since it is up, and how often each came."""
    opened = [path for path, _ in made.requests].index("/open")
    return [
        span.name
        for (path, _), body in list(zip(made.requests, made.bodies, strict=True))[opened + 1 :]
        if path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


PATIENT = """
import urllib.request
telemetry = setup("svc", endpoint=ENDPOINT, export_interval_s=3600)
def named(*names):
    for name in names:
        trace.get_tracer("test").start_span(str(name)).end()
def opened():
    urllib.request.urlopen(urllib.request.Request(ENDPOINT + "/open", data=b"")).read()
"""


def test_a_collector_that_is_started_again_misses_nothing_and_gets_nothing_twice() -> None:
    with collector(restarting()) as made:
        ran = run(
            PATIENT
            + """
named("a", "b")
kept = telemetry.flush(20), telemetry.counts()["spans"]
named("c")
opened()
sent = telemetry.flush(20), telemetry.counts()["spans"]
tell(kept=kept, sent=sent)
""",
            made.endpoint,
            OTEL_METRICS_EXPORTER="none",
            OTEL_LOGS_EXPORTER="none",
        )
    kept, counts = ran.told[0]["kept"]
    assert not kept
    assert (counts["pending"], counts["dropped"]) == (2, 0)
    sent, counts = ran.told[0]["sent"]
    assert sent
    assert (counts["exported"], counts["dropped"]) == (3, 0)
    assert received(made) == ["a", "b", "c"]
    assert ran.troubles == ["collector answered 503"]


def test_a_batch_whose_time_is_up_before_its_last_attempt_is_kept_as_any_other() -> None:
    with collector(restarting()) as made:
        ran = run(
            PATIENT
            + """
named("a")
assert not telemetry.flush(20)
kept = telemetry.counts()["spans"]
opened()
until = time.monotonic() + 30
while not telemetry.flush(20) and time.monotonic() < until:  # an attempt is short here
    pass
tell(kept=kept, sent=telemetry.counts()["spans"])
""",
            made.endpoint,
            OTEL_METRICS_EXPORTER="none",
            OTEL_LOGS_EXPORTER="none",
            # Too short for the SDK, which then asks for an attempt of 0 seconds.
            OTEL_EXPORTER_OTLP_TIMEOUT="0.000000001",
        )
    assert (ran.told[0]["kept"]["pending"], ran.told[0]["kept"]["dropped"]) == (1, 0)
    assert (ran.told[0]["sent"]["exported"], ran.told[0]["sent"]["dropped"]) == (1, 0)


def test_of_a_collector_that_stays_away_the_newest_half_of_the_queue_is_kept() -> None:
    with collector(restarting()) as made:
        ran = run(
            PATIENT
            + """
counts = []
for number in range(10):
    named(*range(4 * number, 4 * number + 4))
    telemetry.flush(20)
    counts.append(telemetry.counts()["spans"])
opened()
telemetry.flush(20)
tell(counts=counts, last=telemetry.counts()["spans"])
""",
            made.endpoint,
            OTEL_METRICS_EXPORTER="none",
            OTEL_LOGS_EXPORTER="none",
            OTEL_BSP_MAX_QUEUE_SIZE="20",
            OTEL_BSP_MAX_EXPORT_BATCH_SIZE="4",
        )
    counts, last = ran.told[0]["counts"], ran.told[0]["last"]
    assert all(each["pending"] <= 10 for each in counts)
    assert all(each["made"] == each["pending"] + each["export_failed"] for each in counts)
    assert (last["exported"], last["export_failed"]) == (8, 32)
    assert received(made) == [str(number) for number in range(32, 40)]


def test_what_is_kept_is_given_up_in_time_when_the_process_ends() -> None:
    with collector(restarting()) as made:
        ran = run(
            PATIENT
            + """
named("a")
telemetry.flush(20)
began = time.monotonic()
telemetry.shutdown()
tell(took=time.monotonic() - began, counts=telemetry.counts()["spans"])
""",
            made.endpoint,
            OTEL_METRICS_EXPORTER="none",
            OTEL_LOGS_EXPORTER="none",
        )
    assert ran.told[0]["took"] < 7  # 5 s are the default
    assert (ran.told[0]["counts"]["pending"], ran.told[0]["counts"]["dropped"]) == (0, 1)


def test_what_is_kept_is_tried_again_though_nothing_more_is_told() -> None:
    with collector(restarting()) as made:
        ran = run(
            PATIENT.replace("3600", "0.2")
            + """
named("a")
assert not telemetry.flush(20)
opened()
until = time.monotonic() + 30
while telemetry.counts()["spans"]["pending"] and time.monotonic() < until:
    time.sleep(0.01)
tell(**telemetry.counts()["spans"])
""",
            made.endpoint,
            OTEL_METRICS_EXPORTER="none",
            OTEL_LOGS_EXPORTER="none",
        )
    assert (ran.told[0]["exported"], ran.told[0]["dropped"]) == (1, 0)


def test_a_batch_as_large_as_the_queue_is_kept_too() -> None:
    with collector(restarting()) as made:
        ran = run(
            PATIENT
            + """
named(*range(4))
telemetry.flush(20)
opened()
telemetry.flush(20)
tell(**telemetry.counts()["spans"])
""",
            made.endpoint,
            OTEL_METRICS_EXPORTER="none",
            OTEL_LOGS_EXPORTER="none",
            OTEL_BSP_MAX_QUEUE_SIZE="4",
            OTEL_BSP_MAX_EXPORT_BATCH_SIZE="4",
        )
    assert (ran.told[0]["exported"], ran.told[0]["dropped"]) == (4, 0)
    assert received(made) == ["0", "1", "2", "3"]


def test_a_bad_name_costs_at_most_its_own_span_or_event(receiver: Receiver) -> None:
    ran = run(
        """
telemetry = setup("svc", endpoint=ENDPOINT, export_interval_s=3600)
tracer, log = trace.get_tracer("test"), get_logger("test")
spans(3)
with tracer.start_as_current_span("half a surrogate pair \\ud800"):
    tracer.start_span("child \\udfff").end()
tracer.start_span(7).end()
for body in ("[]", "half \\ud800", object()):
    log.emit(event_name="dataplane.put", body=body)
tell(flushed=telemetry.flush())
telemetry.shutdown()
tell(**telemetry.counts())
""",
        receiver.endpoint,
    )
    sent, counts = ran.told
    names = sorted(span.name for span in receiver.snapshot().spans)
    assert names == [
        "child \N{REPLACEMENT CHARACTER}",
        "half a surrogate pair \N{REPLACEMENT CHARACTER}",
        *["work"] * 3,
    ]
    assert len(receiver.snapshot().events) == 2
    assert balanced({name: counts[name] for name in ("spans", "events")})
    assert (counts["spans"]["exported"], counts["spans"]["export_failed"]) == (5, 1)
    assert (counts["events"]["exported"], counts["events"]["export_failed"]) == (2, 1)
    assert sent == {"flushed": False}
    assert ran.troubles == ["items cannot be encoded"]
