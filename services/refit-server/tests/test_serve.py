"""The command starts a real server with the standard health service, and stops when asked."""

import signal
import sys
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

PATIENCE_S = 60.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def health():
    """Gives a health stub of an address; its channel is closed with the test."""
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
    return stub.Check(request, timeout=PATIENCE_S, wait_for_ready=True).status


def watch(stub):
    return stub.Watch(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)


def test_the_one_line_of_output_is_an_address_that_serves(start, health):
    server = start()
    host, port = server.address.rsplit(":", 1)
    assert host == "127.0.0.1"
    assert int(port) > 0
    assert check(health(server.address)) == SERVING
    server.signal(signal.SIGTERM)
    status, _, written = server.wait()
    assert (status, written) == (0, "")


def test_the_module_runs_as_the_command(start, health):
    server = start(command=(sys.executable, "-m", "refit_server", "serve", "--address", "[::1]:0"))
    assert server.address.startswith("[::1]:")
    assert check(health(server.address)) == SERVING


def test_health_speaks_of_each_service(start, health):
    stub = health(start().address)
    assert check(stub, "model_express.refit.RefitService") == SERVING
    assert check(stub, "model_express.p2p.P2pService") == SERVING


def test_a_service_that_is_not_there_is_unknown(start, health):
    with pytest.raises(grpc.RpcError) as refusal:
        check(health(start().address), "no.such.Service")
    assert refusal.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_method_that_is_not_there_is_unimplemented(start):
    with grpc.insecure_channel(start().address) as channel:
        call = channel.unary_unary("/model_express.refit.RefitService/NoSuchMethod")
        with pytest.raises(grpc.RpcError) as refusal:
            call(b"", timeout=PATIENCE_S, wait_for_ready=True)
    assert refusal.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_announced_to_watchers_before_their_calls_are_ended(start, health, number):
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


def test_an_announcement_that_is_stuck_does_not_hold_the_stop_up(start):
    arguments = ("serve", "--address", "127.0.0.1:0", "--grace-s", "1")
    server = start(command=(sys.executable, "-c", STUCK, *arguments))
    server.signal(signal.SIGTERM)
    status, seconds, _ = server.wait()
    assert status == 0
    assert 0.9 <= seconds < 8


def test_with_a_certificate_only_tls_is_spoken(start, health, certificate):
    made = certificate("refit")
    options = ("--tls-cert", str(made.cert), "--tls-key", str(made.key))
    server = start(*options)
    trusted = grpc.ssl_channel_credentials(made.cert.read_bytes())
    assert check(health(server.address, trusted)) == SERVING
    with pytest.raises(grpc.RpcError):
        health(server.address).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)


def test_with_a_certificate_and_a_token_every_interface_can_be_served(
    start, health, certificate, token_file
):
    made = certificate("refit")
    secrets = ("--tls-cert", str(made.cert), "--tls-key", str(made.key))
    server = start(*secrets, "--token-file", str(token_file), "--address", "0.0.0.0:0")
    assert server.address.startswith("0.0.0.0:")
    trusted = grpc.ssl_channel_credentials(made.cert.read_bytes())
    here = server.address.replace("0.0.0.0", "127.0.0.1")
    assert check(health(here, trusted)) == SERVING
