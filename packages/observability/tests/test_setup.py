"""What `observability.setup` promises, of whole processes: each test runs one or more.

Providers are global to a process, so none is set up in the one that runs the tests.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import observability
from observability.receiver import Receiver

DEADLINE_S = 60.0

PREAMBLE = """
import json, os, signal, sys, threading, time
import structlog
structlog.configure(
    processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()],
    logger_factory=structlog.PrintLoggerFactory(sys.stderr),
)
from opentelemetry import baggage, context, metrics, trace
from opentelemetry._logs import get_logger
from observability.setup import setup
ENDPOINT = sys.argv[1]
def tell(**facts):
    print(json.dumps(facts), flush=True)
def spans(number):
    for _ in range(number):
        trace.get_tracer("test").start_span("work").end()
"""


@dataclass
class Ran:
    """What a script did."""

    code: int
    told: list[dict[str, Any]]
    warnings: list[dict[str, Any]]
    noise: list[str] = field(default_factory=list)

    @property
    def troubles(self) -> list[str]:
        return [each["trouble"] for each in self.warnings if each["event"] == "telemetry_trouble"]


def started(script: str, endpoint: str = "", **variables: str) -> subprocess.Popen[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + script, endpoint],
        env=inherited | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str]) -> Ran:
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    ran = Ran(process.returncode, [json.loads(line) for line in out.splitlines()], [])
    for line in err.splitlines():
        if line.startswith("{"):
            ran.warnings.append(json.loads(line))
        else:
            ran.noise.append(line)
    return ran


def run(script: str, endpoint: str = "", **variables: str) -> Ran:
    ran = ended(started(script, endpoint, **variables))
    assert ran.noise == []
    return ran


class Collector:
    """An HTTP server that answers as it is told."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.requests.append((self.path, dict(self.headers)))
                self.rfile.read(int(self.headers["Content-Length"]))
                answer(self)

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def collector(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[Collector]:
    made = Collector(answer)
    try:
        yield made
    finally:
        made.close()


def status(code: int, body: bytes = b"", **headers: str) -> Callable[[Any], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@contextmanager
def hanging() -> Iterator[Collector]:
    """A collector that takes a request and does not answer before the test is over."""
    over = threading.Event()
    with collector(lambda handler: over.wait(DEADLINE_S) and None) as made:
        yield made
        over.set()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


def balanced(counts: dict[str, dict[str, int]]) -> bool:
    """After shutdown: made = exported + dropped."""
    return all(
        each["made"] == each["exported"] + each["dropped"]
        and each["dropped"] == each["queue_full"] + each["export_failed"] + each["shutdown"]
        and each["pending"] == 0
        for each in counts.values()
    )


def test_spans_and_events_arrive_with_the_resource_of_their_process(receiver: Receiver) -> None:
    ran = run(
        """
with setup("grpo.policy", instance="3", run_id="run-7", endpoint=ENDPOINT) as telemetry:
    with trace.get_tracer("test").start_as_current_span("forward"):
        get_logger("test").emit(event_name="dataplane.put", body='["a", "b"]')
    metrics.get_meter("test").create_counter("c").add(1)
tell(counts=telemetry.counts(), pid=os.getpid())
""",
        receiver.endpoint,
    )
    records = receiver.snapshot()
    [span], [event] = records.spans, records.events
    assert (span.name, event.name, event.sample_ids) == ("forward", "put", ("a", "b"))
    assert (event.trace_id, event.span_id) == (span.trace_id, span.span_id)
    assert span.process == event.process
    assert span.process.label == "grpo.policy 3"
    assert span.process.pid == ran.told[0]["pid"]
    assert span.process.host == os.uname().nodename
    for counts in ran.told[0]["counts"].values():
        assert (counts["made"], counts["exported"], counts["dropped"]) == (1, 1, 0)
    assert ran.warnings == []


def test_without_arguments_and_variables_nothing_is_recorded_and_no_thread_runs() -> None:
    ran = run("""
telemetry = setup("svc")
span = trace.get_tracer("test").start_span("work")
tell(recording=span.is_recording(), enabled=get_logger("test").enabled())
spans(3)
tell(threads=threading.active_count(), flushed=telemetry.flush(), counts=telemetry.counts())
""")
    assert ran.told[0] == {"recording": False, "enabled": False}
    assert (ran.told[1]["threads"], ran.told[1]["flushed"]) == (1, True)
    assert all(each["made"] == 0 for each in ran.told[1]["counts"].values())
    assert ran.warnings == []


def test_an_operator_switches_off_what_a_program_asks_for(receiver: Receiver) -> None:
    script = """
telemetry = setup("svc", endpoint=ENDPOINT, prometheus_port=0)
spans(1)
get_logger("test").emit(event_name="dataplane.put", body=[])
tell(address=telemetry.prometheus_address)
"""
    ran = run(script, receiver.endpoint, OTEL_SDK_DISABLED="true")
    assert ran.told == [{"address": None}]
    assert receiver.counts()["received"] == 0
    run(script, receiver.endpoint, OTEL_TRACES_EXPORTER="none", OTEL_METRICS_EXPORTER="none")
    records = receiver.snapshot()
    assert (len(records.spans), len(records.events)) == (0, 1)


def test_standard_variables_configure_what_arguments_do_not(receiver: Receiver) -> None:
    run(
        "setup(); spans(1)",
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"{receiver.endpoint}/v1/traces",
        OTEL_SERVICE_NAME="from-variable",
        OTEL_RESOURCE_ATTRIBUTES="service.instance.id=5,rl.run_id=x%20y",
    )
    run(
        "setup('from-argument', instance='6'); spans(1)",
        OTEL_EXPORTER_OTLP_ENDPOINT=receiver.endpoint,
        OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
        OTEL_SERVICE_NAME="from-variable",
        OTEL_RESOURCE_ATTRIBUTES="service.instance.id=5",
    )
    labels = [span.process.label for span in receiver.snapshot().spans]
    assert labels == ["from-variable 5", "from-argument 6"]


def test_an_endpoint_given_wins_over_variables(receiver: Receiver) -> None:
    run(
        "setup('svc', endpoint=ENDPOINT); spans(1)",
        f"{receiver.endpoint}/",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://127.0.0.1:9/v1/traces",
    )
    assert len(receiver.snapshot().spans) == 1


def test_headers_of_variables_are_sent() -> None:
    with collector(status(200)) as made:
        run("setup('svc', endpoint=ENDPOINT); spans(1)", made.endpoint,
            OTEL_EXPORTER_OTLP_HEADERS="x-token=secret")  # fmt: skip
    headers = dict(made.requests)["/v1/traces"]
    assert {name.lower(): value for name, value in headers.items()}["x-token"] == "secret"


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ("sample_ratio=0.0", {}),
        ("", {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}),
    ],
)
def test_what_is_not_sampled_is_neither_made_nor_sent(
    options: str, variables: dict[str, str], receiver: Receiver
) -> None:
    ran = run(
        f"telemetry = setup('svc', endpoint=ENDPOINT, {options}); spans(9)\n"
        "tell(**telemetry.counts()['spans'])",
        receiver.endpoint,
        **variables,
    )
    assert ran.told[0]["made"] == 0
    assert receiver.snapshot().spans == []


