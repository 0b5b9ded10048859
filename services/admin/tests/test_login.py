"""Changes need the token, or a session and a form of the service."""

import re
import time

import pytest
from fastapi.testclient import TestClient

from dataplane_admin import Settings

TOKEN = "3f2b8c0d9e7a6b5c"
SAME_ORIGIN = "http://localhost"
BEARER = {"authorization": f"Bearer {TOKEN}"}
HTML = {"accept": "text/html,*/*"}
FOREIGN = [
    "http://evil.example",
    "http://localhost:3000",
    "http://localhost.evil.example",
    "https://localhost:8443",
    "http://evil.example@localhost",
    "file://",
    "null",
    "",
    "localhost",
    "http://localhost/",
    "http://localhost, http://evil.example",
]


def client_of(app, **headers):
    return TestClient(app, base_url=SAME_ORIGIN, follow_redirects=False, headers=headers)


def logged_in(app):
    client = client_of(app)
    answer = client.post("/login", data={"token": TOKEN}, headers={"origin": SAME_ORIGIN})
    assert answer.status_code == 303
    return client


def csrf(client, page="/"):
    """Return the CSRF value of a page."""
    page = client.get(page, headers=HTML)
    assert page.status_code == 200, page.text
    return re.search(r'name="csrf" value="([^"]+)"', page.text)[1]


