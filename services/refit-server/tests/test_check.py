"""Health probes: exit status 0 for a server that serves, else 1 with the reason."""

import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


@pytest.fixture
def probe():
    def run(*arguments):
        command = [sys.executable, "-m", "refit_server", "check", "--timeout-s", "20", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout + done.stderr

    return run


def test_server_that_serves_is_healthy(start, probe):
    assert probe("--address", start().address) == (0, "")


def test_proxy_of_the_environment_is_ignored(start, probe, monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert probe("--address", start().address) == (0, "")


def test_tls_probe_checks_the_certificate_and_needs_no_token(start, probe, certificate, token_file):
    pair = certificate("refit")
    address = start(*pair.options, "--token-file", str(token_file)).address
    assert probe("--address", address, "--tls-ca", str(pair.cert)) == (0, "")
    status, output = probe("--address", address, "--tls-ca", str(certificate("other").cert))
    assert status == 1
    assert "UNAVAILABLE" in output
    named = ("--tls-ca", str(pair.cert), "--tls-name", "another.example")
    assert probe("--address", address, *named)[0] == 1


@pytest.fixture
def stopping():
    """Address of a server that reports NOT_SERVING."""
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


def test_json_has_the_reported_status(start, probe, stopping):
    address = start().address
    status, output = probe("--address", address, "--json")
    assert (status, json.loads(output)) == (0, {"address": address, "status": "SERVING"})
    status, output = probe("--address", stopping, "--json")
    printed, reason = output.splitlines()
    assert (status, json.loads(printed)) == (1, {"address": stopping, "status": "NOT_SERVING"})
    assert reason == f"refit-server: {stopping}: NOT_SERVING"


def test_unreachable_server_is_one_line_and_status_1(probe):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    status, output = probe("--address", f"127.0.0.1:{port}")
    assert status == 1
    assert output.startswith(f"refit-server: 127.0.0.1:{port}: UNAVAILABLE: ")
    assert output.count("\n") == 1


def test_suspended_server_fails_the_probe_in_time(start, probe):
    server = start()
    server.signal(signal.SIGSTOP)
    status, output = probe("--address", server.address, "--timeout-s", "0.5")
    assert status == 1
    assert "DEADLINE_EXCEEDED" in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        *(
            (
                ("--address", address),
                f"--address: address {address!r}; expected HOST:PORT, such as 127.0.0.1:50051",
            )
            for address in ("127.0.0.1:99999", "localhost", "")
        ),
        (("--tls-name", "x"), "--tls-name: --tls-ca is missing; expected both"),
        (("--tls-ca", "/no/file"), "--tls-ca: /no/file: No such file or directory"),
    ],
)
def test_wrong_options_are_one_line(probe, arguments, expected):
    assert probe(*arguments) == (2, f"refit-server: {expected}\n")


def test_probe_loads_neither_torch_nor_a_server():
    code = (
        "import sys; from typer.testing import CliRunner; from refit_server.cli import app; "
        "arguments = ['check', '--address', '127.0.0.1:1', '--timeout-s', '1'];"
        "result = CliRunner().invoke(app, arguments);"
        "print(result.exit_code, {'torch', 'modelexpress'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "1 set()"