def test_values_that_cannot_be_used_are_told_and_the_defaults_taken(receiver: Receiver) -> None:
    ran = run(
        "setup('svc', endpoint=ENDPOINT); spans(1)",
        receiver.endpoint,
        OTEL_BSP_MAX_QUEUE_SIZE="-5",
        OTEL_BLRP_SCHEDULE_DELAY="soon",
        OTEL_TRACES_SAMPLER="mostly",
        OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
    )
    assert len(receiver.snapshot().spans) == 1
    assert len(ran.troubles) == 4
    assert ran.code == 0


def test_baggage_of_the_run_becomes_attributes_of_every_span(receiver: Receiver) -> None:
    run(
        """
setup("svc", endpoint=ENDPOINT)
for name, value in {
    "rl.step": "12", "rl.run_id": "20261121", "rl.weight_version": 4, "rl.bucket": "idle",
    "rl.odd": "007", "user": "1",
}.items():
    context.attach(baggage.set_baggage(name, value))
trace.get_tracer("test").start_span("work", attributes={"rl.bucket": "overhead"}).end()
""",
        receiver.endpoint,
    )
    [span] = receiver.snapshot().spans
    assert span.attributes == {
        "rl.step": 12,
        "rl.run_id": "20261121",
        "rl.weight_version": 4,
        "rl.bucket": "overhead",
        "rl.odd": "007",
    }


