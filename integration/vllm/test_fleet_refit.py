"""Both of two real vLLM servers install new weights, or neither does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import httpx
import pytest
import torch
from integration.vllm.answers import MAX_TOKENS, PROMPTS, generate, generate_spans
from integration.vllm.fleet_rig import (
    OPTIONS,
    TIMEOUT_S,
    WAIT_S,
    at_point,
    call,
    is_paused,
    on_workers,
    statuses,
)
from integration.vllm.published import Trainer
from integration.vllm.server import running_server
from integration.waiting import wait_until
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from refit_mx import FleetError, RefitConfigError
from refit_mx.fleet.barrier import Point

LONG = pytest.mark.long


@pytest.fixture
def serving(rig):
    """Return the client of a fleet that serves seed 0."""
    fleet = rig.fleet()
    version_id = rig.publish(0)
    fleet.refit(version_id)
    assert set(fleet.server_versions.values()) == {version_id}
    return fleet


@pytest.mark.parametrize("transport", ["shm", "nixl", "tcp"])
def test_fleet_refit_installs_one_version_on_all_servers(rig, transport):
    fleet = rig.fleet(init_info={"transport": transport})
    assert fleet.server_versions == {}
    version_id = rig.refit(1, fleet)
    rig.refit(2, rig.fleet(init_info={"transport": transport}))
    assert set(fleet.server_versions.values()) == {version_id}


@pytest.fixture(scope="module")
def telemetry():
    """Return an exporter of this process's spans and a reader of its metrics."""
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([reader]))
    return exporter, reader


def test_statistics_span_and_metric_report_the_pause(telemetry, rig, serving):
    exporter, reader = telemetry
    reader.get_metrics_data()
    version_id = rig.publish(1)
    stats = serving.refit(version_id)
    assert (stats.servers, stats.workers) == (2, 2)
    paused = ("pause", "check", "install", "resume")
    assert set(stats.seconds) == {"prepare", "fetch", *paused}
    assert 0 < stats.pause_ms <= sum(stats.seconds[name] for name in paused) * 1e3
    span = [span for span in exporter.get_finished_spans() if span.name == "refit.fleet"][-1]
    assert span.attributes == {
        "refit.version": version_id,
        "refit.servers": 2,
        "refit.stale_servers": 0,
        "refit.pause_ms": stats.pause_ms,
    }
    (pause,) = [each for each in exporter.get_finished_spans() if each.parent == span.context]
    assert pause.name == "refit.pause"
    assert stats.pause_ms <= (pause.end_time - pause.start_time) / 1e6
    (resource,) = reader.get_metrics_data().resource_metrics
    (metric,) = [
        metric
        for scope in resource.scope_metrics
        for metric in scope.metrics
        if metric.name == "refit.pause_ms"
    ]
    assert metric.unit == "ms"
    assert metric.data.data_points[0].max >= stats.pause_ms


def metric(server, name):
    """Return the sum of a vLLM metric over its labels."""
    lines = httpx.get(f"{server.address}/metrics", timeout=30).text.splitlines()
    series = [line for line in lines if line.startswith(f"vllm:{name}{{")]
    return sum(float(line.split()[-1]) for line in series)


def generated(server):
    """Return the number of tokens that a server has generated."""
    return metric(server, "generation_tokens_total")


@contextmanager
def slow_generation(servers, requests=1):
    """Slow down generation during the block, so that no response ends.

    Yields a function that waits until each server generates ``requests`` responses.
    """
    before = {server: generated(server) for server in servers}

    def all_generate():
        return all(
            metric(server, "num_requests_running") >= requests and generated(server) > count + 9
            for server, count in before.items()
        )

    for server in servers:
        on_workers(server, "sleep_each_step", 0.02)
    try:
        yield lambda: wait_until(all_generate)
    finally:
        for server in servers:
            on_workers(server, "sleep_each_step", 0)


