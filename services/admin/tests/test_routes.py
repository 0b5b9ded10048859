"""The routes answer as documented, and every error is problem+json with the security headers."""

from importlib.metadata import version

import pytest
from fastapi.testclient import TestClient

from dataplane_admin.security_headers import SECURITY_HEADERS

TOKEN = "3f2b8c0d9e7a6b5c"


@pytest.fixture
def client(app_of):
    return TestClient(app_of(), base_url="http://localhost")


def assert_problem(response, status, title):
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert (body["type"], body["title"], body["status"]) == ("about:blank", title, status)
    return body["detail"]


def test_healthz_says_that_the_process_lives(client):
    response = client.get("/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


def test_the_version_is_that_of_the_distribution(client):
    response = client.get("/api/v1/version")
    assert response.json() == {"name": "dataplane-admin", "version": version("dataplane-admin")}


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/healthz/", "/docs", "/redoc", "/openapi.json", "/api/v1/x"],
)
def test_a_path_without_a_route_is_a_404_problem(client, path):
    detail = assert_problem(client.get(path, follow_redirects=False), 404, "Not Found")
    assert detail.startswith("GET /")


def test_a_wrong_method_is_a_405_problem_that_names_the_right_one(app_of):
    client = TestClient(app_of(token=TOKEN), base_url="http://localhost")
    response = client.post("/healthz", headers={"authorization": f"Bearer {TOKEN}"})
    assert_problem(response, 405, "Method Not Allowed")
    assert response.headers["allow"] == "GET, HEAD"


def test_a_failing_route_is_a_500_problem_that_tells_nothing(make_app):
    app = make_app()

    async def fail():
        raise RuntimeError("the inner secret")

    app.add_api_route("/fail", fail)
    client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
    response = client.get("/fail")
    assert "secret" not in assert_problem(response, 500, "Internal Server Error")
    assert SECURITY_HEADERS.items() <= dict(response.headers).items()


@pytest.mark.parametrize("path", ["/healthz", "/nothing", "/api/v1/version"])
@pytest.mark.parametrize("host", ["localhost", "evil.example"])
@pytest.mark.parametrize("token", [None, TOKEN])
def test_every_answer_carries_the_security_headers(path, host, token, app_of):
    client = TestClient(app_of(token=token), base_url=f"http://{host}")
    response = client.get(path)
    assert SECURITY_HEADERS.items() <= dict(response.headers).items()
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("name", ["jaeger_url", "tempo_url"])
@pytest.mark.parametrize("url", ["javascript:alert(1)", "//jaeger", ""])
def test_a_link_to_elsewhere_leads_to_a_page_only(make_app, name, url):
    with pytest.raises(ValueError, match=r"expected http://"):
        make_app(**{name: url})


@pytest.mark.parametrize("url", ["mysql://x", "sqlite://", "x"])
def test_another_database_is_refused_at_once(make_app, url):
    with pytest.raises(ValueError, match="expected sqlite"):
        make_app(store_url=url)