def test_a_process_has_one_telemetry_and_may_have_another_after_shutdown(
    receiver: Receiver,
) -> None:
    ran = run(
        """
tracer, logger = trace.get_tracer("early"), get_logger("early")
first = setup("one", endpoint=ENDPOINT)
tell(same=setup("one", endpoint=ENDPOINT) is first)
try:
    setup("two", endpoint=ENDPOINT)
except RuntimeError as error:
    tell(error=str(error))
tracer.start_span("first").end()
logger.emit(event_name="dataplane.first", body=[])
first.shutdown()
second = setup("two", endpoint=ENDPOINT)
tracer.start_span("second").end()
logger.emit(event_name="dataplane.second", body=[])
metrics.get_meter("late").create_counter("c").add(1)
second.shutdown()
tell(first=first.counts(), second=second.counts())
""",
        receiver.endpoint,
    )
    same, error, counts = ran.told
    assert same == {"same": True}
    assert "service_name" in error["error"]
    assert "shutdown()" in error["error"]
    told = [(span.name, span.process.service) for span in receiver.snapshot().spans]
    assert told == [("first", "one"), ("second", "two")]
    told = [(event.name, event.process.service) for event in receiver.snapshot().events]
    assert told == [("first", "one"), ("second", "two")]
    assert [counts[each]["spans"]["made"] for each in ("first", "second")] == [1, 1]
    assert counts["second"]["metrics"]["exported"] == 1


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
    assert (spans["made"], spans["queue_full"], spans["shutdown"]) == (100, 90, 10)
    assert (events["made"], events["queue_full"], events["shutdown"]) == (100, 93, 7)
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


def test_flush_returns_when_what_was_made_has_arrived(receiver: Receiver) -> None:
    process = started(
        "telemetry = setup('svc', endpoint=ENDPOINT, export_interval_s=3600); spans(1000)\n"
        "tell(ok=telemetry.flush(30)); sys.stdin.read()",
        receiver.endpoint,
    )
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"ok": True}
        assert len(receiver.snapshot().spans) == 1000
    finally:
        process.kill()
        process.communicate()


def test_what_is_made_after_shutdown_is_counted_as_dropped(receiver: Receiver) -> None:
    ran = run(
        """
telemetry = setup("svc", endpoint=ENDPOINT)
late = trace.get_tracer("test").start_span("begun before, ended after")
spans(2)
telemetry.shutdown()
late.end()
spans(1)
get_logger("test").emit(event_name="dataplane.put", body=[])
telemetry.shutdown()
tell(counts=telemetry.counts())
""",
        receiver.endpoint,
    )
    counts = ran.told[0]["counts"]
    assert (counts["spans"]["made"], counts["spans"]["shutdown"]) == (4, 2)
    assert (counts["events"]["made"], counts["events"]["shutdown"]) == (1, 1)
    assert balanced(counts)
    assert len(receiver.snapshot().spans) == 2


def test_what_is_queued_leaves_at_exit(receiver: Receiver) -> None:
    ran = run(
        "setup('svc', endpoint=ENDPOINT, export_interval_s=3600); spans(700)", receiver.endpoint
    )
    assert ran.code == 0
    assert len(receiver.snapshot().spans) == 700


def test_what_is_queued_leaves_when_an_exception_ends_the_program(receiver: Receiver) -> None:
    ran = ended(
        started(
            "setup('svc', endpoint=ENDPOINT, export_interval_s=3600); spans(3); raise KeyError(1)",
            receiver.endpoint,
        )
    )
    assert ran.code == 1
    assert len(receiver.snapshot().spans) == 3


