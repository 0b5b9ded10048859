"""The service as clients of the control plane meet it: state, restart, token, TLS, metrics."""

import contextlib
import signal
import sys
import time
import urllib.request

import pytest

from refit_mx.control import ControlClient, Heartbeat, Shard, VersionState, WorkerRole
from refit_mx.deadline import Deadline
from refit_mx.errors import (
    ControlAccessError,
    ControlError,
    ControlUnavailableError,
    RefitTimeoutError,
    VersionLeasedError,
    VersionNotFoundError,
)

PATIENCE_S = 60.0
TOKEN = "0123456789abcdef-0123456789abcdef"
COMMAND = (sys.executable, "-m", "refit_server", "serve")


@pytest.fixture
def connect():
    with contextlib.ExitStack() as held:
        yield lambda *arguments, **options: held.enter_context(ControlClient(*arguments, **options))


def shard(version_id, slot="a", worker="w"):
    return Shard(version_id, slot, worker, 1, 8, "digest", "127.0.0.1:1")


def publish(client, key, worker="w", slots=("a",)):
    version = client.create_version("m", slots, idempotency_key=key)
    for slot in slots:
        version = client.create_shard(shard(version.version_id, slot, worker))
    assert version.state is VersionState.READY
    return version.version_id


def until(condition, patience_s=PATIENCE_S):
    deadline = time.monotonic() + patience_s
    while True:
        with contextlib.suppress(ControlUnavailableError, RefitTimeoutError):
            if condition():
                return
        assert time.monotonic() < deadline, f"not within {patience_s:g} s"
        time.sleep(0.05)


@pytest.mark.slow
def test_a_killed_server_that_is_started_again_keeps_versions_shards_workers_and_leases(
    start, connect, tmp_path
):
    state = ("--state", str(tmp_path / "state.db"))
    first = start(*state)
    client = connect(first.address)
    client.register_worker("w", WorkerRole.TRAINER, "m", ttl_s=60)
    ready = publish(client, "1")
    staging = client.create_version("m", ("a", "b"), idempotency_key="2").version_id
    released = client.create_version("m", ("a",), idempotency_key="3").version_id
    client.delete_version(released)
    with client.lease(ready, "g", ttl_s=60) as lease:
        before = [client.get_version(uid) for uid in (ready, staging, released)]
        first.signal(signal.SIGKILL)
        first.process.wait(PATIENCE_S)

        port = first.address.rpartition(":")[2]
        start(command=(*COMMAND, "--address", f"127.0.0.1:{port}", *state))
        until(lambda: client.get_version(ready))
        assert [client.get_version(uid) for uid in (ready, staging, released)] == before
        assert client.list_shards(ready) == [shard(ready)]
        # The lease holds: the version may be released, and its shard still stays.
        client.delete_version(ready)
        with pytest.raises(VersionLeasedError):
            client.delete_shard(ready, "a", "w")
        lease.check()
        # The worker is live still, and an idempotency key means what it meant.
        assert client.create_shard(shard(staging)).state is VersionState.STAGING
        again = client.create_version("m", ("a", "b"), idempotency_key="2")
        assert again.version_id == staging
    assert client.delete_shard(ready, "a", "w")


@pytest.mark.slow
def test_what_was_answered_before_the_kill_is_there_after_it(start, connect, tmp_path):
    state = ("--state", str(tmp_path / "state.db"))
    server = start(*state)
    client = connect(server.address)
    made = [client.create_version("m", ("a",), idempotency_key=str(n)) for n in range(200)]
    server.process.kill()
    server.process.wait(PATIENCE_S)
    client = connect(start(*state).address)
    assert [client.get_version(version.version_id) for version in made] == made


@pytest.mark.slow
def test_a_server_that_cannot_keep_its_state_refuses_and_ends(start, connect, tmp_path):
    state = ("--state", str(tmp_path / "state.db"))
    command = " ".join((*COMMAND, "--address", "127.0.0.1:0", "--grace-s", "1", *state))
    # No file may grow beyond 64 blocks of 512 or 1024 bytes: as on a disk that is full.
    server = start(command=("sh", "-c", f"ulimit -f 64; exec {command}"))
    client = connect(server.address)
    made = []
    refusal = None
    for n in range(2_000):
        try:
            made.append(client.create_version("m", (f"{n}" * 100,), idempotency_key=f"{n}"))
        except ControlUnavailableError as error:
            refusal = error
            break
    assert "the state cannot be kept" in str(refusal)
    _, written = server.process.communicate(timeout=PATIENCE_S)
    assert server.process.returncode == 1
    assert "refit-server: the state cannot be kept" in written
    # What was answered is there for the next one.
    client = connect(start(*state).address)
    assert made
    assert [client.get_version(version.version_id) for version in made] == made


@pytest.mark.slow
def test_after_a_restart_a_worker_that_does_not_come_back_takes_its_version_along(
    start, connect, tmp_path
):
    state = ("--state", str(tmp_path / "state.db"), "--restart-grace-s", "2")
    server = start(*state)
    client = connect(server.address)
    client.register_worker("w", WorkerRole.TRAINER, "m", ttl_s=3600)
    ready = publish(client, "1")
    client.mark_stale("w", WorkerRole.TRAINER, "m")
    client.register_worker("v", WorkerRole.TRAINER, "m", ttl_s=3)
    other = publish(client, "2", worker="v")
    server.process.kill()
    server.process.wait(PATIENCE_S)
    client = connect(start(*state).address)
    assert client.get_version(ready).state is VersionState.RELEASING
    until(lambda: client.get_version(other).state is VersionState.RELEASING)


