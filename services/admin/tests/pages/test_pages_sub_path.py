"""Service below a path of a real nginx: pages, login, redirects, live updates and OTLP."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from integration.ports import hold_port
from test_pages_browser import try_out

TOKEN = "3f2b8c0d9e7a6b5c"
ROOT = "/rl"
TIMEOUT_S = 60.0
SPAN = {"traceId": "5b" * 16, "spanId": "b7" * 8, "name": "proxied"} | {
    "startTimeUnixNano": "1000000000",
    "endTimeUnixNano": "2000000000",
}
CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  server {{
    listen 127.0.0.1:{port};
    {location}
  }}
}}
"""
# With a trailing slash, as documented, nginx removes the prefix; without one it passes the prefix
# on. PASSED_ON also lets nginx change the Host header, so the service does not know its own origin.
DOCUMENTED = Path(__file__).parents[4] / "docs" / "recipes" / "dashboard-nginx.md"
REMOVED = re.search(r"```nginx\n(.*?)```", DOCUMENTED.read_text(), re.S)[1]
PASSED_ON = "location /rl { proxy_pass http://127.0.0.1:8080; }"


@pytest.fixture(scope="module")
def port():
    with hold_port() as holder:
        yield holder.getsockname()[1]


def wait_for_port(port, nginx, folder):
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            log = folder / "error.log"
            assert nginx.poll() is None, log.read_text() if log.exists() else "no log"
            time.sleep(0.02)
    raise AssertionError(f"nginx did not listen on {port} within {TIMEOUT_S:g} s")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(REMOVED, id="removed"),
        pytest.param(PASSED_ON, id="passed on", marks=pytest.mark.long),
    ],
)
def behind_nginx(request, start_running, port, tmp_path_factory):
    """Start the service behind nginx; return both URLs, and whether it allows nginx's origin."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin")
    assert program, "no nginx; `apt-get install nginx-light`, as `make test` does"
    origin = f"http://127.0.0.1:{port}"
    service = start_running(
        token=TOKEN,
        allow_actions=True,
        root_path=ROOT,
        allowed_origins=[] if request.param is REMOVED else [origin],
    )
    assert service.url.endswith(ROOT)
    folder = tmp_path_factory.mktemp("nginx")
    location = request.param.replace("http://127.0.0.1:8080", service.url.removesuffix(ROOT))
    config = folder / "nginx.conf"
    config.write_text(CONFIG.format(folder=folder, port=port, location=location))
    nginx = subprocess.Popen([program, "-p", folder, "-c", config, "-e", folder / "error.log"])
    try:
        wait_for_port(port, nginx, folder)
        yield SimpleNamespace(
            url=f"{origin}{ROOT}", direct_url=service.url, is_allowed=request.param is PASSED_ON
        )
    finally:
        nginx.terminate()
        nginx.wait(TIMEOUT_S)


@pytest.fixture
def proxied(behind_nginx):
    return behind_nginx.url


@pytest.fixture
def page(browser, proxied):
    """Open a page in a browser with a session."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    missing = []
    page.on(
        "response",
        lambda response: missing.append(response.url) if response.status == 404 else None,
    )
    page.goto(f"{proxied}/run?run=tests")
    assert page.url.startswith(f"{proxied}/login?next=")
    page.locator('input[name="token"]').fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url(f"{proxied}/run?run=tests")
    yield page
    # nginx answers 404 outside of the root path.
    assert missing == []
    context.close()


def test_pages_lead_only_below_the_root_path(page, proxied):
    """Follow every link of the service once, starting at the overview."""
    waiting, seen = [f"{proxied}/"], set()
    while waiting and len(seen) < 40:
        url = waiting.pop(0)
        name = url.partition("?")[0]
        if name in seen or "/static/" in url:
            continue
        seen.add(name)
        assert page.goto(url).status == 200
        if not page.locator("main").count():
            continue
        style = page.evaluate("getComputedStyle(document.body).fontFamily")
        assert "sans" in style or "ui" in style, f"{url} has no style: {style}"
        own = page.evaluate(
            """() => [...document.querySelectorAll('[href], [action], [src], [formaction]')]
            .flatMap((one) => ['href', 'action', 'src', 'formaction'].map((name) =>
              one.getAttribute(name))).filter((one) => one && one.startsWith('/'))"""
        )
        assert own
        assert [link for link in own if not link.startswith(f"{ROOT}/")] == []
        origin = proxied.removesuffix(ROOT)
        links = page.eval_on_selector_all(
            "a", "(all) => all.map((one) => one.getAttribute('href'))"
        )
        waiting += [f"{origin}{link}".partition("#")[0] for link in links if link.startswith("/")]
    names = {link.removeprefix(proxied) for link in seen}
    assert {
        "/",
        "/partition",
        "/samples",
        "/traces",
        "/runs",
        "/run",
        "/staleness",
        "/audit",
    } <= names
    assert {"/api/v1/status", "/metrics", "/trace", "/actions/clear"} <= names


