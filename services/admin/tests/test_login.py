"""Who may change something: the token's holder, or a session from a page of ours."""

import re

import pytest
from fastapi.testclient import TestClient

from dataplane_admin.login import MOST_SESSIONS, SESSION_S, Sessions

TOKEN = "3f2b8c0d9e7a6b5c"
OURS = "http://localhost"
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
    return TestClient(app, base_url=OURS, follow_redirects=False, headers=headers)


def logged_in(app):
    client = client_of(app)
    answer = client.post("/login", data={"token": TOKEN}, headers={"origin": OURS})
    assert answer.status_code == 303
    return client


def csrf(client, page="/"):
    """The value that a page of ours carries."""
    page = client.get(page, headers=HTML)
    assert page.status_code == 200, page.text
    return re.search(r'name="csrf" value="([^"]+)"', page.text)[1]


def test_logging_in_sets_a_cookie_that_scripts_and_other_sites_cannot_use(app_of):
    answer = client_of(app_of(token=TOKEN)).post("/login", data={"token": f" {TOKEN}\n"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("dataplane_admin=")
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert "Secure" not in cookie
    assert TOKEN not in cookie


def test_behind_https_the_cookie_stays_there(app_of):
    client = client_of(app_of(token=TOKEN), origin="https://localhost")
    assert "Secure" in client.post("/login", data={"token": TOKEN}).headers["set-cookie"]


@pytest.mark.parametrize("data", [{}, {"token": ""}, {"token": TOKEN[:-1]}, {"token": "é" * 16}])
def test_another_token_does_not_log_in(app_of, data):
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
def test_logging_in_leads_on_to_a_page_of_ours_only(app_of, target, goes_to):
    data = {"token": TOKEN, "next": target}
    answer = client_of(app_of(token=TOKEN)).post("/login", data=data)
    assert answer.headers["location"] == goes_to


def test_a_browser_without_a_session_is_led_to_the_login_and_back(app_of):
    client = client_of(app_of(token=TOKEN))
    answer = client.get("/trace?id=a b", headers=HTML)
    assert answer.status_code == 303
    login = client.get(answer.headers["location"], headers=HTML)
    assert login.status_code == 200
    assert TOKEN not in login.text
    for machine in ("/api/v1/status", "/metrics"):
        assert client.get(machine, headers=HTML).status_code == 401


def test_a_session_reads_until_it_is_ended(app_of):
    client = logged_in(app_of(token=TOKEN))
    assert client.get("/api/v1/status").status_code == 200
    value = client.cookies["dataplane_admin"]
    answer = client.post("/logout", data={"csrf": csrf(client)}, headers={"origin": OURS})
    assert answer.status_code == 303
    again = client_of(app_of(token=TOKEN), cookie=f"dataplane_admin={value}")
    assert again.get("/api/v1/status").status_code == 401


def test_a_session_takes_no_telemetry(app_of):
    client = logged_in(app_of(token=TOKEN))
    assert client.post("/v1/traces", json={}, headers={"origin": OURS}).status_code == 401
    assert client.post("/v1/traces", json={}, headers=BEARER).status_code == 200


@pytest.mark.parametrize("origin", FOREIGN)
def test_a_stolen_cookie_does_nothing_from_another_origin(app_of, origin):
    app = app_of(token=TOKEN, allow_actions=True)
    client = logged_in(app)
    value = csrf(client)
    headers = {"origin": origin, "x-csrf-token": value}
    asked = {"partition": "p", "confirm": "p"}
    refused = client.post("/api/v1/actions/clear", json=asked, headers=headers)
    assert refused.status_code == 403
    assert refused.headers["content-type"] == "application/problem+json"
    assert client.get("/api/v1/status", headers={"origin": origin}).status_code == 403
    assert app.state.store.audit() == []


def test_an_allowed_origin_is_one_of_ours(app_of):
    app = app_of(token=TOKEN, allowed_origins=("https://Admin.Example",))
    client = client_of(app, **BEARER)
    assert client.get("/api/v1/status", headers={"origin": "https://admin.example"}).is_success
    assert client.get("/api/v1/status", headers={"origin": "https://admin.example:1"}).is_error


@pytest.mark.parametrize("origin", ["admin.example", "https://*.example", "https://a/b", ""])
def test_an_allowed_origin_that_is_none_is_refused_at_once(make_app, origin):
    with pytest.raises(ValueError, match="expected a scheme, a host"):
        make_app(allowed_origins=(origin,))


@pytest.mark.parametrize("token", [None, TOKEN])
def test_nothing_is_changed_without_the_csrf_value(app_of, token):
    app = app_of(token=token, allow_actions=True)
    client = client_of(app) if token is None else logged_in(app)
    value = csrf(client, "/actions/clear?partition=p")
    asked = {"partition": "p", "confirm": "p"}

    def act(**headers):
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        return client.post("/api/v1/actions/clear", json=asked, headers=named)

    for headers in (
        {},
        {"origin": OURS},
        {"origin": OURS, "x_csrf_token": ""},
        {"origin": OURS, "x_csrf_token": value[:-1]},
        {"origin": OURS, "x_csrf_token": "é".encode()},
        {"x_csrf_token": value},
        {"origin": "http://evil.example", "x_csrf_token": value},
    ):
        assert act(**headers).status_code == 403
    assert app.state.store.audit() == []
    # Past the door there is no data plane to act upon.
    assert act(origin=OURS, x_csrf_token=value).status_code == 503
    assert len(app.state.store.audit()) == 2


def test_a_form_carries_the_csrf_value_as_a_field(app_of):
    client = logged_in(app_of(token=TOKEN))
    for data in ({}, {"csrf": "other"}, {"csrf": ["a", csrf(client)]}):
        assert client.post("/logout", data=data, headers={"origin": OURS}).status_code == 403
    good = {"csrf": csrf(client)}
    assert client.post("/logout", data=good, headers={"origin": OURS}).status_code == 303


def test_the_csrf_value_of_one_session_is_not_that_of_another(app_of):
    app = app_of(token=TOKEN)
    one, other = logged_in(app), logged_in(app)
    answer = other.post("/logout", data={"csrf": csrf(one)}, headers={"origin": OURS})
    assert answer.status_code == 403


@pytest.mark.parametrize("length", [None, "2000000", "-1", "1e3", "9" * 5000, "²"])
def test_a_body_beyond_the_bound_is_refused(app_of, length):
    client = client_of(app_of(token=TOKEN, allow_actions=True), **BEARER)
    content = iter([b"x" * 600_000] * 2) if length is None else b"{}"
    headers = {"content-type": "application/json"}
    if length is not None:
        headers["content-length"] = length.encode()
    answer = client.post("/api/v1/actions/clear", content=content, headers=headers)
    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/problem+json"


def test_sessions_end_by_themselves_and_are_bounded():
    now = [0.0]
    sessions = Sessions(clock=lambda: now[0])
    first = sessions.begin()
    assert sessions.find(first) is not None
    assert sessions.find("") is None
    now[0] = SESSION_S
    assert sessions.find(first) is None
    values = [sessions.begin() for _ in range(MOST_SESSIONS + 1)]
    assert sessions.find(values[0]) is None
    assert sessions.find(values[1]) is not None
