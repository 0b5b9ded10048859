"""Every route answers valid and invalid input as described."""

import threading
import time

import pytest
import schemathesis
import torch
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from tensordict import TensorDict

from dataplane_core import InMemoryDataPlaneClient

PATIENCE_S = 20.0
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
    """Return the schema of a service with a data plane, so that all routes answer."""
    with InMemoryDataPlaneClient({"enabled": True, "impl": "in_memory"}) as plane:
        plane.register_partition("train", ["a"], 4, ["t"])
        plane.put_samples(["s0"], "train", TensorDict({"a": torch.zeros(1)}, [1]))
        app = make_app(inspector=plane, token=TOKEN, allow_actions=True, poll_s=0.02)
        app.state.live.start()
        deadline = time.monotonic() + PATIENCE_S
        while not app.state.live.snapshot.attached and time.monotonic() < deadline:
            threading.Event().wait(0.01)

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
            max_examples=15,
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


def test_the_document_describes_every_api_route(app_of):
    paths = set(app_of(token=TOKEN, allow_actions=True).openapi()["paths"])
    assert {
        "/healthz",
        "/readyz",
        "/metrics",
        "/v1/traces",
        "/v1/logs",
        "/v1/metrics",
        "/api/v1/status",
        "/api/v1/partitions",
        "/api/v1/partition",
        "/api/v1/partition/matrix",
        "/api/v1/partition/samples",
        "/api/v1/partition/claims",
        "/api/v1/samples",
        "/api/v1/sample",
        "/api/v1/why",
        "/api/v1/staleness",
        "/api/v1/runs",
        "/api/v1/run/steps",
        "/api/v1/traces",
        "/api/v1/trace",
        "/api/v1/trace/compare",
        "/api/v1/audit",
        "/api/v1/series",
        "/api/v1/live",
        "/api/v1/actions/clear",
        "/api/v1/actions/reset-consumption",
        "/api/v1/actions/end-claim",
    } <= paths
    assert not any(path.startswith(("/static", "/login")) for path in paths)