def test_pages_follow_the_event_stream(page, proxied):
    page.goto(f"{proxied}/")
    page.wait_for_selector('#live[data-state="live"]')
    post(f"{proxied}/v1/traces", authorization=f"Bearer {TOKEN}")
    page.goto(f"{proxied}/traces?name=proxied")
    page.get_by_role("link", name="proxied").first.wait_for()


def test_cookies_have_the_root_path(page, proxied):
    page.goto(f"{proxied}/traces")
    page.locator("#theme").click()
    page.goto(f"{proxied}/")
    assert page.locator("html").get_attribute("data-theme") == "light"
    cookies = {cookie["name"]: cookie["path"] for cookie in page.context.cookies()}
    assert cookies["dataplane_admin"] == ROOT
    assert cookies["dataplane_theme"] == f"{ROOT}/"
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url(f"{proxied}/login")
    assert "dataplane_admin" not in {cookie["name"] for cookie in page.context.cookies()}


def test_an_action_is_sent_below_the_root_path(page, proxied):
    page.goto(f"{proxied}/actions/clear?partition=train&ids=step2_p0_g0")
    page.locator('input[name="confirm"]').fill("not train")
    with page.expect_response("**/actions/clear") as answered:
        page.get_by_role("button", name="Clear samples").click()
    # The confirmation is compared after origin and form were accepted.
    assert answered.value.status == 422


def test_the_api_page_uses_the_session_below_the_root_path(page, proxied):
    page.goto(f"{proxied}/")
    page.get_by_role("link", name="API", exact=True).click()
    page.wait_for_url(f"{proxied}/docs")
    listing = try_out(page, "live-list_partitions")
    change = try_out(page, "actions-end_claim", "{}")
    # The body is checked after session, origin and CSRF value were accepted.
    for block, status in ((listing, 200), (change, 422)):
        with page.expect_response("**/api/v1/**") as answered:
            block.get_by_role("button", name="Execute").click()
        assert answered.value.url.startswith(f"{proxied}/api/v1/")
        assert answered.value.status == status


def post(url, body=None, **headers):
    payload = json.dumps(body or {"resourceSpans": [{"scopeSpans": [{"spans": [SPAN]}]}]}).encode()
    request = urllib.request.Request(url, payload, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_exporters_send_below_the_root_path(proxied):
    bearer = {"authorization": f"Bearer {TOKEN}"}
    assert post(f"{proxied}/v1/traces", **bearer)[0] == 200
    status, body = post(f"{proxied}/v1/trace", **bearer)
    assert status == 404
    assert f"{ROOT}/v1/traces" in json.loads(body)["detail"]


def test_a_page_of_an_allowed_origin_sends_telemetry(browser, behind_nginx):
    page = browser.new_page()
    # This page of nginx has another origin than the service, which is addressed directly.
    page.goto(behind_nginx.url.removesuffix(ROOT))
    send = """([url, token]) => fetch(url, {
        method: "POST",
        headers: {"content-type": "application/json", "authorization": token},
        body: "{}",
    }).then((answer) => answer.status, (error) => error.name)"""
    sent = page.evaluate(send, [f"{behind_nginx.direct_url}/v1/traces", f"Bearer {TOKEN}"])
    assert sent == (200 if behind_nginx.is_allowed else "TypeError")
    page.close()


def test_the_document_of_the_api_names_the_root_path(proxied):
    request = urllib.request.Request(
        f"{proxied}/api/v1/openapi.json", headers={"authorization": f"Bearer {TOKEN}"}
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        assert json.load(answer)["servers"] == [{"url": ROOT}]
