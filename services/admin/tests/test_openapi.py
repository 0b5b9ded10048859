"""Every route answers valid and invalid input as described."""

import json
import re

import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from tensordict import TensorDict
from waiting import until

from dataplane_core import InMemoryDataPlaneClient

TOKEN = "3f2b8c0d9e7a6b5c"
HEADERS = {"authorization": f"Bearer {TOKEN}", "host": "localhost"}
# Undescribed input is the point of the test; the service answers it with a 4xx.
# These checks require more, such as refusing unknown parameters.
_LEFT_OUT = {
    "ignored_auth",
    "missing_required_header",
    "negative_data_rejection",
    "positive_data_acceptance",
    "unsupported_method",
}
_ENDLESS = {"/api/v1/live"}


@pytest.fixture
def app(make_app):
    """Return a service with a data plane, so that all routes answer."""
    with InMemoryDataPlaneClient({"enabled": True, "impl": "in_memory"}) as plane:
        plane.register_partition("train", ["a"], 4, ["t"])
        plane.put_samples(["s0"], "train", TensorDict({"a": torch.zeros(1)}, [1]))
        app = make_app(inspector=plane.inspector, token=TOKEN, allow_actions=True, poll_s=0.02)
        app.state.live.start()
        until(lambda: app.state.live.snapshot.attached)

        async def requests_only(scope, receive, send):
            # Each case would run a lifespan, of which the service has only one.
            if scope["type"] != "lifespan":
                await app(scope, receive, send)
                return
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})

        yield requests_only
        app.state.live.close()


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_route_answers_hostile_input_as_described(app, mode):
    load_all_checks()
    checks = [check for check in CHECKS.get_all() if check.__name__ not in _LEFT_OUT]
    schema = schemathesis.openapi.from_asgi("/api/v1/openapi.json", app, headers=HEADERS)
    tried = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path in _ENDLESS:
            continue

        @settings(
            max_examples=8,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case):
            tried.add(case.operation.path)
            case.call_and_validate(headers=HEADERS, checks=checks)

        if mode is GenerationMode.POSITIVE or operation.query or operation.body:
            ask()
    assert len(tried) > 10


def test_operation_ids_are_stable(app_of):
    # A changed id renames a function of every generated client.
    assert operation_ids(app_of) == {
        ("get", "/healthz"): "get_liveness",
        ("get", "/readyz"): "get_readiness",
        ("get", "/metrics"): "get_metrics",
        ("post", "/v1/traces"): "export_traces",
        ("post", "/v1/logs"): "export_logs",
        ("post", "/v1/metrics"): "export_metrics",
        ("get", "/api/v1/version"): "get_version",
        ("get", "/api/v1/status"): "get_status",
        ("get", "/api/v1/samples/facts"): "list_sample_facts",
        ("get", "/api/v1/samples/group"): "get_sample_group",
        ("get", "/api/v1/sample/content"): "get_sample_content",
        ("get", "/api/v1/partitions"): "list_partitions",
        ("get", "/api/v1/partition"): "get_partition",
        ("get", "/api/v1/partition/matrix"): "get_partition_matrix",
        ("get", "/api/v1/partition/history"): "get_partition_history",
        ("get", "/api/v1/partition/samples"): "list_partition_samples",
        ("get", "/api/v1/partition/claims"): "list_partition_claims",
        ("get", "/api/v1/samples"): "search_samples",
        ("get", "/api/v1/sample"): "get_sample",
        ("get", "/api/v1/why"): "list_blocked_tasks",
        ("get", "/api/v1/staleness"): "get_staleness",
        ("get", "/api/v1/runs"): "list_runs",
        ("get", "/api/v1/run"): "get_run",
        ("get", "/api/v1/runs/compare"): "compare_runs",
        ("get", "/api/v1/runs/curves"): "compare_run_curves",
        ("get", "/api/v1/run/steps"): "get_run_steps",
        ("get", "/api/v1/traces"): "list_traces",
        ("get", "/api/v1/trace"): "get_trace",
        ("get", "/api/v1/trace/compare"): "compare_traces",
        ("get", "/api/v1/alerts"): "list_alerts",
        ("get", "/api/v1/load"): "get_load",
        ("get", "/api/v1/audit"): "list_audit_entries",
        ("get", "/api/v1/series"): "list_series",
        ("get", "/api/v1/live"): "stream_changes",
        ("post", "/api/v1/actions/clear"): "clear_samples",
        ("post", "/api/v1/actions/redeliver"): "redeliver_samples",
        ("post", "/api/v1/actions/end-claim"): "end_claim",
        ("post", "/api/v1/actions/tag-run"): "tag_run",
    }


def test_operations_are_summarized_by_their_docstrings(app_of):
    document = app_of(token=TOKEN, allow_actions=True).openapi()
    blocked = document["paths"]["/api/v1/why"]["get"]
    assert blocked["summary"].startswith("List blocked tasks, longest first;")
    assert blocked["description"].startswith("With `run`, only tasks")
    for path in document["paths"].values():
        for operation in path.values():
            assert not operation["summary"].endswith(".")
            assert operation["summary"] != operation["operationId"].replace("_", " ").title()


def test_no_operation_takes_a_url(app_of):
    # Webhooks are configured by the operator alone.
    document = app_of(token=TOKEN, allow_actions=True).openapi()
    operations = [each for path in document["paths"].values() for each in path.values()]
    names = {each["name"] for operation in operations for each in operation.get("parameters", ())}
    bodies = json.dumps([operation.get("requestBody") for operation in operations])
    for body in re.findall(r"schemas/(\w+)", bodies):
        names |= document["components"]["schemas"][body]["properties"].keys()
    assert {"run", "confirm"} <= names
    assert [name for name in names if re.search("ur[il]|hook|host|address", name.lower())] == []


def operation_ids(app_of):
    """Return the operation id of each method and path."""
    paths = app_of(token=TOKEN, allow_actions=True).openapi()["paths"]
    return {
        (method, path): operation["operationId"]
        for path, operations in paths.items()
        for method, operation in operations.items()
    }


def test_only_probes_are_described_without_a_token(app_of):
    document = app_of().openapi()
    assert document["security"] == [{"bearer": []}, {}]
    open_paths = {
        path
        for path, operations in document["paths"].items()
        if any("security" in operation for operation in operations.values())
    }
    assert open_paths == {"/healthz", "/readyz"}
