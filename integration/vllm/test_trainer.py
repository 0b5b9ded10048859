"""The trainer's command generates with real vLLM servers."""

from __future__ import annotations

import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from integration.vllm.conftest import SpanCollector
from integration.vllm.fleet_rig import call, is_paused, statuses
from integration.vllm.server import VllmServer, start_server, wait_until_ready
from integration.vllm.trainer_process import TrainerRun, running_trainer, wait_until_gone
from opentelemetry.proto.trace.v1.trace_pb2 import Span

pytestmark = pytest.mark.timeout(900)

STEPS = 3
ROWS = 16


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanCollector]:
    collector = SpanCollector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def servers(
    models: Callable[..., Path],
    collector: SpanCollector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[VllmServer]]:
    """Start two servers with weights other than the trainer's initial ones."""
    folder = tmp_path_factory.mktemp("servers")
    options = {
        "--weight-transfer-config": '{"backend": "mx"}',
        "--worker-extension-cls": "refit_mx.engine.status.RefitStatus",
        "--otlp-traces-endpoint": collector.endpoint,
    }
    words = [word for option in options.items() for word in option]
    environment = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    started = [start_server(models(1), folder, *words, environment=environment) for _ in range(2)]
    try:
        wait_until_ready(started)
        yield started
    finally:
        for server in started:
            server.close()


@pytest.fixture(scope="module")
def run(
    models: Callable[..., Path],
    servers: list[VllmServer],
    collector: SpanCollector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[TrainerRun]:
    """Start a run that continues until a server fails."""
    with running_trainer(
        tmp_path_factory.mktemp("run"),
        policy__model={"kind": "pretrained", "name": str(models(0)), "use_chat_template": False},
        policy__generation__servers=0,
        policy__generation__addresses=[server.address for server in servers],
        tracing__enabled=True,
        tracing__endpoint=collector.base,
    ) as run:
        run.wait_for_steps(STEPS)
        yield run


def test_policy_and_servers_agree_on_logprobs_in_every_step(run: TrainerRun) -> None:
    # The servers started with other weights: only a refit makes them agree.
    for record in run.records():
        mean, p99, largest = (
            record[f"rollout_logprob_diff_{name}"] for name in ("mean", "p99", "max")
        )
        assert 0 < mean < p99 <= largest < 1e-4
        assert 0 <= record["rollout_k3_kl"] < 1e-8


def test_every_response_has_one_version(run: TrainerRun) -> None:
    assert {record["mixed_weight_version_rate"] for record in run.records()} == {0.0}


def test_server_spans_join_the_steps_trace(run: TrainerRun, collector: SpanCollector) -> None:
    traces: dict[bytes, list[Span]] = defaultdict(list)
    root = collector.wait_for_first("grpo.step")
    requests = collector.wait_for(int.from_bytes(root.trace_id, "big"), 2 * ROWS, with_parents=True)
    for span in requests:
        traces[span.trace_id].append(span)
    spans = {span.span_id: span for span in traces[root.trace_id]}
    on_servers = [span for span in spans.values() if span.name == "llm_request"]
    assert len(on_servers) >= ROWS
    assert {spans[span.parent_span_id].name for span in on_servers} == {"generate"}


def test_run_error_names_the_killed_server(run: TrainerRun, servers: list[VllmServer]) -> None:
    before = len(run.records())
    servers[1].kill()
    error = run.error()
    assert servers[1].address in error
    assert servers[0].address not in error.partition(servers[1].address)[0]
    assert len(run.records()) <= before + 1
    [rank] = statuses(servers[0])
    assert not is_paused(servers[0])
    assert rank["fenced"] is None
    assert call(servers[0], "/weight_info", method="GET") == {"weight_version": rank["version_id"]}


def test_asynchronous_run_generates_while_it_trains(
    models: Callable[..., Path], servers: list[VllmServer], tmp_path: Path
) -> None:
    with running_trainer(
        tmp_path,
        policy__model={"kind": "pretrained", "name": str(models(0)), "use_chat_template": False},
        policy__generation__servers=0,
        policy__generation__addresses=[servers[0].address],
        policy__global_batch_size=ROWS,  # one optimizer step: a second one has other weights
        grpo__mode="async",
        grpo__asynchronous__max_staleness=2,
        grpo__asynchronous__concurrent_rollouts=8,
    ) as run:
        records = run.wait_for_steps(4)
    assert all(record["samples"] == ROWS for record in records)
    assert all(record["staleness_max"] <= 2 for record in records)
    assert max(record["staleness_max"] for record in records) > 0
    # The server began with other weights, and the first samples are not stale.
    assert records[0]["rollout_logprob_diff_max"] < 1e-4


@pytest.mark.long  # each process of vLLM imports it, which is slow
def test_servers_end_with_a_killed_driver(tmp_path: Path) -> None:
    with running_trainer(tmp_path) as run:
        [record] = run.wait_for_steps(1)[:1]
        assert record["rollout_logprob_diff_max"] < 1e-4
        processes = run.processes()
        names = {process.name() for process in processes}
        assert "VLLM::EngineCore" in names
        run.process.send_signal(signal.SIGKILL)
        run.process.wait()
        wait_until_gone(processes)
