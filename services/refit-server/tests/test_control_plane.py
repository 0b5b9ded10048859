"""The service through control-plane clients: state, restart, token, TLS, metrics."""

import contextlib
import signal
import sys
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from integration.ports import address_of, hold_port
from integration.waiting import wait_until
from modelexpress import p2p_pb2, p2p_pb2_grpc
from modelexpress.auth import TokenProvider, with_auth

from refit_mx import (
    ControlAccessError,
    ControlClient,
    ControlError,
    ControlUnavailableError,
    Deadline,
    RefitTimeoutError,
    VersionLeasedError,
    VersionNotFoundError,
)
from refit_mx.control import Heartbeat, Shard, VersionState, WorkerRole

TIMEOUT_S = 60.0
TOKEN = "0123456789abcdef-0123456789abcdef"
COMMAND = (sys.executable, "-m", "refit_server", "serve")


@pytest.fixture
def held():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def connect(held):
    return lambda *arguments, **options: held.enter_context(ControlClient(*arguments, **options))


def shard(version_id, slot="a", worker="w"):
    return Shard(version_id, slot, worker, 1, 8, "digest", "127.0.0.1:1")


def publish(client, key, worker="w", slots=("a",)):
    version = client.create_version("m", slots, idempotency_key=key)
    for slot in slots:
        version = client.create_shard(shard(version.version_id, slot, worker))
    assert version.state is VersionState.READY
    return version.version_id


def until(condition):
    """Wait for a condition on a server that may be unreachable meanwhile."""

    def holds():
        with contextlib.suppress(ControlUnavailableError, RefitTimeoutError):
            return condition()

    wait_until(holds, TIMEOUT_S)


@pytest.mark.slow
def test_killed_server_restores_its_state_after_a_restart(start, connect, tmp_path, held):
    address = address_of(held.enter_context(hold_port()))
    command = (*COMMAND, "--address", address, "--state", str(tmp_path / "state.db"))
    first = start(command=command)
    client = connect(address)
    client.register_worker("w", WorkerRole.TRAINER, "m", ttl_s=60)
    ready = publish(client, "1")
    staging = client.create_version("m", ("a", "b"), idempotency_key="2").version_id
    released = client.create_version("m", ("a",), idempotency_key="3").version_id
    client.delete_version(released)
    with client.lease(ready, "g", ttl_s=60) as lease:
        before = [client.get_version(uid) for uid in (ready, staging, released)]
        more = [client.create_version("n", ("a",), idempotency_key=str(n)) for n in range(200)]
        first.signal(signal.SIGKILL)
        first.process.wait(TIMEOUT_S)

        start(command=command)
        until(lambda: client.get_version(ready))
        assert [client.get_version(uid) for uid in (ready, staging, released)] == before
        assert [client.get_version(version.version_id) for version in more] == more
        assert client.list_shards(ready) == [shard(ready)]
        # The lease holds: the version may be released, but its shard stays.
        client.delete_version(ready)
        with pytest.raises(VersionLeasedError):
            client.delete_shard(ready, "a", "w")
        lease.check()
        # The worker is still live, and idempotency keys keep their meaning.
        assert client.create_shard(shard(staging)).state is VersionState.STAGING
        again = client.create_version("m", ("a", "b"), idempotency_key="2")
        assert again.version_id == staging
    assert client.delete_shard(ready, "a", "w")


@pytest.mark.slow
def test_server_that_cannot_store_its_state_refuses_and_exits(start, connect, tmp_path):
    state = ("--state", str(tmp_path / "state.db"))
    command = " ".join((*COMMAND, "--address", "127.0.0.1:0", "--grace-s", "1", *state))
    # No file may grow beyond 64 blocks of 512 or 1024 bytes, as on a full disk.
    server = start(command=("sh", "-c", f"ulimit -f 64; exec {command}"))
    client = connect(server.address)
    created = []
    refusal = None
    for n in range(2_000):
        try:
            created.append(client.create_version("m", (f"{n}" * 100,), idempotency_key=f"{n}"))
        except ControlUnavailableError as error:
            refusal = error
            break
    assert "the state cannot be stored" in str(refusal)
    _, written = server.process.communicate(timeout=TIMEOUT_S)
    assert server.process.returncode == 1
    assert "refit-server: the state cannot be stored" in written
    # Everything that was answered is there after a restart.
    client = connect(start(*state).address)
    assert created
    assert [client.get_version(version.version_id) for version in created] == created