def test_long_responses_switch_to_the_new_weights(rig, serving, reference):
    old, new = rig.publish(1), rig.publish(2)
    serving.refit(old)
    prompts, length = PROMPTS[:3], 800  # 16 s while it is slow
    with ThreadPoolExecutor(len(rig.servers) * len(prompts)) as pool:
        running = []

        def generate_on_all():
            running.extend(
                pool.submit(generate_spans, server.address, prompt, length)
                for server in rig.servers
                for prompt in prompts
            )
            wait_until_all_generate()

        # At this point all servers have fetched the new version, and the pause begins.
        with (
            slow_generation(rig.servers, len(prompts)) as wait_until_all_generate,
            at_point(Point.RECEIVED, generate_on_all) as barrier,
        ):
            serving.refit(new, barrier=barrier)
        responses = [future.result(WAIT_S) for future in running]
    for (tokens, spans), prompt in zip(responses, prompts * 2, strict=True):
        (first, switch), (second, end) = spans
        assert (first, second, end) == (old, new, length)
        # vLLM recomputes running requests with the new weights: both parts equal fresh servers'.
        before = min(switch, MAX_TOKENS)
        assert tokens[:before] == reference(1)[PROMPTS.index(prompt)].tokens[:before]
        continued = generate(rig.servers[0].address, prompt + tokens[:switch]).tokens
        assert tokens[switch : switch + MAX_TOKENS] == continued[: length - switch]
    rig.assert_serve(2, new)


@pytest.mark.parametrize("mode", [pytest.param("wait", marks=LONG), "abort"])
def test_pause_mode_decides_the_end_of_running_requests(rig, serving, mode):
    version_id = rig.publish(1)
    server = rig.servers[0]
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 1900, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        with slow_generation([server]) as wait_until_it_generates:
            running = pool.submit(call, server, "/v1/completions", body)
            wait_until_it_generates()
            if mode == "abort":
                rig.fleet(pause_mode=mode).refit(version_id)
        if mode == "wait":
            rig.fleet(pause_mode=mode).refit(version_id)
        reason = running.result(WAIT_S)["choices"][0]["finish_reason"]
    assert reason == {"wait": "length", "abort": "abort"}[mode]
    rig.assert_serve(1, version_id)


def remove_tensor(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def change_shape(tensors):
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = torch.cat([tensors[name], tensors[name]], dim=1)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (remove_tensor, "up_proj"),
        pytest.param(change_shape, "down_proj", marks=LONG),
        pytest.param(None, "VersionNotFound", marks=LONG),
    ],
)
def test_failed_fetch_pauses_no_server(rig, serving, spoil, named):
    if spoil is None:
        version_id = "unknown"
    else:
        tensors = rig.tensors(1)
        spoil(tensors)
        version_id = rig.publish(1, tensors)
    held = serving.server_versions
    with pytest.raises(FleetError, match=f"{named}.*No server was paused") as caught:
        serving.refit(version_id)
    assert set(caught.value.failed) <= {server.address for server in rig.servers}
    assert serving.server_versions == held
    rig.assert_serve(0, next(iter(held.values())))
    rig.refit(1, serving)


@pytest.mark.parametrize("change", [pytest.param("changed byte", marks=LONG), "swapped rows"])
def test_wrong_bytes_are_noticed_before_the_pause(rig, serving, change):
    version_id = rig.publish(1)
    memory = rig.trainer.publishers[0]._held[version_id].arena.memory
    right = memory.clone()
    if change == "changed byte":
        memory[5] ^= 1
    else:
        memory[:256], memory[256:512] = right[256:512], right[:256]
    assert not torch.equal(memory, right)
    with pytest.raises(FleetError, match=r"DigestMismatchError.*No server was paused"):
        serving.refit(version_id)
    rig.assert_serve(0)
    memory.copy_(right)
    serving.refit(version_id)
    rig.assert_serve(1, version_id)


def test_other_compile_target_is_refused_before_the_pause(rig, serving):
    other = {"compile_target": "deep_gemm_fp8", "source_target": "deep_gemm_fp8"}
    with pytest.raises(FleetError, match=r"CompileTargetError.*No server was paused"):
        rig.fleet(init_info=other).refit(rig.publish(1))
    rig.assert_serve(0)
    rig.refit(1, serving)


def test_restarted_trainer_takes_over_running_servers(rig, serving):
    with Trainer("tiny", slots=2) as restarted:
        taken_over = replace(rig, trainer=restarted)
        version_id = taken_over.refit(1)
    # Its control plane is gone, and the servers continue to serve.
    rig.assert_serve(1, version_id)
    rig.refit(2)


