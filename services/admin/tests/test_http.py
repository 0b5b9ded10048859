"""Methods, wrong paths and CORS, for exporters, probes and pages of other origins."""

import pytest
from fastapi.testclient import TestClient

TOKEN = "3f2b8c0d9e7a6b5c"
BEARER = {"authorization": f"Bearer {TOKEN}"}
APP = "https://app.example"


def client_of(app):
    return TestClient(app, base_url="http://localhost", follow_redirects=False)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/", "/metrics", "/api/v1/status", "/no"])
def test_head_has_the_headers_of_get_and_no_body(app_of, path):
    client = client_of(app_of())
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-type"] == get.headers["content-type"]


def test_head_does_not_wait_for_the_end_of_a_stream(app_of):
    head = client_of(app_of()).head("/api/v1/live")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")


@pytest.mark.parametrize("token", [None, TOKEN])
@pytest.mark.parametrize(
    ("path", "right"),
    [
        ("/v1/trace", "/v1/traces"),
        ("/v1/traces/", "/v1/traces"),
        ("/v1/traces/v1/traces", "/v1/traces"),
        ("/api/v1/log", "/v1/logs"),
        ("/metrics", "/v1/metrics"),
        ("/traces", "/v1/traces"),
        ("/opentelemetry.proto.collector.trace.v1.TraceService/Export", "/v1/traces"),
        ("/", "/v1/traces or /v1/logs or /v1/metrics"),
    ],
)
def test_an_export_to_a_wrong_path_names_the_right_one(app_of, token, path, right):
    answer = client_of(app_of(token=token)).post(path, json={}, headers=BEARER if token else {})
    assert answer.status_code in (404, 405)
    assert answer.json()["detail"].endswith(f"; send OTLP over HTTP to {right}")


def preflight(client, path, origin, headers="authorization,content-type"):
    sent = {"origin": origin, "access-control-request-method": "POST"}
    return client.options(path, headers={**sent, "access-control-request-headers": headers})


@pytest.mark.parametrize("path", ["/v1/traces", "/v1/logs", "/v1/metrics"])
def test_pages_of_allowed_origins_may_send_telemetry(app_of, path):
    client = client_of(app_of(token=TOKEN, allowed_origins=("https://App.example:443",)))
    allowed = preflight(client, path, APP)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == APP
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    sent = client.post(path, json={}, headers={"origin": APP, **BEARER})
    assert (sent.status_code, sent.headers["access-control-allow-origin"]) == (200, APP)
    # A page must be able to read the reason of a refusal.
    refused = client.post(path, json={}, headers={"origin": APP})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, APP)


@pytest.mark.parametrize("origin", ["http://app.example", "https://other.example", "null"])
def test_pages_of_other_origins_may_not_send_telemetry(app_of, origin):
    client = client_of(app_of(allowed_origins=(APP,)))
    for answer in (
        preflight(client, "/v1/traces", origin),
        client.post("/v1/traces", json={}, headers={"origin": origin}),
    ):
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


def test_cors_opens_nothing_but_the_otlp_routes(app_of):
    client = client_of(app_of(allowed_origins=(APP,), allow_actions=True))
    for path in ("/api/v1/status", "/", "/api/v1/actions/clear", "/metrics"):
        assert "access-control-allow-origin" not in preflight(client, path, APP).headers
        answer = client.get(path, headers={"origin": APP})
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("given", ["/rl", "rl", "/rl/", "/a/b-c_d.e~f"])
def test_slashes_around_a_root_path_are_ignored(make_app, given):
    app = make_app(root_path=given, token=TOKEN)
    root = f"/{given.strip('/')}"
    client = client_of(app)
    for path in ("/traces", f"{root}/traces"):
        answer = client.get(path, headers={"accept": "text/html"})
        assert answer.headers["location"] == f"{root}/login?next=%2Ftraces"
    answer = client.post(f"{root}/login", data={"token": TOKEN, "next": "/traces"})
    assert answer.headers["location"] == f"{root}/traces"
    assert f"Path={root};" in answer.headers["set-cookie"]
    assert client.get(root, headers=BEARER).status_code == 200


@pytest.mark.parametrize("given", ["/a//b", "/a b", "/a?b", "/..", "/a/./b", "https://x"])
def test_an_invalid_root_path_is_refused(make_app, given):
    with pytest.raises(ValueError, match="expected a path such as /rl"):
        make_app(root_path=given)


@pytest.mark.parametrize("given", ["/api", "/v1", "/traces", "/static", "/api/v1/actions"])
def test_a_root_path_that_is_a_route_is_refused(make_app, given):
    with pytest.raises(ValueError, match="a path of the service"):
        make_app(root_path=given, allow_actions=True)
