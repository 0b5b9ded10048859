"""The command starts a real server with the standard health service, and stops on a signal."""

import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from typer.main import get_command
from typer.testing import CliRunner

from refit_server.cli import app

TIMEOUT_S = 60.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def health():
    """Return health stubs by address; their channels are closed after the test."""
    channels = []

    def connect(address, credentials=None):
        if credentials is None:
            channels.append(grpc.insecure_channel(address))
        else:
            channels.append(grpc.secure_channel(address, credentials))
        return health_pb2_grpc.HealthStub(channels[-1])

    yield connect
    for channel in channels:
        channel.close()


def check(stub, service=""):
    request = health_pb2.HealthCheckRequest(service=service)
    return stub.Check(request, timeout=TIMEOUT_S, wait_for_ready=True).status


def watch(stub):
    return stub.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)


def test_only_line_of_output_is_an_address_that_serves(start, health):
    server = start()
    host, port = server.address.rsplit(":", 1)
    assert host == "127.0.0.1"
    assert int(port) > 0
    assert check(health(server.address)) == SERVING
    server.signal(signal.SIGTERM)
    status, _, written = server.wait()
    assert (status, written) == (0, "")


def test_module_runs_as_the_command(start, health):
    server = start(command=(sys.executable, "-m", "refit_server", "serve", "--address", "[::1]:0"))
    assert server.address.startswith("[::1]:")
    assert check(health(server.address)) == SERVING


def test_version_is_printed():
    command = (sys.executable, "-m", "refit_server", "--version")
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert done.stdout == f"refit-server {version('refit-server')}\n"


def test_every_help_starts_with_an_example_and_cuts_nothing():
    for name in ((), *((name,) for name in get_command(app).commands)):
        done = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*name, "--help"])
        beginning, _, options = done.stdout.partition("\u256d")
        assert re.search(f"^ Example: refit-server {' '.join(name)}.*\n *\n", beginning, re.M)
        assert max(map(len, done.stdout.splitlines())) <= 80
        assert "\u2026" not in done.stdout
        assert "[env var" not in done.stdout
        assert "REFIT_SERVER_SERVE_ADDRESS" in options


def test_shell_completion_lists_the_options_of_an_unfinished_line():
    for line in (*get_command(app).commands, "serve --address 0.0.0.0:1"):
        words = ["refit-server", *line.split(), "--"]
        variables = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        variables["_REFIT_SERVER_COMPLETE"] = "complete_bash"
        done = CliRunner(env=variables).invoke(app, prog_name="refit-server")
        assert (done.exit_code, done.stdout.split()[-1:]) == (0, ["--help"])


def test_unknown_options_and_commands_have_status_2():
    for arguments in (["serve", "--nothing"], ["check", "--nothing"], ["nothing"]):
        assert CliRunner().invoke(app, arguments).exit_code == 2


def test_options_have_the_name_of_their_variable():
    # Typer names the variable after the parameter.
    for command in get_command(app).commands.values():
        for option in command.params:
            assert f"--{option.name.replace('_', '-')}" in option.opts


def test_health_covers_each_service(start, health):
    stub = health(start().address)
    assert check(stub, "model_express.refit.RefitService") == SERVING
    assert check(stub, "model_express.p2p.P2pService") == SERVING


def test_missing_service_is_unknown(start, health):
    with pytest.raises(grpc.RpcError) as refusal:
        check(health(start().address), "no.such.Service")
    assert refusal.value.code() == grpc.StatusCode.NOT_FOUND


def test_missing_method_is_unimplemented(start):
    with grpc.insecure_channel(start().address) as channel:
        call = channel.unary_unary("/model_express.refit.RefitService/NoSuchMethod")
        with pytest.raises(grpc.RpcError) as refusal:
            call(b"", timeout=TIMEOUT_S, wait_for_ready=True)
    assert refusal.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_watchers_learn_of_a_signal_before_their_calls_end(start, health, number):
    server = start("--grace-s", "1")
    statuses = watch(health(server.address))
    assert next(statuses).status == SERVING
    server.signal(number)
    assert next(statuses).status == NOT_SERVING
    with pytest.raises(grpc.RpcError):
        next(statuses)
    status, seconds, _ = server.wait()
    assert status == 0
    assert 0.9 <= seconds < 8


def test_no_new_call_is_accepted_while_the_server_stops(start, health):
    server = start("--grace-s", "20")
    statuses = watch(health(server.address))
    assert next(statuses).status == SERVING
    server.signal(signal.SIGTERM)
    assert next(statuses).status == NOT_SERVING
    newcomer = health(server.address)
    refusal = None
    deadline = time.monotonic() + 15
    while refusal is None and time.monotonic() < deadline:
        try:
            newcomer.Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError as error:
            refusal = error
    assert refusal is not None
    assert refusal.code() == grpc.StatusCode.UNAVAILABLE
    statuses.cancel()
    status, seconds, _ = server.wait()
    assert status == 0
    assert seconds < 15


STUCK = """
import asyncio
from grpc_health.v1 import health

async def never(self):
    await asyncio.Event().wait()

health.aio.HealthServicer.enter_graceful_shutdown = never
from refit_server.cli import app
app()
"""


def test_blocked_health_update_does_not_delay_the_stop(start):
    arguments = ("serve", "--address", "127.0.0.1:0", "--grace-s", "1")
    server = start(command=(sys.executable, "-c", STUCK, *arguments))
    server.signal(signal.SIGTERM)
    status, seconds, _ = server.wait()
    assert status == 0
    assert 0.9 <= seconds < 8


def test_server_with_a_certificate_accepts_only_tls(start, health, certificate):
    pair = certificate("refit")
    server = start(*pair.options)
    trusted = grpc.ssl_channel_credentials(pair.cert.read_bytes())
    assert check(health(server.address, trusted)) == SERVING
    with pytest.raises(grpc.RpcError):
        health(server.address).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)


def test_certificate_and_token_allow_every_interface(start, health, certificate, token_file):
    pair = certificate("refit")
    server = start(*pair.options, "--token-file", str(token_file), "--address", "0.0.0.0:0")
    assert server.address.startswith("0.0.0.0:")
    trusted = grpc.ssl_channel_credentials(pair.cert.read_bytes())
    here = server.address.replace("0.0.0.0", "127.0.0.1")
    assert check(health(here, trusted)) == SERVING
