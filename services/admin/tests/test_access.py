"""Access control by Host header and token."""

import pytest
from fastapi import WebSocket
from fastapi.testclient import TestClient
from starlette.testclient import WebSocketDenialResponse

TOKEN = "3f2b8c0d9e7a6b5c"


def get(app, path="/api/v1/version", **headers):
    named = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return TestClient(app, base_url="http://localhost").get(path, headers=named)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8080",
        "localhost.",
        "127.0.0.1",
        "127.0.0.1:1",
        "[::1]",
        "[::1]:8080",
        "[0:0:0:0:0:0:0:1]",
        "admin.example:80",
        "10.1.2.3",
    ],
)
def test_allowed_hosts_are_served_on_any_port(host, app_of):
    app = app_of(allowed_hosts=("localhost", "127.0.0.1", "::1", "Admin.Example", "10.1.2.3"))
    assert get(app, host=host).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "evil-localhost",
        "127.0.0.1.evil.example",
        "127.1",
        "2130706433",
        "localhost@evil.example",
        "evil.example@localhost",
        "localhost/",
        "localhost:8080:9090",
        "localhost:",
        "localhost:http",
        "localhost ",
        "::1",
        "[::1",
        "[localhost]",
        "[::1]evil.example",
        "*",
        "",
        "b\xe4d",
    ],
)
@pytest.mark.parametrize("path", ["/healthz", "/api/v1/version", "/nothing"])
def test_other_hosts_are_refused_on_every_path(host, path, app_of):
    response = get(app_of(), path, host=host.encode("latin-1"))
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/problem+json"
    assert "--allowed-host" in response.json()["detail"]


def test_two_host_headers_are_refused(app_of):
    client = TestClient(app_of(), base_url="http://localhost")
    headers = [("host", "localhost"), ("host", "evil.example")]
    assert client.get("/healthz", headers=headers).status_code == 400


@pytest.mark.parametrize("host", ["10.244.1.7:8080", "[fd00::7]:8080", "admin-0.admin"])
@pytest.mark.parametrize("path", ["/metrics", "/api/v1/version"])
def test_requests_with_the_token_may_use_any_host(host, path, app_of):
    headers = {"host": host, "authorization": f"Bearer {TOKEN}"}
    assert get(app_of(token=TOKEN), path, **headers).status_code == 200


@pytest.mark.parametrize("host", ["", "evil.example@localhost", "[::1", "a b"])
def test_the_token_still_needs_one_valid_host_header(host, app_of):
    headers = {"host": host, "authorization": f"Bearer {TOKEN}"}
    assert get(app_of(token=TOKEN), **headers).status_code == 400


@pytest.mark.parametrize("authorization", [None, "Bearer ", f"Bearer {TOKEN}x", f"Basic {TOKEN}"])
@pytest.mark.parametrize("token", [TOKEN, None])
def test_other_hosts_are_refused_without_the_token(token, authorization, app_of):
    headers = {} if authorization is None else {"authorization": authorization}
    response = get(app_of(token=token), "/metrics", host="10.244.1.7:8080", **headers)
    assert response.status_code == 400


def test_a_session_does_not_open_other_hosts(app_of):
    client = TestClient(app_of(token=TOKEN), base_url="http://localhost", follow_redirects=False)
    assert client.post("/login", data={"token": TOKEN}).status_code == 303
    [cookie] = client.cookies.jar
    session = {"cookie": f"{cookie.name}={cookie.value}"}
    assert client.get("/api/v1/version", headers=session).status_code == 200
    refused = client.get("/api/v1/version", headers={**session, "host": "evil.example"})
    assert refused.status_code == 400


@pytest.mark.parametrize("host", ["*", "*.example", "a:80", "http://a", "", "a b", "[::1]", "-a"])
def test_an_invalid_allowed_host_is_refused_at_start(host, app_of):
    with pytest.raises(ValueError, match="expected a host name or an IP address"):
        app_of(allowed_hosts=(host,))


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_a_request_with_the_token_is_allowed(scheme, app_of):
    assert get(app_of(token=TOKEN), authorization=f"{scheme} {TOKEN}").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": TOKEN},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": f"Bearer {TOKEN}x"},
        {"authorization": f"Bearer {TOKEN[:-1]}"},
        {"authorization": f"Bearer {TOKEN.upper()}"},
        {"authorization": f"Bearer {TOKEN}, Bearer {TOKEN}"},
        {"authorization": b"Bearer t\xf6ken"},
        {"cookie": f"token={TOKEN}"},
    ],
)
@pytest.mark.parametrize("path", ["/api/v1/version", "/", "/nothing", "/healthz/", "//healthz"])
def test_only_probes_answer_without_the_token(headers, path, app_of):
    response = get(app_of(token=TOKEN), path, **headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.headers["content-type"] == "application/problem+json"
    assert TOKEN not in response.text


def test_two_authorization_headers_are_refused(app_of):
    client = TestClient(app_of(token=TOKEN), base_url="http://localhost")
    headers = [("authorization", f"Bearer {TOKEN}"), ("authorization", "Bearer other")]
    assert client.get("/api/v1/version", headers=headers).status_code == 401


def test_a_token_in_the_query_does_not_count(app_of):
    assert get(app_of(token=TOKEN), f"/api/v1/version?token={TOKEN}").status_code == 401


def test_a_websocket_needs_the_token_as_well(make_app):
    app = make_app(token=TOKEN)

    @app.websocket("/ws")
    async def greet(websocket: WebSocket):
        await websocket.accept()
        await websocket.close()

    client = TestClient(app, base_url="http://localhost")
    with (
        pytest.raises(WebSocketDenialResponse) as refusal,
        client.websocket_connect("ws://localhost/ws"),
    ):
        pass
    assert refusal.value.status_code == 401
    headers = {"authorization": f"Bearer {TOKEN}"}
    with client.websocket_connect("ws://localhost/ws", headers=headers):
        pass
