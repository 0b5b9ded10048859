"""What was told leaves the process, however that ends."""

from __future__ import annotations

import json
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler

import pytest
from setup_processes import DEADLINE_S, balanced, collector, ended, hanging, run, started, status

from observability.receiver import Receiver
from observability.views import why


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


def test_the_claim_of_a_process_that_was_killed_is_marked_later_on(receiver: Receiver) -> None:
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
    assert str(wait).endswith("its process is probably gone)")
