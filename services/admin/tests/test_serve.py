"""The command starts a real service, refuses what is unsafe, and stops when asked."""

import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from waiting import until

TOKEN = "3f2b8c0d9e7a6b5c"


def get(url, **headers):
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture
def token_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"  {TOKEN}\r\n")
    return str(file)


def test_the_only_output_is_the_url(start):
    service = start()
    assert service.url.startswith("http://127.0.0.1:")
    assert get(f"{service.url}/healthz") == 200
    assert get(f"{service.url}/nothing") == 404
    assert get(f"{service.url}/healthz", Host="evil.example") == 400
    status, _, written = service.stop(signal.SIGTERM)
    assert (status, written) == (0, "")


def test_the_module_runs_as_the_command(start):
    service = start(command=(sys.executable, "-m", "dataplane_admin", "serve", "--port", "0"))
    assert get(f"{service.url}/healthz") == 200


def test_answers_do_not_reveal_the_server_software(start):
    with urllib.request.urlopen(f"{start().url}/healthz", timeout=30) as response:
        assert response.headers["server"] is None


def has_ipv6_loopback():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(
    not has_ipv6_loopback(), reason="needs IPv6 in the kernel, with ::1 on the loopback interface"
)
def test_ipv6_loopback_is_loopback(start):
    service = start("--host", "::1")
    assert service.url.startswith("http://[::1]:")
    assert get(f"{service.url}/healthz") == 200


def test_with_a_token_file_only_probes_are_open(start, token_file):
    url = start("--token-file", token_file).url
    assert get(f"{url}/healthz") == 200
    assert get(f"{url}/api/v1/version") == 401
    assert get(f"{url}/api/v1/version", Authorization=f"Bearer {TOKEN}") == 200


def test_all_interfaces_need_a_token_and_allowed_hosts(start, token_file):
    service = start("--host", "0.0.0.0", "--token-file", token_file, "--allowed-host", "admin.test")
    url = f"http://127.0.0.1:{service.port}/healthz"
    assert get(url, Host="admin.test") == 200
    assert get(url, Host="0.0.0.0") == 400
    assert get(url, Host="other.test") == 400


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "::ffff:127.0.0.1"])
def test_a_remote_address_needs_a_token_file(refused, host):
    status, errors = refused("--host", host, "--port", "0")
    assert status == 2
    assert errors.count("\n") == 1
    assert "--token-file" in errors


@pytest.mark.parametrize("content", [b"\n", b"short", b"two tokens in a file", b"\xff" * 20])
def test_a_file_without_a_token_is_refused_and_not_shown(refused, tmp_path, content):
    file = tmp_path / "token"
    file.write_bytes(content)
    status, errors = refused("--host", "0.0.0.0", "--port", "0", "--token-file", str(file))
    assert (status, errors.count("\n")) == (2, 1)
    assert "at least 16 characters" in errors
    assert content.strip() == b"" or content.decode("latin-1") not in errors


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--token-file", "no/such/file"], "no/such/file"),
        (["--host", "no-such-host.invalid"], "no-such-host.invalid"),
        (["--host", "a" * 70], "not a host name"),
        (["--allowed-host", "*"], "--allowed-host: host '*'"),
        (["--retention-days", "inf"], "--retention-days"),
        (["--silent-after-s", "inf"], "--silent-after-s"),
        (["--stuck-after-s", "inf"], "--stuck-after-s"),
        (["--redact", "x*"], "--redact: 'x*' matches the empty string"),
    ],
)
def test_a_wrong_option_is_reported_on_one_line(refused, arguments, named):
    status, errors = refused("--port", "0", *arguments)
    assert (status, errors.count("\n")) == (2, 1)
    assert named in errors


def test_environment_sets_any_option(refused, monkeypatch):
    variables = {"PORT": "x", "ALLOWED_HOST": "a.example a:80", "STUCK_AFTER_S": "0"}
    for name, value in variables.items():
        monkeypatch.setenv(f"DATAPLANE_ADMIN_SERVE_{name}", value)
    status, errors = refused()
    options = [line.split(": ")[1] for line in errors.splitlines()]
    assert (status, sorted(options)) == (2, ["--allowed-host", "--port", "--stuck-after-s"])
    status, errors = refused("--port", "0", "--stuck-after-s", "5")  # options come first
    assert (status, errors.count("\n")) == (2, 1)
    assert "--allowed-host: host 'a:80'" in errors