def test_the_session_cookie_is_protected(app_of):
    answer = client_of(app_of(token=TOKEN)).post("/login", data={"token": f" {TOKEN}\n"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("dataplane_admin=")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert "Secure" not in cookie
    assert TOKEN not in cookie


def test_behind_https_the_cookie_is_secure(app_of):
    client = client_of(app_of(token=TOKEN), origin="https://localhost")
    assert "Secure" in client.post("/login", data={"token": TOKEN}).headers["set-cookie"]


@pytest.mark.parametrize("data", [{}, {"token": ""}, {"token": TOKEN[:-1]}, {"token": "é" * 16}])
def test_a_wrong_token_does_not_log_in(app_of, data):
    client = client_of(app_of(token=TOKEN))
    answer = client.post("/login", data=data)
    assert (answer.status_code, "set-cookie" in answer.headers) == (401, False)
    page = client.post("/login", data=data, headers=HTML)
    assert page.headers["location"] == "/login?next=/&failed=1"


@pytest.mark.parametrize(
    ("target", "goes_to"),
    [
        ("/trace?id=1&b=2", "/trace?id=1&b=2"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("/\t/evil.example", "/"),
        ("https://evil.example", "/"),
        ("javascript:alert(1)", "/"),
        ("/login", "/"),
    ],
)
def test_login_redirects_to_local_pages_only(app_of, target, goes_to):
    data = {"token": TOKEN, "next": target}
    answer = client_of(app_of(token=TOKEN)).post("/login", data=data)
    assert answer.headers["location"] == goes_to


@pytest.mark.parametrize("token", ["", " ", "0123456789abcde", "pässwörter-von-mir"])
def test_a_token_that_protects_nothing_is_refused(token):
    with pytest.raises(ValueError, match="token: expected one token of at least 16 characters"):
        Settings(store_url="sqlite:///unused.sqlite", token=token)


def test_a_browser_without_a_session_is_redirected_to_the_login(app_of):
    client = client_of(app_of(token=TOKEN))
    answer = client.get("/trace?id=a b", headers=HTML)
    assert answer.status_code == 303
    login = client.get(answer.headers["location"], headers=HTML)
    assert login.status_code == 200
    assert TOKEN not in login.text
    for machine in ("/api/v1/status", "/metrics"):
        assert client.get(machine, headers=HTML).status_code == 401


def test_a_session_can_read_until_it_ends(app_of):
    client = logged_in(app_of(token=TOKEN))
    assert client.get("/api/v1/status").status_code == 200
    value = client.cookies["dataplane_admin"]
    answer = client.post("/logout", data={"csrf": csrf(client)}, headers={"origin": SAME_ORIGIN})
    assert answer.status_code == 303
    again = client_of(app_of(token=TOKEN), cookie=f"dataplane_admin={value}")
    assert again.get("/api/v1/status").status_code == 401


def test_a_session_cannot_send_telemetry(app_of):
    client = logged_in(app_of(token=TOKEN))
    assert client.post("/v1/traces", json={}, headers={"origin": SAME_ORIGIN}).status_code == 401
    assert client.post("/v1/traces", json={}, headers=BEARER).status_code == 200


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_stolen_cookie_does_nothing_from_another_origin(app_of, origin):
    app = app_of(token=TOKEN, allow_actions=True)
    client = logged_in(app)
    value = csrf(client)
    headers = {"origin": origin, "x-csrf-token": value}
    change = {"partition": "p", "confirm": "p"}
    refused = client.post("/api/v1/actions/clear", json=change, headers=headers)
    assert refused.status_code == 403
    assert refused.headers["content-type"] == "application/problem+json"
    assert client.get("/api/v1/status", headers={"origin": origin}).status_code == 403
    assert app.state.store.audit()[0] == []


def test_an_allowed_origin_may_change_things(app_of):
    app = app_of(token=TOKEN, allowed_origins=("https://Admin.Example",))
    client = client_of(app, **BEARER)
    assert client.get("/api/v1/status", headers={"origin": "https://admin.example"}).is_success
    assert client.get("/api/v1/status", headers={"origin": "https://admin.example:1"}).is_error


@pytest.mark.parametrize("origin", ["admin.example", "https://*.example", "https://a/b", ""])
def test_an_invalid_allowed_origin_is_refused_at_start(make_app, origin):
    with pytest.raises(ValueError, match="expected a scheme, a host"):
        make_app(allowed_origins=(origin,))


@pytest.mark.parametrize("token", [None, TOKEN])
def test_nothing_is_changed_without_the_csrf_value(app_of, token):
    app = app_of(token=token, allow_actions=True)
    client = client_of(app) if token is None else logged_in(app)
    value = csrf(client, "/actions/clear?partition=p")
    change = {"partition": "p", "confirm": "p"}

    def act(**headers):
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return client.post("/api/v1/actions/clear", json=change, headers=named)

    for headers in (
        {},
        {"origin": SAME_ORIGIN},
        {"origin": SAME_ORIGIN, "x_csrf_token": ""},
        {"origin": SAME_ORIGIN, "x_csrf_token": value[:-1]},
        {"origin": SAME_ORIGIN, "x_csrf_token": "é".encode()},
        {"x_csrf_token": value},
        {"origin": "http://evil.example", "x_csrf_token": value},
    ):
        assert act(**headers).status_code == 403
    assert app.state.store.audit()[0] == []
    # After authentication there is no data plane to change.
    assert act(origin=SAME_ORIGIN, x_csrf_token=value).status_code == 503
    assert len(app.state.store.audit()[0]) == 2


def test_a_form_carries_the_csrf_value_as_a_field(app_of):
    client = logged_in(app_of(token=TOKEN))
    for data in ({}, {"csrf": "other"}, {"csrf": ["a", csrf(client)]}):
        assert client.post("/logout", data=data, headers={"origin": SAME_ORIGIN}).status_code == 403
    good = {"csrf": csrf(client)}
    assert client.post("/logout", data=good, headers={"origin": SAME_ORIGIN}).status_code == 303


def test_every_session_has_its_own_csrf_value(app_of):
    app = app_of(token=TOKEN)
    first, second = logged_in(app), logged_in(app)
    answer = second.post("/logout", data={"csrf": csrf(first)}, headers={"origin": SAME_ORIGIN})
    assert answer.status_code == 403


@pytest.mark.parametrize("length", [None, "2000000", "-1", "1e3", "9" * 5000, "²"])
def test_a_body_above_the_limit_is_refused(app_of, length):
    client = client_of(app_of(token=TOKEN, allow_actions=True), **BEARER)
    content = iter([b"x" * 600_000] * 2) if length is None else b"{}"
    headers = {"content-type": "application/json"}
    if length is not None:
        headers["content-length"] = length.encode()
    answer = client.post("/api/v1/actions/clear", content=content, headers=headers)
    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_session_ends_after_twelve_hours(app_of, monkeypatch):
    client = logged_in(app_of(token=TOKEN))
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + 12 * 3600 - 60)
    assert client.get("/api/v1/status").status_code == 200
    monkeypatch.setattr(time, "monotonic", lambda: now() + 12 * 3600)
    assert client.get("/api/v1/status").status_code == 401


def test_new_sessions_replace_the_oldest(app_of, monkeypatch):
    monkeypatch.setattr("dataplane_admin.web.login.MAX_SESSIONS", 2)
    app = app_of(token=TOKEN)
    first, second = logged_in(app), logged_in(app)
    logged_in(app)
    assert first.get("/api/v1/status").status_code == 401
    assert second.get("/api/v1/status").status_code == 200


@pytest.mark.parametrize("action", ["clear", "redeliver", "end-claim"])
def test_a_form_without_the_csrf_value_is_refused(app_of, action):
    client = logged_in(app_of(token=TOKEN, allow_actions=True))
    for path in (f"/actions/{action}", f"/api/v1/actions/{action}", "/logout"):
        answer = client.post(path, headers={"origin": SAME_ORIGIN})
        assert (answer.status_code, "csrf" in answer.text) == (403, True), path