def test_session_of_a_dead_client_is_dropped(rig, serving):
    version_id = rig.publish(1)
    for server in rig.servers:
        call(server, "/start_weight_update", {})
        info = {"version_id": version_id, "background": True}
        call(server, "/update_weights", {"update_info": info})
    call(rig.servers[1], "/pause?mode=keep")
    rig.refit(2)


def test_session_after_a_failed_finish_is_ended(rig, serving):
    server = rig.servers[0]
    call(server, "/init_weight_transfer_engine", {"init_info": rig.trainer.init_info()})
    call(server, "/start_weight_update", {})
    call(server, "/collective_rpc", {"method": "fail_next_install", "args": ["0"]})
    version_id = rig.publish(1)
    call(server, "/update_weights", {"update_info": {"version_id": version_id}})
    # An unhandled error: vLLM answers with 500, and closes the connection.
    with pytest.raises(httpx.HTTPStatusError, match="500"):
        call(server, "/finish_weight_update", {})
    assert statuses(server)[0]["session"]
    assert statuses(server)[0]["fenced"]
    rig.refit(1)


def test_draft_model_is_refused_and_the_next_refit_works(rig, serving):
    with pytest.raises(httpx.HTTPStatusError) as caught:
        call(rig.servers[0], "/start_draft_weight_update", {})
    assert "draft" in caught.value.response.text
    rig.refit(1, serving)


def test_failed_install_resumes_no_server_until_a_refit(rig, serving):
    version_id = rig.publish(1)
    call(rig.servers[0], "/collective_rpc", {"method": "fail_next_install", "args": ["0"]})
    with pytest.raises(FleetError, match=r"this layer fail.*The fleet was not resumed") as caught:
        serving.refit(version_id)
    assert list(caught.value.failed) == [rig.servers[0].address]
    assert serving.server_versions == {rig.servers[1].address: version_id}
    assert all(is_paused(server) for server in rig.servers)
    for client in (serving, rig.fleet()):
        with pytest.raises(FleetError, match="fenced"):
            client.resume()
    assert all(is_paused(server) for server in rig.servers)
    serving.refit(version_id)
    rig.assert_serve(1, version_id)


def test_servers_without_an_install_resume_the_old_version(rig, serving):
    (held,) = set(serving.server_versions.values())
    for server in rig.servers:
        on_workers(server, "drop_before_next_finish", 0)
    with pytest.raises(FleetError, match="The fleet was not resumed"):
        serving.refit(rig.publish(1))
    assert set(serving.server_versions.values()) == {held}
    serving.resume()
    rig.assert_serve(0, held)  # vLLM had named the new version
    rig.refit(1, serving)


def test_fleet_of_two_versions_is_not_resumed(rig, serving):
    first_only = replace(rig, servers=rig.servers[:1])
    first_only.refit(1)
    with pytest.raises(FleetError, match="not all hold one version"):
        serving.resume()
    assert all(is_paused(server) for server in rig.servers)
    rig.refit(2, serving)


def test_wrong_number_of_workers_is_refused_before_the_pause(rig, serving):
    with pytest.raises(FleetError, match="2 workers in all; expected 3"):
        rig.fleet(world_size=3).refit(rig.publish(1))
    rig.assert_serve(0)


@LONG
def test_restarted_server_is_refitted(rig, serving):
    server = rig.servers[1]
    server.kill()
    version_id = rig.publish(1)
    with pytest.raises(FleetError, match="ConnectError") as caught:
        serving.refit(version_id)
    assert list(caught.value.failed) == [server.address]
    assert rig.servers[0].address in serving.server_versions
    assert server.address not in serving.server_versions
    rig.assert_serve(0, servers=rig.servers[:1])
    rig.revive()
    # The client reports that it serves the weights of its launch until the next refit.
    assert list(serving.check()) == [server.address]
    assert "weights of the launch" in serving.check()[server.address]
    stats = serving.refit(version_id)
    assert list(stats.stale) == [server.address]
    assert serving.check() == {}
    rig.assert_serve(1, version_id)


