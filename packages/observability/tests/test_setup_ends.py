"""Telemetry is exported at the end of a process, however it ends."""

from __future__ import annotations

import signal
import threading
import time
from http.server import BaseHTTPRequestHandler

import pytest
from setup_processes import DEADLINE_S, balanced, collector, ended, hanging, run, started, status

from observability.receiver import Receiver
from observability.views import why


def test_items_recorded_after_shutdown_count_as_dropped(receiver: Receiver) -> None:
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
report(counts=telemetry.counts())
""",
        receiver.endpoint,
    )
    counts = ran.report[0]["counts"]
    assert (counts["spans"]["recorded"], counts["spans"]["shutdown"]) == (4, 2)
    assert (counts["events"]["recorded"], counts["events"]["shutdown"]) == (1, 1)
    assert balanced(counts)
    assert len(receiver.snapshot().spans) == 2


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
    ("end", "code"),
    [
        ("", 0),
        ("raise KeyError(1)", 1),
        ("os.kill(os.getpid(), signal.SIGTERM); threading.Event().wait()", -signal.SIGTERM),
        ("telemetry.shutdown(); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("assert telemetry.flush(30); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
    ids=["at exit", "by an exception", "on SIGTERM", "at shutdown", "at a flush"],
)
def test_queued_items_are_sent_before_the_end(receiver: Receiver, end: str, code: int) -> None:
    process = started(
        f"{OPERATION}\n"
        "telemetry = setup('svc', endpoint=ENDPOINT, export_interval_s=3600)\n"
        f"spans(700); operate()\n{end}",
        receiver.endpoint,
    )
    assert ended(process).code == code
    assert len(receiver.snapshot().spans) == 700 + 2
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


def test_sigterm_ends_a_process_in_time_though_the_collector_hangs() -> None:
    with hanging() as result:
        process = started(
            "setup('svc', endpoint=ENDPOINT, shutdown_timeout_s=0.5); spans(3)\n"
            # Short sleeps: a signal that arrives as a sleep begins is handled when it ends.
            "report(ready=1)\nwhile True: time.sleep(0.1)",
            result.endpoint,
        )
        assert process.stdout is not None
        process.stdout.readline()
        begin = time.monotonic()
        process.terminate()
        ran = ended(process)
    assert ran.code == -signal.SIGTERM
    assert time.monotonic() - begin < 5
    assert ran.warnings[-1]["event"] == "telemetry_dropped"


def test_sigterm_during_shutdown_waits_for_exports_in_flight() -> None:
    request, go_on = threading.Event(), threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        request.set()
        assert go_on.wait(DEADLINE_S)
        status(200)(handler)

    with collector(answer) as result:
        process = started(
            "telemetry = setup('svc', endpoint=ENDPOINT, shutdown_timeout_s=30.0); spans(3)\n"
            "telemetry.shutdown(); threading.Event().wait()",
            result.endpoint,
            OTEL_METRICS_EXPORTER="none",
            OTEL_EXPORTER_OTLP_TIMEOUT="30",
        )
        assert request.wait(DEADLINE_S)
        process.terminate()
        go_on.set()
        begin = time.monotonic()
        ran = ended(process)
    assert ran.code == -signal.SIGTERM
    assert time.monotonic() - begin < 10
    assert ran.warnings == []


def test_sigterm_also_reaches_the_previous_handler(
    receiver: Receiver,
) -> None:
    ran = run(
        """
def before(number, frame):
    report(handled=number, counts=telemetry.counts()["spans"]["exported"])
signal.signal(signal.SIGTERM, before)
telemetry = setup("svc", endpoint=ENDPOINT, export_interval_s=3600)
spans(3)
os.kill(os.getpid(), signal.SIGTERM)
spans(2)
telemetry.shutdown()
report(given_back=signal.getsignal(signal.SIGTERM) is before)
""",
        receiver.endpoint,
    )
    assert ran.report == [{"handled": 15, "counts": 3}, {"given_back": True}]
    assert len(receiver.snapshot().spans) == 5


def test_sigterm_that_was_ignored_stays_ignored(receiver: Receiver) -> None:
    ran = run(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
setup("svc", endpoint=ENDPOINT)
os.kill(os.getpid(), signal.SIGTERM)
report(alive=True)
""",
        receiver.endpoint,
    )
    assert ran.report == [{"alive": True}]


def test_setup_works_in_another_thread_and_leaves_sigterm_alone(receiver: Receiver) -> None:
    ran = run(
        """
thread = threading.Thread(target=lambda: setup("svc", endpoint=ENDPOINT))
thread.start(); thread.join()
spans(1)
report(default=signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
""",
        receiver.endpoint,
    )
    assert ran.report == [{"default": True}]
    assert len(receiver.snapshot().spans) == 1


def test_a_forked_child_does_not_send_again_what_its_parent_queued(receiver: Receiver) -> None:
    ran = run(
        """
telemetry = setup("parent", endpoint=ENDPOINT, export_interval_s=3600, prometheus_port=0)
metrics.get_meter("test").create_counter("c").add(1)
spans(5)
event = lambda: get_logger("test").emit(event_name="dataplane.put", body="[]")
event()
open_span = trace.get_tracer("test").start_span("begun before the fork")
if (child := os.fork()) == 0:
    open_span.end()
    spans(1); event()
    silent = not trace.get_tracer("test").start_span("x").is_recording()
    telemetry.flush()
    telemetry.shutdown()
    own = setup("child", endpoint=ENDPOINT)
    spans(2); event()
    own.shutdown()
    os._exit(0 if silent and own.counts()["spans"]["exported"] == 2 else 1)
report(child=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
telemetry.shutdown()
report(**telemetry.counts()["spans"])
""",
        receiver.endpoint,
    )
    assert ran.report[0] == {"child": 0}
    assert (ran.report[1]["recorded"], ran.report[1]["exported"]) == (5, 5)
    services = [(span.process.service, span.process.pid) for span in receiver.snapshot().spans]
    assert len(set(services)) == 2
    assert sorted(service for service, _ in services) == ["child"] * 2 + ["parent"] * 5
    events = sorted(event.process.service for event in receiver.snapshot().events)
    assert events == ["child", "parent"]


def test_a_wait_of_a_killed_process_becomes_silent(receiver: Receiver) -> None:
    process = started(
        """
from dataplane_core import InMemoryDataPlaneClient
from observability import InstrumentedDataPlaneClient
setup("svc", endpoint=ENDPOINT, export_interval_s=3600)
client = InstrumentedDataPlaneClient(InMemoryDataPlaneClient())
client.register_partition("p", ["x"], 4, ["train"])
client.claim_meta("p", "train", ["x"], 4, timeout_s=3600)
""",
        receiver.endpoint,
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (waits := why(receiver.snapshot(), time.time_ns())):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.kill()
        process.communicate()
    [wait] = waits
    assert (wait.task, wait.silent_s) == ("train", 0.0)
    [wait] = why(receiver.snapshot(), time.time_ns() + round(3600e9))
    assert wait.silent_s >= 3600
    assert str(wait).endswith(")")
    assert "(process silent for " in str(wait)
