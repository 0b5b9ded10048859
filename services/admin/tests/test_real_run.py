"""A real run looks the same in the service and in the views of all records."""

import gzip
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from alerting import rule, rules_in
from opentelemetry import trace
from tensordict import TensorDict
from waiting import until

from dataplane_core import InMemoryDataPlaneClient, telemetry
from observability import InstrumentedDataPlaneClient, emit, record_trained
from observability.records import Records, decode_logs, decode_traces
from observability.setup import setup
from observability.views import critical_path, lineage_of, steps_of, why


@pytest.fixture
def collector(monkeypatch):
    """Start an endpoint that stores path, body and headers of each request."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            names = ("content-type", "content-encoding")
            headers = {name: self.headers[name] for name in names if self.headers[name]}
            self.server.arrived.append((self.path, body, headers))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.arrived = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def run_steps(count):
    """Run steps in one process; the last is blocked on a field that is never written."""
    tracer = trace.get_tracer("test")
    batch = TensorDict({"x": torch.arange(4)}, batch_size=[4])
    plane = {"enabled": True, "impl": "in_memory", "claim_lease_s": 60.0}
    with InMemoryDataPlaneClient(plane) as inner:
        client = InstrumentedDataPlaneClient(inner)
        for step in range(count):
            ids = [f"s{step}-{number}" for number in range(4)]
            with (
                telemetry.step_context("the-run", step, weight_version=step),
                tracer.start_as_current_span("grpo.step", attributes={"rl.step": step}),
            ):
                client.register_partition("train", ["x", "y"], 4, ["train"])
                with tracer.start_as_current_span("rollout"):
                    client.put_samples(ids, "train", batch)
                with tracer.start_as_current_span("train"):
                    meta = client.claim_meta("train", "train", ["x"], 4, dp_rank=0)
                    client.get_data(meta)
                    record_trained(client, meta, field="x")
                    client.acknowledge(meta)
                if step < count - 1:
                    client.clear_samples(ids, "train")
        with telemetry.step_context("the-run", count, weight_version=count):
            waiting = {"samples": 4, "wait": "w", "since_ns": 1, "task": "other"}
            emit("waiting", "train", fields=["x", "y"], **waiting)


def send(job, collector):
    for path, body, headers in collector.arrived:
        assert job.client.post(path, content=body, headers=headers).status_code == 200


def test_spans_that_a_process_drops_raise_an_alert(job_of, collector, tmp_path, monkeypatch):
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    url = f"http://127.0.0.1:{collector.server_port}"
    exported = setup("grpo.policy", run_id="the-run", endpoint=url)
    try:
        for _ in range(100):
            trace.get_tracer("test").start_span("train").end()
        dropped = exported.counts()["spans"]["dropped"]
    finally:
        exported.shutdown()
    job = job_of(alerts=rules_in(tmp_path, rule("telemetry_dropped", 0)), alerts_every_s=0.02)
    send(job, collector)
    [alert] = until(lambda: job.get("alerts")["raised"])
    assert (alert["run_id"], alert["value"]) == ("the-run", dropped)
    assert alert["sentence"] == f"its processes dropped {dropped} spans"


def test_a_real_run_looks_the_same_in_the_views(job, collector):
    exported = setup(
        "grpo.driver", run_id="the-run", endpoint=f"http://127.0.0.1:{collector.server_port}"
    )
    try:
        run_steps(3)
    finally:
        exported.shutdown()
    everything = Records()
    send(job, collector)
    for path, body, headers in collector.arrived:
        if path != "/v1/metrics":
            plain = gzip.decompress(body) if "content-encoding" in headers else body
            everything.add({"/v1/traces": decode_traces, "/v1/logs": decode_logs}[path](plain))
    steps = steps_of(everything)
    assert [step.number for step in steps] == [0, 1, 2]
    for step in steps:
        trace = job.get("trace", id=step.trace_id)
        assert (trace["name"], trace["step"], trace["run_id"]) == (
            "grpo.step",
            step.number,
            "the-run",
        )
        assert {row["span_id"] for row in trace["rows"]} == {span.span_id for span in step.spans}
        assert len(trace["events"]) == len(step.events) > 2
        assert trace["incomplete"] == list(step.incomplete)
        assert trace["staleness"]["mean"] == step.staleness.mean
        assert [part["span_id"] for part in trace["critical_path"]] == [
            part.span.span_id for part in critical_path(step)
        ]
    for sample_id in ("s0-0", "s2-3"):
        hops = job.get("sample", id=sample_id)["hops"]
        expected = [(hop.name, hop.time_ns) for hop in lineage_of(sample_id, everything)]
        assert [(hop["name"], hop["time_ns"]) for hop in hops] == expected
    [expected] = why(everything, 1 << 62)
    [wait] = job.get("why")
    assert (wait["present"], wait["ready"]) == (expected.present, expected.ready) == (4, 0)
    assert wait["lacks"]["y"]["count"] == expected.lacks["y"].count == 4
    # Metrics show that a blocked process is alive.
    series = job.get("series")
    assert {row["process"] for row in series} == {expected.process.full_label}
    assert "messaging.client.operation.duration" in {row["name"] for row in series}
    assert job.counts()["refused"] == 0
