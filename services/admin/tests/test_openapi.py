"""Every route, asked with whatever fits or does not fit its description."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.config import SchemathesisConfig

TOKEN = "3f2b8c0d9e7a6b5c"
# To send what a description does not foresee is the point; the answer then is a 4xx of ours. These
# checks ask for more: that everything unforeseen is refused, what is not so of unknown parameters.
_LEFT_OUT = {
    "negative_data_rejection",
    "positive_data_acceptance",
    "missing_required_header",
    "unsupported_method",
    "ignored_auth",
}


@pytest.fixture(scope="module")
def document(app_of):
    app = app_of(token=TOKEN, allow_actions=True)
    return schemathesis.openapi.from_asgi(
        "/api/v1/openapi.json",
        app,
        headers={"authorization": f"Bearer {TOKEN}", "host": "localhost"},
        config=SchemathesisConfig(),
    )


schema = schemathesis.pytest.from_fixture("document").exclude(path="/api/v1/live")


@schema.parametrize()
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
def test_every_route_answers_hostile_input_as_described(case):
    load_all_checks()
    checks = [check for check in CHECKS.get_all() if check.__name__ not in _LEFT_OUT]
    headers = {"authorization": f"Bearer {TOKEN}", "host": "localhost"}
    case.call_and_validate(headers=headers, checks=checks)


def test_the_document_describes_every_route_for_machines(app_of):
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
