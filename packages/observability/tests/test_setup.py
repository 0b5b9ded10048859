"""Promises of `observability.setup`; each test runs one or more processes.

Providers are global to a process, so none is set up in the one that runs the tests.
"""

from __future__ import annotations

import os

import pytest
from setup_processes import run_script

from observability.receiver import Receiver


def test_spans_and_events_arrive_with_resource_of_process(receiver: Receiver) -> None:
    result = run_script(
        """
from observability import record_step_metrics
with setup("grpo.policy", instance="3", run_id="run-7", endpoint=ENDPOINT) as telemetry:
    with trace.get_tracer("test").start_as_current_span("forward"):
        get_logger("test").emit(event_name="dataplane.put", body='["a", "b"]')
    metrics.get_meter("test").create_counter("c").add(1)
    record_step_metrics(0, {"rl.loss": 0.5})
report(counts=telemetry.counts(), pid=os.getpid())
""",
        receiver.endpoint,
    )
    records = receiver.snapshot()
    [span], [event] = records.spans, records.events
    assert (span.name, event.name, event.sample_ids) == ("forward", "put", ("a", "b"))
    assert (event.trace_id, event.span_id) == (span.trace_id, span.span_id)
    assert span.process == event.process
    assert span.process.label == "grpo.policy 3"
    assert span.process.pid == result.reports[0]["pid"]
    assert span.process.host == os.uname().nodename
    for counts in result.reports[0]["counts"].values():
        assert (counts["recorded"], counts["exported"], counts["dropped"]) == (1, 1, 0)
    assert result.warnings == []


def test_processes_with_the_same_seed_have_different_ids(receiver: Receiver) -> None:
    script = """
import random
random.seed(42)
with setup("train", endpoint=ENDPOINT):
    spans(2)
"""
    for _ in range(2):
        run_script(script, receiver.endpoint)
    recorded = receiver.snapshot().spans
    assert len({span.trace_id for span in recorded}) == 4
    assert len({span.span_id for span in recorded}) == 4


def test_without_configuration_nothing_is_recorded() -> None:
    result = run_script("""
telemetry = setup("svc")
span = trace.get_tracer("test").start_span("work")
report(recording=span.is_recording(), enabled=get_logger("test").enabled())
spans(3)
report(threads=threading.active_count(), flushed=telemetry.flush(), counts=telemetry.counts())
""")
    assert result.reports[0] == {"recording": False, "enabled": False}
    assert (result.reports[1]["threads"], result.reports[1]["flushed"]) == (1, True)
    assert all(each["recorded"] == 0 for each in result.reports[1]["counts"].values())
    assert result.warnings == []


def test_environment_disables_export_despite_arguments(receiver: Receiver) -> None:
    script = """
telemetry = setup("svc", endpoint=ENDPOINT, prometheus_port=0)
spans(1)
get_logger("test").emit(event_name="dataplane.put", body=[])
report(address=telemetry.prometheus_address)
"""
    result = run_script(script, receiver.endpoint, OTEL_SDK_DISABLED="true")
    assert result.reports == [{"address": None}]
    assert receiver.counts()["received"] == 0
    run_script(script, receiver.endpoint, OTEL_TRACES_EXPORTER="none", OTEL_METRICS_EXPORTER="none")
    records = receiver.snapshot()
    assert (len(records.spans), len(records.events)) == (0, 1)


def test_standard_variables_supply_omitted_arguments(receiver: Receiver) -> None:
    run_script(
        "setup(); spans(1)",
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=f"{receiver.endpoint}/v1/traces",
        OTEL_SERVICE_NAME="from-variable",
        OTEL_RESOURCE_ATTRIBUTES="service.instance.id=5,rl.run_id=x%20y",
    )
    run_script(
        "setup('from-argument', instance='6', endpoint=ENDPOINT); spans(1)",
        f"{receiver.endpoint}/",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9",
        OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://127.0.0.1:9/v1/traces",
        OTEL_SERVICE_NAME="from-variable",
        OTEL_RESOURCE_ATTRIBUTES="service.instance.id=5",
    )
    labels = [span.process.label for span in receiver.snapshot().spans]
    assert labels == ["from-variable 5", "from-argument 6"]


@pytest.mark.parametrize(
    ("options", "variables"),
    [
        ("sample_ratio=0.0", {}),
        ("", {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}),
    ],
)
def test_unsampled_spans_are_neither_recorded_nor_exported(
    options: str, variables: dict[str, str], receiver: Receiver
) -> None:
    result = run_script(
        f"telemetry = setup('svc', endpoint=ENDPOINT, {options}); spans(9)\n"
        "report(**telemetry.counts()['spans'])",
        receiver.endpoint,
        **variables,
    )
    assert result.reports[0]["recorded"] == 0
    assert receiver.snapshot().spans == []


