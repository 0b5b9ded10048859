"""Spans of RL-Insight are shown as a run with steps."""

from __future__ import annotations

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from setup_processes import run_script

from observability.receiver import Receiver, read_folder
from observability.views import critical_path, steps_of

SCOPE = "rl_insight.utils.opentelemetry_utils"

# RL-Insight's hub is a Ray actor. This client exports spans as the hub does.
RL_INSIGHT_SCRIPT = """
import rl_insight
from rl_insight.agent_loop import agent_loop_session
from rl_insight.client.base import MonitorClient, register_monitor_client
from rl_insight.utils import OpenTelemetryTraceCollector

collector = OpenTelemetryTraceCollector("rl_insight_monitor", ENDPOINT + "/v1/traces")

class Client(MonitorClient):
    def apply_event(self, event):
        if event["kind"] == "trace":
            times = event["start_time_ns"], event["end_time_ns"]
            collector.record_span(event["name"], *times, attributes=event["attributes"])

register_monitor_client("direct", lambda conf: Client())
server = {"backend": "direct", "url": "http://127.0.0.1:1"}
rl_insight.init(project="verl", experiment_name="ppo", config={"server": server})
for step in (1, 2):
    sessions = [
        agent_loop_session(
            project="verl", experiment_name="ppo", sample=sample, session=0, global_steps=step
        )
        for sample in range(3)
    ]
    for session in sessions:
        session.finish(trajectories=[], status="ok")
    with rl_insight.trace_state("update_actor", state_lane_id="rank_0", global_step=step):
        time.sleep(0.01)
with rl_insight.trace_state("vllm_generate", state_lane_id="replica_0"):
    pass
"""


@pytest.mark.slow
def test_sessions_of_rl_insight_are_one_trace_per_step(receiver: Receiver) -> None:
    result = run_script(RL_INSIGHT_SCRIPT, receiver.endpoint)
    assert result.exit_code == 0
    records = receiver.snapshot()
    assert {span.attributes["rl.run_id"] for span in records.spans} == {"verl/ppo"}
    steps = steps_of(records)
    assert [(step.run_id, step.number) for step in steps] == [("verl/ppo", 1), ("verl/ppo", 2)]
    for step in steps:
        assert step.incomplete == []
        names = [span.name for span in step.children(step.root.span_id)]
        assert names == ["agent_session"] * 3 + ["update_actor"]
        assert step.seconds >= 0.01
        assert critical_path(step)[-1].span.name == "update_actor"


class Sender:
    """SDK that sends spans as RL-Insight does: each immediately and as a separate trace."""

    def __init__(self, receiver: Receiver, scope: str = SCOPE, **resource: str) -> None:
        self._provider = TracerProvider(resource=Resource(resource))
        exporter = OTLPSpanExporter(f"{receiver.endpoint}/v1/traces")
        self._provider.add_span_processor(SimpleSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(scope)

    def send(self, name: str, start_s: float, end_s: float, **attributes: object) -> None:
        span = self._tracer.start_span(name, start_time=int(start_s * 1e9), attributes=attributes)
        span.end(int(end_s * 1e9))


def test_step_lasts_from_its_first_to_its_last_span(receiver: Receiver) -> None:
    sender = Sender(receiver)
    run_attributes = {"project": "p", "experiment_name": "e"}
    sender.send("late", 12, 15, global_steps=7, **run_attributes)
    sender.send(
        "early", 10, 12, global_steps="7", **run_attributes
    )  # RL-Insight does not check its type
    [step] = steps_of(receiver.snapshot())
    assert (step.run_id, step.number, step.seconds, step.incomplete) == ("p/e", 7, 5.0, [])
    assert [span.name for span in step.spans] == ["grpo.step", "early", "late"]
    path = [(segment.span.name, segment.seconds) for segment in critical_path(step)]
    assert path == [("early", 2.0), ("late", 3.0)]


@pytest.mark.parametrize(
    ("attributes", "run_id"),
    [
        ({"experiment_name": "e", "global_steps": 1}, "e"),
        ({"project": "", "experiment_name": "e", "global_steps": 1}, "e"),
        ({"project": "p", "global_steps": 1}, "p"),
        ({"project": "p", "experiment_name": "e", "global_steps": 1, "rl.run_id": "own"}, None),
        ({"global_steps": 1}, None),
        ({"experiment_name": "e", "global_steps": ""}, None),
        ({"experiment_name": "e", "global_steps": -1}, None),
        ({"experiment_name": "e", "global_steps": "\uff19"}, None),
    ],
)
def test_only_spans_with_run_and_step_are_steps(
    receiver: Receiver, attributes: dict[str, str | int], run_id: str | None
) -> None:
    Sender(receiver).send("span", 1, 2, **attributes)
    steps = steps_of(receiver.snapshot())
    assert [step.run_id for step in steps] == ([] if run_id is None else [run_id])


def test_spans_of_other_programs_are_not_joined(receiver: Receiver) -> None:
    for scope, service in (("other", "a"), (SCOPE, "a"), (SCOPE, "b")):
        sender = Sender(receiver, scope, **{"service.name": service})
        sender.send("span", 1, 2, experiment_name="e", global_steps=1)
    spans = receiver.snapshot().spans
    assert len({span.trace_id for span in spans}) == 3
    assert [span.attributes.get("rl.step") for span in spans] == [None, 1, 1]


def test_recording_has_the_spans_as_sent_and_shows_the_steps(tmp_path) -> None:
    with Receiver(tmp_path) as receiver:
        for start_s in (1, 2):
            Sender(receiver).send("span", start_s, 3, experiment_name="e", global_step=4)
    assert b"rl.step" not in (tmp_path / "traces.otlp").read_bytes()
    [step] = steps_of(read_folder(tmp_path))
    assert (step.run_id, step.number, len(step.spans)) == ("e", 4, 3)