@LONG
def test_slow_fetch_without_time_to_pause_pauses_no_server(rig, serving):
    version_id = rig.publish(1)
    on_workers(rig.servers[1], "delay_next_fetch", 0, 10.5)  # of 12 seconds
    with pytest.raises(FleetError, match="No server was paused") as caught:
        rig.fleet(timeout_s=12).refit(version_id)
    assert list(caught.value.failed) == [rig.servers[1].address]
    rig.assert_serve(0)
    rig.refit(1, serving)


@LONG
def test_hung_engine_of_a_healthy_server_is_noticed_in_time(rig, serving):
    server = rig.servers[0]
    (worker,) = server.workers()
    worker.suspend()
    try:
        assert httpx.get(f"{server.address}/health", timeout=30).is_success
        began = time.monotonic()
        with pytest.raises(
            FleetError, match=r"no answer after 6\.0 s.*No server was paused"
        ) as caught:
            rig.fleet(max_answer_s=6, cleanup_timeout_s=1).refit(rig.publish(1))
        assert time.monotonic() - began < TIMEOUT_S / 2
        assert list(caught.value.failed) == [server.address]
        assert list(rig.fleet(max_answer_s=6).check()) == [server.address]
    finally:
        worker.resume()
    rig.refit(1, serving)


def test_resumed_server_is_noticed_before_any_install(rig, serving):
    (held,) = set(serving.server_versions.values())

    def resume_one():
        wait_until(lambda: all(map(is_paused, rig.servers)))
        call(rig.servers[1], "/resume")

    version_id = rig.publish(1)
    with (
        at_point(Point.PAUSED, resume_one) as barrier,
        pytest.raises(FleetError, match="resumed it") as caught,
    ):
        serving.refit(version_id, barrier=barrier)
    assert list(caught.value.failed) == [rig.servers[1].address]
    assert set(serving.server_versions.values()) == {held}
    serving.resume()
    rig.assert_serve(0, held)
    rig.refit(1, serving)


def test_dropped_fetch_is_noticed_before_any_install(rig, serving):
    (held,) = set(serving.server_versions.values())

    def drop_one():
        wait_until(lambda: all(map(is_paused, rig.servers)))
        call(rig.servers[1], "/update_weights", {"update_info": {"abort": True}})

    with (
        at_point(Point.PAUSED, drop_one) as barrier,
        pytest.raises(FleetError, match="restarted or reset") as caught,
    ):
        serving.refit(rig.publish(1), barrier=barrier)
    assert list(caught.value.failed) == [rig.servers[1].address]
    assert set(serving.server_versions.values()) == {held}
    serving.resume()
    rig.assert_serve(0, held)
    rig.refit(1, serving)


def test_resumed_fenced_server_exits_before_its_next_token(rig, serving):
    server = rig.servers[0]
    version_id = rig.publish(1)
    call(server, "/collective_rpc", {"method": "fail_next_install", "args": ["0"]})
    with pytest.raises(FleetError):
        serving.refit(version_id)
    call(server, "/resume")
    with pytest.raises(httpx.HTTPError):  # a 500, or the broken connection of an exited server
        generate(server.address, PROMPTS[0])
    with pytest.raises(FleetError):
        serving.refit(version_id)
    server.kill()
    rig.revive()
    serving.refit(version_id)
    rig.assert_serve(1, version_id)


@pytest.mark.parametrize(
    ("options", "environment", "advice"),
    [
        ((), {}, "start vLLM with --worker-extension-cls refit_mx.engine.status.RefitStatus"),
        pytest.param(OPTIONS[2:4], {}, "start vLLM with --weight-transfer-config", marks=LONG),
        pytest.param(
            (),
            {"VLLM_SERVER_DEV_MODE": "0"},
            "start vLLM with VLLM_SERVER_DEV_MODE=1",
            marks=LONG,
        ),
    ],
)
def test_server_with_wrong_options_gets_advice(
    rig, serving, models, tmp_path, options, environment, advice
):
    with running_server(models(0), tmp_path, *options, environment=environment) as other:
        wider = replace(rig, servers=[*rig.servers, other])
        with pytest.raises(RefitConfigError, match=advice) as caught:
            wider.fleet().refit(rig.publish(1))
        assert other.address in str(caught.value)
    rig.assert_serve(0)