def test_unusable_values_are_reported_and_replaced_by_defaults(receiver: Receiver) -> None:
    result = run_script(
        "setup('svc', endpoint=ENDPOINT); spans(1)",
        receiver.endpoint,
        OTEL_BSP_MAX_QUEUE_SIZE="-5",
        OTEL_BLRP_SCHEDULE_DELAY="soon",
        OTEL_TRACES_SAMPLER="mostly",
        OTEL_EXPORTER_OTLP_PROTOCOL="grpc",
        OTEL_EXPORTER_OTLP_TIMEOUT="long",
        OTEL_METRIC_EXPORT_INTERVAL="9" * 5000,
    )
    assert len(receiver.snapshot().spans) == 1
    assert len(result.troubles) == 6
    assert result.exit_code == 0


def test_baggage_of_the_run_becomes_attributes_of_every_span(receiver: Receiver) -> None:
    run_script(
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


def test_a_process_has_one_telemetry_until_shutdown(
    receiver: Receiver,
) -> None:
    result = run_script(
        """
tracer, logger = trace.get_tracer("before"), get_logger("before")
first = setup("one", endpoint=ENDPOINT)
report(same=setup("one", endpoint=ENDPOINT) is first)
try:
    setup("two", endpoint=ENDPOINT)
except RuntimeError as error:
    report(error=str(error))
tracer.start_span("first").end()
logger.emit(event_name="dataplane.first", body=[])
first.shutdown()
second = setup("two", endpoint=ENDPOINT)
tracer.start_span("second").end()
logger.emit(event_name="dataplane.second", body=[])
metrics.get_meter("after").create_counter("c").add(1)
second.shutdown()
report(first=first.counts(), second=second.counts())
""",
        receiver.endpoint,
    )
    same, error, counts = result.reports
    assert same == {"same": True}
    assert "service_name" in error["error"]
    assert "shutdown()" in error["error"]
    spans = [(span.name, span.process.service) for span in receiver.snapshot().spans]
    assert spans == [("first", "one"), ("second", "two")]
    events = [(event.name, event.process.service) for event in receiver.snapshot().events]
    assert events == [("first", "one"), ("second", "two")]
    assert [counts[each]["spans"]["recorded"] for each in ("first", "second")] == [1, 1]
    assert counts["second"]["metrics"]["exported"] == 1


def test_prometheus_scrapes_on_loopback_with_otlp(receiver: Receiver) -> None:
    result = run_script(
        """
import urllib.request
telemetry = setup("svc", endpoint=ENDPOINT, prometheus_port=0)
metrics.get_meter("test").create_counter("dataplane.io", "By").add(42, {"direction": "put"})
host, port = telemetry.prometheus_address
page = urllib.request.urlopen(f"http://{host}:{port}/metrics").read().decode()
telemetry.shutdown()
line = next(l for l in page.splitlines() if l.startswith("dataplane_io_bytes_total"))
report(host=host, line=line,
     exported=telemetry.counts()["metrics"]["exported"])
next_telemetry = setup("svc", prometheus_port=port)
report(same_address=next_telemetry.prometheus_address == (host, port))
""",
        receiver.endpoint,
    )
    assert result.reports[0]["host"] == "127.0.0.1"
    assert 'direction="put"' in result.reports[0]["line"]
    assert result.reports[0]["line"].endswith(" 42.0")
    assert result.reports[0]["exported"] == 1
    assert result.reports[1] == {"same_address": True}


def test_variables_enable_prometheus_and_a_used_port_warns(
    receiver: Receiver,
) -> None:
    result = run_script(
        "report(address=setup('svc').prometheus_address)",
        OTEL_METRICS_EXPORTER="prometheus",
        OTEL_EXPORTER_PROMETHEUS_PORT=str(receiver.port),
    )
    assert result.reports == [{"address": None}]
    assert result.troubles == ["prometheus endpoint not opened"]


def test_without_the_sdk_the_error_names_the_extra() -> None:
    result = run_script("""
sys.modules["opentelemetry.sdk"] = None
try:
    setup("svc")
except ImportError as error:
    report(error=str(error))
""")
    assert result.reports[0]["error"].endswith("install the extra observability[sdk]")


def test_numbers_out_of_range_are_refused_by_name() -> None:
    numbers = {
        "prometheus_port": 70000,
        "sample_ratio": 1.5,
        "export_interval_s": 0,
        "shutdown_timeout_s": -1,
    }
    result = run_script(f"""
for name, number in {numbers}.items():
    try:
        setup("svc", **{{name: number}})
    except ValueError as error:
        report(name=name, error=str(error))
""")
    assert [each["name"] for each in result.reports] == list(numbers)
    assert all(each["error"].startswith(f"{each['name']}=") for each in result.reports)


def test_a_foreign_global_provider_is_reported() -> None:
    result = run_script("""
from opentelemetry.sdk.trace import TracerProvider
trace.set_tracer_provider(TracerProvider())
setup("svc", endpoint="http://127.0.0.1:9")
""")
    assert "another TracerProvider is registered already" in result.troubles