def test_wrong_options_are_reported_together(refused):
    wrong = {
        "--token-file": ("nofile", "nofile: No such file"),
        "--db": ("/etc", "found a folder"),
        "--tempo-url": ("http://tempo/{traceid}", "placeholder {traceid}"),
        "--jaeger-url": ("jaeger:16686", "expected http://"),
        "--port": ("x", "integer"),
        "--poll-s": ("0", "0.05"),
        "--allowed-host": ("a:80", "without a port"),
        "--allowed-origin": ("x", "expected a scheme"),
        "--root-path": ("/a b", "expected a path"),
    }
    status, errors = refused(
        *(text for option, (value, _) in wrong.items() for text in (option, value))
    )
    lines = errors.splitlines()
    assert (status, len(lines)) == (2, len(wrong)), errors
    for option, (_, reason) in wrong.items():
        [line] = [text for text in lines if text.startswith(f"dataplane-admin: {option}: ")]
        assert reason in line


def test_a_missing_driver_is_reported_on_one_line(tmp_path):
    program = (
        "import sys, importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'psycopg' else find(name, *rest)\n"
        "from dataplane_admin.cli import app\n"
        "app(['serve', '--db', 'postgresql://a:secret@localhost/x'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "dataplane-admin: --db: PostgreSQL needs psycopg" in done.stderr


def test_a_traceback_shows_no_local_variables(start):
    program = (
        "from dataplane_admin.cli import app\n"
        "from dataplane_admin.store.retention import Sweeper\n"
        "def step(self):\n"
        "    quoted = 'what the ' + 'user said'\n"
        "    raise RuntimeError('broken')\n"
        "Sweeper.step = step\n"
        "app(['serve', '--port', '0'])"
    )
    service = start(command=(sys.executable, "-c", program))
    until(lambda: "RuntimeError: broken\n" in service.written_errors(), seconds=60)
    written = service.written_errors()
    assert "in step" in written
    assert "what the user said" not in written


def test_a_port_in_use_is_reported_on_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "dataplane_admin", "serve", "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stdout) == (1, "")
    in_use = "Address already in use"
    assert done.stderr == (
        f"dataplane-admin: --port: cannot listen on 127.0.0.1:{port}: {in_use}\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_service_despite_open_connections(start, number):
    service = start()
    with (
        socket.create_connection(("127.0.0.1", service.port)) as idle,
        socket.create_connection(("127.0.0.1", service.port)) as half_way,
    ):
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(12) == b"HTTP/1.1 200"
        half_way.sendall(b"GET /healthz HTTP/1.1\r\nHost: loc")
        status, seconds, _ = service.stop(number)
    assert status == 0
    assert seconds < 8


HANGING = """
import asyncio
from dataplane_admin import Settings, create_app, serve
from fastapi.responses import StreamingResponse

app = create_app(Settings(store_url="sqlite:///hanging.sqlite"))

async def hang():
    yield b"under way"
    await asyncio.Event().wait()

async def answer():
    return StreamingResponse(hang())

app.add_api_route("/hang", answer)
serve(app, port=0, shutdown_timeout_s=1)
"""


def test_an_endless_request_delays_the_stop_up_to_the_timeout(start):
    service = start(command=(sys.executable, "-c", HANGING))
    with urllib.request.urlopen(f"{service.url}/hang", timeout=30) as response:
        assert response.read(9) == b"under way"
        status, seconds, _ = service.stop(signal.SIGTERM)
    assert status == 0
    assert 1 <= seconds < 8


def test_an_export_cancelled_by_the_stop_can_be_retried(start):
    service = start(command=(sys.executable, "-c", HANGING))
    with socket.create_connection(("127.0.0.1", service.port)) as exporter:
        exporter.settimeout(30)
        exporter.sendall(
            b"POST /v1/traces HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n"
            b"Content-Type: application/x-protobuf\r\nExpect: 100-continue\r\n\r\n"
        )
        # By now it reads the body.
        assert exporter.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        status, _, _ = service.stop(signal.SIGTERM)
        assert exporter.recv(100).startswith(b"HTTP/1.1 503 ")
    assert status == 0
