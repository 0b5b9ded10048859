"""Routes answer as documented; every error is problem+json with security headers."""

from importlib.metadata import version

import pytest
from fastapi.testclient import TestClient

TOKEN = "3f2b8c0d9e7a6b5c"
SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


@pytest.fixture
def client(app_of):
    return TestClient(app_of(), base_url="http://localhost")


def assert_problem(response, status, title):
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert (body["type"], body["title"], body["status"]) == ("about:blank", title, status)
    return body["detail"]


def test_healthz_answers(client):
    response = client.get("/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_the_version_is_that_of_the_distribution(client):
    response = client.get("/api/v1/version")
    assert response.json() == {"name": "dataplane-admin", "version": version("dataplane-admin")}


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/healthz/", "/docs/", "/redoc", "/openapi.json", "/api/v1/x"],
)
def test_a_path_without_a_route_is_a_404_problem(client, path):
    detail = assert_problem(client.get(path, follow_redirects=False), 404, "Not Found")
    assert detail.startswith("GET /")


def test_a_browser_gets_a_page_for_a_path_without_a_route(client):
    answer = client.get("/typo", headers={"accept": "text/html,*/*"})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "No such path: /typo" in answer.text
    assert 'href="/runs"' in answer.text


@pytest.mark.parametrize("path", ["/static/x", "/static/0/x"])
def test_an_error_page_without_the_token_has_no_navigation(app_of, path):
    client = TestClient(app_of(token=TOKEN), base_url="http://localhost")
    answer = client.get(path, headers={"accept": "text/html"})
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert 'href="/runs"' not in answer.text


def test_a_wrong_method_is_a_405_with_the_right_one(app_of):
    client = TestClient(app_of(token=TOKEN), base_url="http://localhost")
    response = client.post("/healthz", headers={"authorization": f"Bearer {TOKEN}"})
    assert_problem(response, 405, "Method Not Allowed")
    assert response.headers["allow"] == "GET, HEAD"


def test_a_failing_route_is_a_500_without_details(make_app):
    app = make_app()

    async def fail():
        raise RuntimeError("the inner secret")

    app.add_api_route("/fail", fail)
    client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    response = client.get("/fail")
    assert "secret" not in assert_problem(response, 500, "Internal Server Error")
    assert SECURITY_HEADERS.items() <= dict(response.headers).items()


@pytest.mark.parametrize("path", ["/healthz", "/nothing", "/api/v1/version", "/docs"])
@pytest.mark.parametrize("host", ["localhost", "evil.example"])
@pytest.mark.parametrize("token", [None, TOKEN])
def test_every_answer_carries_the_security_headers(path, host, token, app_of):
    client = TestClient(app_of(token=token), base_url=f"http://{host}")
    response = client.get(path)
    assert SECURITY_HEADERS.items() <= dict(response.headers).items()
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("name", ["jaeger_url", "tempo_url"])
@pytest.mark.parametrize("url", ["javascript:alert(1)", "//jaeger", ""])
def test_an_external_link_must_be_http(make_app, name, url):
    with pytest.raises(ValueError, match=r"expected http://"):
        make_app(**{name: url})
