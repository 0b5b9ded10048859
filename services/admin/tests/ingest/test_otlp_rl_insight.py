"""Spans of RL-Insight, each sent as a separate trace, are stored as one trace per step."""

import os

from opentelemetry.proto.trace.v1.trace_pb2 import TracesData


def request(*spans):
    """Return a request with spans of (name, start in s, end in s, step)."""
    data = TracesData()
    scope_spans = data.resource_spans.add().scope_spans.add()
    scope_spans.scope.name = "rl_insight.utils.opentelemetry_utils"
    for name, start_s, end_s, step in spans:
        span = scope_spans.spans.add(
            trace_id=os.urandom(16),
            span_id=os.urandom(8),
            name=name,
            start_time_unix_nano=int(start_s * 1e9),
            end_time_unix_nano=int(end_s * 1e9),
        )
        for key, text in (("project", "verl"), ("experiment_name", "ppo")):
            span.attributes.add(key=key).value.string_value = text
        span.attributes.add(key="global_steps").value.int_value = step
    return data.SerializeToString()


def test_requests_of_one_step_are_one_trace(job):
    first = request(("agent_session", 10, 13, 1), ("agent_session", 20, 22, 2))
    for body in (first, request(("update_actor", 12, 16, 1)), first):
        assert job.post("traces", body).status_code == 200
    assert job.counts()["spans"] == 3  # a repeated request counts once
    assert [(run["run_id"], run["steps"]) for run in job.get("runs")["runs"]] == [("verl/ppo", 2)]
    ranges = job.get("run/steps", run="verl/ppo")["ranges"]
    assert [(each["first_step"], each["median_s"]) for each in ranges] == [(1, 6.0), (2, 2.0)]
    trace = job.get("trace", id=ranges[0]["median_trace"])
    assert (trace["step"], trace["spans"], trace["incomplete"]) == (1, 2, [])
    assert [(row["depth"], row["name"], row["seconds"]) for row in trace["rows"]] == [
        (0, "grpo.step", 6.0),
        (1, "agent_session", 3.0),
        (1, "update_actor", 4.0),
    ]
