"""Telemetry is exported at the end of a process, whether it exits, raises or gets SIGTERM."""

from __future__ import annotations

import signal
import threading
import time
from http.server import BaseHTTPRequestHandler

import pytest
from setup_processes import (
    DEADLINE_S,
    collector,
    hanging_collector,
    is_balanced,
    run_script,
    start_script,
    status,
    wait_for_end,
)

from observability.receiver import Receiver
from observability.views import why


def test_items_recorded_after_shutdown_count_as_dropped(receiver: Receiver) -> None:
    result = run_script(
        """
telemetry = setup("svc", endpoint=ENDPOINT)
late = trace.get_tracer("test").start_span("begun before, ended after")
spans(2)
flushed = telemetry.flush(float("inf"))
telemetry.shutdown(float("inf"))
late.end()
spans(1)
get_logger("test").emit(event_name="dataplane.put", body=[])
telemetry.shutdown(float("inf"))
report(counts=telemetry.counts(), flushed=flushed)
""",
        receiver.endpoint,
    )
    counts = result.reports[0]["counts"]
    assert result.reports[0]["flushed"]
    assert (counts["spans"]["recorded"], counts["spans"]["shutdown"]) == (4, 2)
    assert (counts["events"]["recorded"], counts["events"]["shutdown"]) == (1, 1)
    assert is_balanced(counts)
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
    ("statement", "exit_code"),
    [
        ("", 0),
        ("raise KeyError(1)", 1),
        ("os.kill(os.getpid(), signal.SIGTERM); threading.Event().wait()", -signal.SIGTERM),
        ("telemetry.shutdown(); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("assert telemetry.flush(30); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
    ids=["at exit", "by an exception", "on SIGTERM", "at shutdown", "at a flush"],
)
def test_queued_items_are_sent_before_the_end(
    receiver: Receiver, statement: str, exit_code: int
) -> None:
    process = start_script(
        f"{OPERATION}\n"
        "telemetry = setup('svc', endpoint=ENDPOINT, export_interval_s=3600)\n"
        f"spans(700); operate()\n{statement}",
        receiver.endpoint,
    )
    assert wait_for_end(process).exit_code == exit_code
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


def test_sigterm_ends_a_process_in_time_if_the_collector_hangs() -> None:
    with hanging_collector() as server:
        process = start_script(
            "setup('svc', endpoint=ENDPOINT, shutdown_timeout_s=0.5); spans(3)\n"
            # The sleeps are short: a signal that arrives as a sleep begins is handled at its end.
            "report(ready=1)\nwhile True: time.sleep(0.1)",
            server.endpoint,
        )
        assert process.stdout is not None
        process.stdout.readline()
        begin = time.monotonic()
        process.terminate()
        result = wait_for_end(process)
    assert result.exit_code == -signal.SIGTERM
    assert time.monotonic() - begin < 5
    assert result.dropped["spans"]["dropped"] == 3


def test_sigterm_during_shutdown_waits_for_exports_in_flight() -> None:
    request_received, may_answer = threading.Event(), threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        request_received.set()
        assert may_answer.wait(DEADLINE_S)
        status(200)(handler)

    with collector(answer) as server:
        process = start_script(
            "telemetry = setup('svc', endpoint=ENDPOINT, shutdown_timeout_s=30.0); spans(3)\n"
            "telemetry.shutdown(); threading.Event().wait()",
            server.endpoint,
            OTEL_METRICS_EXPORTER="none",
            OTEL_EXPORTER_OTLP_TIMEOUT="30",
        )
        assert request_received.wait(DEADLINE_S)
        process.terminate()
        may_answer.set()
        begin = time.monotonic()
        result = wait_for_end(process)
    assert result.exit_code == -signal.SIGTERM
    assert time.monotonic() - begin < 10
    assert result.warnings == []


def test_sigterm_also_reaches_the_previous_handler(
    receiver: Receiver,
) -> None:
    result = run_script(
        """
def previous_handler(number, frame):
    report(handled=number, counts=telemetry.counts()["spans"]["exported"])
signal.signal(signal.SIGTERM, previous_handler)
telemetry = setup("svc", endpoint=ENDPOINT, export_interval_s=3600)
spans(3)
os.kill(os.getpid(), signal.SIGTERM)
spans(2)
telemetry.shutdown()
report(restored=signal.getsignal(signal.SIGTERM) is previous_handler)
""",
        receiver.endpoint,
    )
    assert result.reports == [{"handled": 15, "counts": 3}, {"restored": True}]
    assert len(receiver.snapshot().spans) == 5


def test_sigterm_that_was_ignored_stays_ignored(receiver: Receiver) -> None:
    result = run_script(
        """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
setup("svc", endpoint=ENDPOINT)
os.kill(os.getpid(), signal.SIGTERM)
report(alive=True)
""",
        receiver.endpoint,
    )
    assert result.reports == [{"alive": True}]


def test_setup_works_in_another_thread_and_leaves_sigterm_alone(receiver: Receiver) -> None:
    result = run_script(
        """
thread = threading.Thread(target=lambda: setup("svc", endpoint=ENDPOINT))
thread.start(); thread.join()
spans(1)
report(default=signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
""",
        receiver.endpoint,
    )
    assert result.reports == [{"default": True}]
    assert len(receiver.snapshot().spans) == 1


def test_a_forked_child_does_not_send_items_of_its_parent(receiver: Receiver) -> None:
    result = run_script(
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
    assert result.reports[0] == {"child": 0}
    assert (result.reports[1]["recorded"], result.reports[1]["exported"]) == (5, 5)
    services = [(span.process.service, span.process.pid) for span in receiver.snapshot().spans]
    assert len(set(services)) == 2
    assert sorted(service for service, _ in services) == ["child"] * 2 + ["parent"] * 5
    events = sorted(event.process.service for event in receiver.snapshot().events)
    assert events == ["child", "parent"]


def test_a_wait_of_a_killed_process_becomes_silent(receiver: Receiver) -> None:
    process = start_script(
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