def test_without_a_state_file_a_restart_forgets(start, connect):
    server = start()
    uid = connect(server.address).create_version("m", ("a",), idempotency_key="1").version_id
    server.signal(signal.SIGTERM)
    assert server.wait()[0] == 0
    with pytest.raises(VersionNotFoundError):
        connect(start().address).get_version(uid)


def test_a_stop_in_the_middle_of_a_wait_is_a_typed_error(start, connect):
    server = start()
    client = connect(server.address)
    uid = client.create_version("m", ("a",), idempotency_key="1").version_id
    server.signal(signal.SIGTERM)
    with pytest.raises(RefitTimeoutError, match="does not answer"):
        client.wait_ready(uid, Deadline(2.0, "version"))


@pytest.mark.slow
def test_a_stopped_server_is_a_typed_error_within_the_deadline(start, connect):
    server = start()
    client = connect(server.address, rpc_timeout_s=1.0)
    uid = client.create_version("m", ("a",), idempotency_key="1").version_id
    server.signal(signal.SIGSTOP)
    with pytest.raises(RefitTimeoutError, match="no answer within 1 s"):
        client.get_version(uid)
    server.signal(signal.SIGCONT)
    until(lambda: client.get_version(uid))


def test_the_options_of_retention_and_time_to_live_are_obeyed(start, connect):
    client = connect(start("--retention", "1", "--most-ttl-s", "100").address)
    with pytest.raises(ControlError, match="at most 100"):
        client.register_worker("w", WorkerRole.TRAINER, "m", ttl_s=101)
    client.register_worker("w", WorkerRole.TRAINER, "m", ttl_s=100)
    first, second = publish(client, "1"), publish(client, "2")
    assert client.get_version(first).state is VersionState.RELEASING
    assert client.get_version(second).state is VersionState.READY


def test_calls_without_the_token_are_refused_and_health_is_open(start, connect, token_file):
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    address = start("--token-file", str(token_file)).address
    for token in (None, TOKEN[:-1], TOKEN + "x"):
        with pytest.raises(ControlAccessError, match="valid bearer token") as refusal:
            connect(address, token=token).get_version("x")
        assert TOKEN not in str(refusal.value)
    with pytest.raises(VersionNotFoundError):
        connect(address, token=TOKEN).get_version("x")
    import grpc

    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_the_real_clients_bring_the_token_from_their_file(start, token_file):
    import grpc
    from modelexpress import p2p_pb2, p2p_pb2_grpc
    from modelexpress.auth import TokenProvider, with_auth

    address = start("--token-file", str(token_file)).address
    with grpc.insecure_channel(address) as plain:
        channel = with_auth(plain, TokenProvider(str(token_file)))
        stub = p2p_pb2_grpc.P2pServiceStub(channel)
        assert not stub.ListSources(p2p_pb2.ListSourcesRequest(), timeout=PATIENCE_S).instances


def test_over_tls_with_a_token(start, connect, certificate, token_file):
    made = certificate("refit")
    secrets = ("--tls-cert", str(made.cert), "--tls-key", str(made.key))
    address = start(*secrets, "--token-file", str(token_file)).address
    client = connect(address, tls_ca=made.cert, token=TOKEN)
    with Heartbeat(client, "w", WorkerRole.TRAINER, "m", on_sigterm=False):
        publish(client, "1")
    with pytest.raises(ControlAccessError, match="certificate is not of tls_ca"):
        connect(address, tls_ca=certificate("other").cert, token=TOKEN).get_version("x")


def test_metrics_count_calls_and_what_is_held(start, connect, token_file):
    # With a token: the port may have been that of a server which another test, at the same time,
    # still asks for. Calls that are not let in are not counted.
    server = start("--metrics-port", "0", "--token-file", str(token_file))
    url = server.process.stderr.readline().split()[-1]
    stranger, client = connect(server.address), connect(server.address, token=TOKEN)
    with pytest.raises(ControlAccessError):
        stranger.get_version("x")
    client.register_worker("w", WorkerRole.TRAINER, "m", ttl_s=60)
    secret = publish(client, "1")
    client.create_version("m", ("a",), idempotency_key="2")
    with pytest.raises(VersionNotFoundError):
        client.get_version("x")
    with client.lease(secret, "g"), urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        shown = answer.read().decode()
    told = {line for line in shown.splitlines() if line.startswith("refit_control_")}
    expected = {
        'refit_control_versions{state="ready"} 1.0',
        'refit_control_versions{state="staging"} 1.0',
        'refit_control_versions{state="releasing"} 0.0',
        'refit_control_workers{role="trainer"} 1.0',
        "refit_control_shards 1.0",
        "refit_control_leases 1.0",
        "refit_control_sources 0.0",
        'refit_control_calls_total{code="NOT_FOUND",method="GetWeightVersion"} 1.0',
        'refit_control_calls_total{code="OK",method="CreateWeightVersion"} 2.0',
        'refit_control_call_seconds_count{method="CreateWeightVersion"} 2.0',
    }
    assert expected <= told, f"{sorted(expected - told)} not in {sorted(told)}"
    assert secret not in shown


def test_no_metrics_are_shown_unless_asked_for(start):
    server = start()
    server.signal(signal.SIGTERM)
    status, _, written = server.wait()
    assert (status, written) == (0, "")