def test_sigterm_flushes_and_still_ends_the_process(receiver: Receiver) -> None:
    process = started(
        "setup('svc', endpoint=ENDPOINT, export_interval_s=3600); spans(3)\n"
        "tell(ready=1); threading.Event().wait()",
        receiver.endpoint,
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert ended(process).code == -signal.SIGTERM
    assert len(receiver.snapshot().spans) == 3


OPERATION = """
from dataplane_core import InMemoryDataPlaneClient
from observability import InstrumentedDataPlaneClient, emit
def operate():
    client = InstrumentedDataPlaneClient(InMemoryDataPlaneClient())
    with trace.get_tracer("test").start_as_current_span("root"):
        client.register_partition("p", ["x"], 4, [])
        emit("trained", "p", ["a", "b"])
"""


@pytest.mark.parametrize(
    "end",
    ["", "os.kill(os.getpid(), signal.SIGTERM)", "telemetry.shutdown()", "telemetry.flush()"],
    ids=["at exit", "on SIGTERM", "at shutdown", "at a flush"],
)
def test_what_operations_tell_is_sent_before_the_end(receiver: Receiver, end: str) -> None:
    run(
        f"{OPERATION}\n"
        "telemetry = setup('svc', endpoint=ENDPOINT, export_interval_s=3600)\n"
        f"operate()\n{end}",
        receiver.endpoint,
    )
    records = receiver.snapshot()
    root = next(span for span in records.spans if span.name == "root")
    [span] = [span for span in records.spans if span.name == "register p"]
    assert span.parent_id == root.span_id
    assert span.attributes["dataplane.fields"] == ["x"]
    assert span.end_ns <= root.end_ns
    assert [(event.name, event.span_id) for event in records.events] == [
        ("registered", span.span_id),
        ("trained", root.span_id),
    ]
    assert records.events[1].sample_ids == ("a", "b")


def test_a_forked_child_tells_what_it_does_itself_and_nothing_of_its_parent(
    receiver: Receiver,
) -> None:
    run(
        f"{OPERATION}\n"
        "telemetry = setup('svc', endpoint=ENDPOINT, export_interval_s=3600)\n"
        "operate()\n"
        "if os.fork() == 0:\n"
        "    operate()  # silent\n"
        "    with setup('child', endpoint=ENDPOINT, export_interval_s=3600): operate()\n"
        "    os._exit(0)\n"
        "os.wait()",
        receiver.endpoint,
    )
    told = sorted((event.process.service, event.name) for event in receiver.snapshot().events)
    assert told == [
        ("child", "registered"),
        ("child", "trained"),
        ("svc", "registered"),
        ("svc", "trained"),
    ]


def test_a_scrape_counts_the_operations_before_it() -> None:
    ran = run(
        f"{OPERATION}\n"
        """
import urllib.request
telemetry = setup("svc", prometheus_port=0)
operate()
host, port = telemetry.prometheus_address
page = urllib.request.urlopen(f"http://{host}:{port}/metrics").read().decode()
tell(lines=[line for line in page.splitlines() if "operation_duration_seconds_count" in line])
"""
    )
    [line] = ran.told[0]["lines"]
    assert 'messaging_operation_name="register"' in line
    assert line.endswith(" 1.0")


def test_sigterm_ends_a_process_in_time_though_the_collector_hangs() -> None:
    with hanging() as made:
        process = started(
            "setup('svc', endpoint=ENDPOINT, shutdown_timeout_s=0.5); spans(3)\n"
            "tell(ready=1); threading.Event().wait()",
            made.endpoint,
        )
        assert process.stdout is not None
        process.stdout.readline()
        begin = time.monotonic()
        process.terminate()
        ran = ended(process)
    assert ran.code == -signal.SIGTERM
    assert time.monotonic() - begin < 5
    assert ran.warnings[-1]["event"] == "telemetry_dropped"


def test_sigterm_during_shutdown_waits_for_what_is_on_its_way() -> None:
    asked, go_on = threading.Event(), threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        asked.set()
        assert go_on.wait(DEADLINE_S)
        status(200)(handler)

    with collector(answer) as made:
        process = started(
            "telemetry = setup('svc', endpoint=ENDPOINT, shutdown_timeout_s=30.0); spans(3)\n"
            "telemetry.shutdown(); threading.Event().wait()",
            made.endpoint,
            OTEL_METRICS_EXPORTER="none",
            OTEL_EXPORTER_OTLP_TIMEOUT="30",
        )
        assert asked.wait(DEADLINE_S)
        process.terminate()
        go_on.set()
        begin = time.monotonic()
        ran = ended(process)
    assert ran.code == -signal.SIGTERM
    assert time.monotonic() - begin < 10
    assert ran.warnings == []


def test_sigterm_reaches_the_handler_before_ours_and_the_process_goes_on(
    receiver: Receiver,
) -> None:
    ran = run(
        """
def before(number, frame):
    tell(handled=number, counts=telemetry.counts()["spans"]["exported"])
signal.signal(signal.SIGTERM, before)
telemetry = setup("svc", endpoint=ENDPOINT, export_interval_s=3600)
spans(3)
os.kill(os.getpid(), signal.SIGTERM)
spans(2)
telemetry.shutdown()
tell(given_back=signal.getsignal(signal.SIGTERM) is before)
""",
        receiver.endpoint,
    )
    assert ran.told == [{"handled": 15, "counts": 3}, {"given_back": True}]
    assert len(receiver.snapshot().spans) == 5


def test_sigterm_that_was_ignored_stays_ignored(receiver: Receiver) -> None:
    ran = run(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
setup("svc", endpoint=ENDPOINT)
os.kill(os.getpid(), signal.SIGTERM)
tell(alive=True)
""",
        receiver.endpoint,
    )
    assert ran.told == [{"alive": True}]


def test_setup_works_in_another_thread_and_leaves_sigterm_alone(receiver: Receiver) -> None:
    ran = run(
        """
thread = threading.Thread(target=lambda: setup("svc", endpoint=ENDPOINT))
thread.start(); thread.join()
spans(1)
tell(default=signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
""",
        receiver.endpoint,
    )
    assert ran.told == [{"default": True}]
    assert len(receiver.snapshot().spans) == 1


def test_a_forked_child_does_not_send_again_what_its_parent_queued(receiver: Receiver) -> None:
    ran = run(
        """
telemetry = setup("parent", endpoint=ENDPOINT, export_interval_s=3600, prometheus_port=0)
metrics.get_meter("test").create_counter("c").add(1)
spans(5)
open_span = trace.get_tracer("test").start_span("begun before the fork")
if (child := os.fork()) == 0:
    open_span.end()
    spans(1)
    silent = not trace.get_tracer("test").start_span("x").is_recording()
    telemetry.flush()
    telemetry.shutdown()
    own = setup("child", endpoint=ENDPOINT)
    spans(2)
    own.shutdown()
    os._exit(0 if silent and own.counts()["spans"]["exported"] == 2 else 1)
tell(child=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
telemetry.shutdown()
tell(**telemetry.counts()["spans"])
""",
        receiver.endpoint,
    )
    assert ran.told[0] == {"child": 0}
    assert (ran.told[1]["made"], ran.told[1]["exported"]) == (5, 5)
    services = [(span.process.service, span.process.pid) for span in receiver.snapshot().spans]
    assert len(set(services)) == 2
    assert sorted(service for service, _ in services) == ["child"] * 2 + ["parent"] * 5


def test_prometheus_scrapes_on_loopback_beside_otlp(receiver: Receiver) -> None:
    ran = run(
        """
import urllib.request
telemetry = setup("svc", endpoint=ENDPOINT, prometheus_port=0)
metrics.get_meter("test").create_counter("dataplane.io", "By").add(42, {"direction": "put"})
host, port = telemetry.prometheus_address
page = urllib.request.urlopen(f"http://{host}:{port}/metrics").read().decode()
telemetry.shutdown()
tell(host=host, line=next(l for l in page.splitlines() if l.startswith("dataplane_io_bytes_total")),
     exported=telemetry.counts()["metrics"]["exported"], again=setup("svc", prometheus_port=port)
     .prometheus_address == (host, port))
""",
        receiver.endpoint,
    )
    assert ran.told[0]["host"] == "127.0.0.1"
    assert 'direction="put"' in ran.told[0]["line"]
    assert ran.told[0]["line"].endswith(" 42.0")
    assert (ran.told[0]["exported"], ran.told[0]["again"]) == (1, True)


def test_what_is_lost_is_a_metric_by_signal_and_reason() -> None:
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
        "http://127.0.0.1:9",
    )
    assert ran.told[0]["before"] == []
    [line] = ran.told[0]["after"]
    assert 'dataplane_reason="export_failed"' in line
    assert 'dataplane_signal="spans"' in line
    assert line.endswith(" 1.0")


def test_prometheus_is_opened_by_variables_and_a_taken_port_costs_one_warning(
    receiver: Receiver,
) -> None:
    ran = run(
        "tell(address=setup('svc').prometheus_address)",
        OTEL_METRICS_EXPORTER="prometheus",
        OTEL_EXPORTER_PROMETHEUS_PORT=str(receiver.port),
    )
    assert ran.told == [{"address": None}]
    assert ran.troubles == ["prometheus endpoint not opened"]


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


def test_the_function_is_not_hidden_by_the_module_of_its_name() -> None:
    module = importlib.import_module("observability.setup")
    assert observability.setup is module.setup


def test_without_the_sdk_the_error_names_the_extra() -> None:
    ran = run("""
sys.modules["opentelemetry.sdk"] = None
try:
    setup("svc")
except ImportError as error:
    tell(error=str(error))
""")
    assert "pip install 'observability[sdk]'" in ran.told[0]["error"]


@pytest.mark.parametrize(
    "options",
    ["prometheus_port=70000", "sample_ratio=1.5", "export_interval_s=0", "shutdown_timeout_s=-1"],
)
def test_numbers_out_of_range_are_refused_by_name(options: str) -> None:
    ran = run(f"""
try:
    setup("svc", {options})
except ValueError as error:
    tell(error=str(error))
""")
    assert ran.told[0]["error"].startswith(options.partition("=")[0])


def test_a_foreign_global_provider_is_told() -> None:
    ran = run("""
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
setup("svc", endpoint="http://127.0.0.1:9")
""")
    assert "another TracerProvider is registered already" in ran.troubles