@pytest.mark.slow
def test_worker_missing_after_a_restart_releases_its_version(start, connect, tmp_path):
    state = ("--state", str(tmp_path / "state.db"), "--restart-grace-s", "2")
    server = start(*state)
    client = connect(server.address)
    client.register_worker("w", WorkerRole.TRAINER, "m", ttl_s=3600)
    ready = publish(client, "1")
    client.mark_stale("w", WorkerRole.TRAINER, "m")
    client.register_worker("v", WorkerRole.TRAINER, "m", ttl_s=3)
    other = publish(client, "2", worker="v")
    server.process.kill()
    server.process.wait(TIMEOUT_S)
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


def test_stop_in_the_middle_of_a_wait_is_a_typed_error(start, connect):
    server = start()
    client = connect(server.address)
    uid = client.create_version("m", ("a",), idempotency_key="1").version_id
    server.signal(signal.SIGTERM)
    with pytest.raises(RefitTimeoutError, match="does not answer"):
        client.wait_ready(uid, Deadline(2.0, "version"))


@pytest.mark.slow
def test_suspended_server_is_a_typed_error_within_the_deadline(start, connect):
    server = start()
    client = connect(server.address, rpc_timeout_s=1.0)
    uid = client.create_version("m", ("a",), idempotency_key="1").version_id
    server.signal(signal.SIGSTOP)
    with pytest.raises(RefitTimeoutError, match="no answer within 1 s"):
        client.get_version(uid)
    server.signal(signal.SIGCONT)
    until(lambda: client.get_version(uid))


def test_options_of_retention_and_time_to_live_are_obeyed(start, connect):
    client = connect(start("--retention", "1", "--max-ttl-s", "100").address)
    with pytest.raises(ControlError, match="at most 100"):
        client.register_worker("w", WorkerRole.TRAINER, "m", ttl_s=101)
    client.register_worker("w", WorkerRole.TRAINER, "m", ttl_s=100)
    first, second = publish(client, "1"), publish(client, "2")
    assert client.get_version(first).state is VersionState.RELEASING
    assert client.get_version(second).state is VersionState.READY


def test_calls_without_the_token_are_refused_and_health_is_open(start, connect, token_file):
    address = start("--token-file", str(token_file)).address
    for token in (None, TOKEN[:-1], TOKEN + "x"):
        with pytest.raises(ControlAccessError, match="valid bearer token") as refusal:
            connect(address, token=token).get_version("x")
        assert TOKEN not in str(refusal.value)
    with pytest.raises(VersionNotFoundError):
        connect(address, token=TOKEN).get_version("x")
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_modelexpress_clients_send_the_token_from_their_file(start, token_file):
    address = start("--token-file", str(token_file)).address
    with grpc.insecure_channel(address) as plain:
        channel = with_auth(plain, TokenProvider(str(token_file)))
        stub = p2p_pb2_grpc.P2pServiceStub(channel)
        assert not stub.ListSources(p2p_pb2.ListSourcesRequest(), timeout=TIMEOUT_S).instances


def test_client_connects_over_tls_with_a_token(start, connect, certificate, token_file):
    pair = certificate("refit")
    address = start(*pair.options, "--token-file", str(token_file)).address
    client = connect(address, tls_ca=pair.cert, token=TOKEN)
    with Heartbeat(client, "w", WorkerRole.TRAINER, "m", on_sigterm=False):
        publish(client, "1")
    with pytest.raises(ControlAccessError, match="certificate is not signed by tls_ca"):
        connect(address, tls_ca=certificate("other").cert, token=TOKEN).get_version("x")


def test_metrics_count_calls_and_records(start, connect, token_file):
    # With a token, since a parallel test may still call a former server on this port. Refused calls
    # are not counted.
    server = start("--metrics-port", "0", "--token-file", str(token_file))
    url = server.process.stderr.readline().split()[-1]
    unauthorized, client = connect(server.address), connect(server.address, token=TOKEN)
    with pytest.raises(ControlAccessError):
        unauthorized.get_version("x")
    client.register_worker("w", WorkerRole.TRAINER, "m", ttl_s=60)
    secret = publish(client, "1")
    client.create_version("m", ("a",), idempotency_key="2")
    with pytest.raises(VersionNotFoundError):
        client.get_version("x")
    with client.lease(secret, "g"), urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        shown = answer.read().decode()
    lines = {line for line in shown.splitlines() if line.startswith("refit_control_")}
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
    assert expected <= lines, f"{sorted(expected - lines)} not in {sorted(lines)}"
    assert secret not in shown


def test_metrics_are_off_by_default(start):
    server = start()
    server.signal(signal.SIGTERM)
    status, _, written = server.wait()
    assert (status, written) == (0, "")
