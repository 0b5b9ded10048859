"""The client, its leases and its heartbeat, against a real server in this process."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from refit_mx.control import (
    ControlClient,
    EmbeddedControlServer,
    Heartbeat,
    Limits,
    Shard,
    SqliteStore,
    VersionState,
    WorkerRole,
)
from refit_mx.control.protocol import (
    p2p_pb2,
    p2p_pb2_grpc,
    refit_pb2,
    refit_pb2_grpc,
    refit_source_id,
)
from refit_mx.deadline import Deadline
from refit_mx.errors import (
    ControlError,
    ControlUnavailableError,
    LeaseLostError,
    RefitConfigError,
    RefitTimeoutError,
    VersionLeasedError,
    VersionNotFoundError,
    VersionNotReadyError,
)

PATIENCE_S = 60.0
TRAINER = WorkerRole.TRAINER
PROCESS = Path(__file__).with_name("control_process.py")


@pytest.fixture
def server():
    with EmbeddedControlServer(retention=0) as running:
        yield running


@pytest.fixture
def client(server):
    with ControlClient(server.address) as connected:
        yield connected


def shard(version_id, slot="a", worker="w", digest="d"):
    return Shard(version_id, slot, worker, 3, 2**40, digest, "127.0.0.1:1")


def publish(client, key="k", worker="w", slots=("a",)):
    client.register_worker(worker, TRAINER, "m", ttl_s=60)
    version = client.create_version("m", slots, idempotency_key=key)
    for slot in slots:
        version = client.create_shard(shard(version.version_id, slot, worker))
    return version.version_id


def until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s"
        time.sleep(0.02)


# Calls


def test_a_version_through_its_life(client):
    client.register_worker("w", TRAINER, "m", ttl_s=60)
    version = client.create_version("m", ["a", "b"], idempotency_key="k", version_id="v")
    assert (version.version_id, version.state) == ("v", VersionState.STAGING)
    assert client.create_shard(shard("v", "a")).state is VersionState.STAGING
    assert client.create_shard(shard("v", "b")).state is VersionState.READY
    assert client.wait_ready("v", Deadline(5, "v")).expected_source_slots == ("a", "b")
    assert sorted(client.list_shards("v"), key=lambda each: each.key) == [
        shard("v", "a"),
        shard("v", "b"),
    ]
    with client.lease("v", "g"):
        assert client.delete_version("v").state is VersionState.RELEASING
        with pytest.raises(VersionLeasedError, match="'g'"):
            client.delete_shard("v", "a", "w")
    assert client.delete_shard("v", "a", "w")
    assert not client.delete_shard("v", "a", "w")


def test_refusals_are_typed(client):
    uid = publish(client)
    with pytest.raises(VersionNotFoundError, match="'x'"):
        client.get_version("x")
    with pytest.raises(ControlError, match="ALREADY_EXISTS"):
        client.create_version("m", ["b"], idempotency_key="k")
    with pytest.raises(ControlError, match="INVALID_ARGUMENT"):
        client.create_version("m", [], idempotency_key="l")
    with pytest.raises(ControlError, match="is not registered") as refusal:
        client.create_shard(shard(uid, worker="v"))
    assert not isinstance(refusal.value, VersionNotReadyError)
    with pytest.raises(VersionNotReadyError, match="delete the version first"):
        client.delete_shard(uid, "a", "w")
    client.delete_version(uid)
    with pytest.raises(VersionNotReadyError, match="takes no shards"):
        client.create_shard(shard(uid, digest="e"))
    with pytest.raises(VersionNotReadyError, match="needs READY"):
        client.lease(uid, "g")
    with pytest.raises(VersionNotReadyError, match="RELEASING"):
        client.wait_ready(uid, Deadline(5, "v"))
    assert not client.delete_shard("forgotten", "a", "w")


def test_waiting_names_the_slots_that_are_missing(client):
    slots = [f"fsdp-{n}" for n in range(8)]
    client.register_worker("w", TRAINER, "m", ttl_s=60)
    uid = client.create_version("m", slots, idempotency_key="k").version_id
    client.create_shard(shard(uid, "fsdp-0"))
    with pytest.raises(RefitTimeoutError, match=r"7 of 8 slots .*: fsdp-1, fsdp-2"):
        client.wait_ready(uid, Deadline(0.2, "v"))
    with pytest.raises(VersionNotFoundError):
        client.wait_ready("x", Deadline(5, "v"))


def test_waiting_ends_when_the_last_slot_is_filled(client, server):
    client.register_worker("w", TRAINER, "m", ttl_s=60)
    uid = client.create_version("m", ["a"], idempotency_key="k").version_id
    found = []
    waiter = threading.Thread(
        target=lambda: found.append(client.wait_ready(uid, Deadline(PATIENCE_S, "v")))
    )
    waiter.start()
    client.create_shard(shard(uid))
    waiter.join(PATIENCE_S)
    assert [version.state for version in found] == [VersionState.READY]


def test_a_server_that_is_not_there_is_unavailable_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with ControlClient(address) as client:
        with pytest.raises(ControlUnavailableError, match=address):
            client.get_version("v")
        with pytest.raises(RefitTimeoutError, match="does not answer"):
            client.wait_ready("v", Deadline(0.3, "v"))
    with pytest.raises(ControlUnavailableError, match="closed"):
        client.get_version("v")


def test_a_server_that_does_not_answer_is_a_timeout():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with (
            ControlClient(address, rpc_timeout_s=0.3) as client,
            pytest.raises((RefitTimeoutError, ControlUnavailableError)),
        ):
            client.get_version("v")


@pytest.mark.parametrize(
    "wrong",
    [
        {"address": ""},
        {"rpc_timeout_s": 0},
        {"tls_ca": "nowhere.pem"},
        {"address": "192.0.2.1:1", "token": "t"},
    ],
)
def test_options_that_cannot_be_right_are_refused(wrong):
    with pytest.raises(RefitConfigError):
        ControlClient(**{"address": "127.0.0.1:1", **wrong})


def test_the_address_of_an_embedded_server_is_taken_once(server):
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(RefitConfigError, match="cannot listen"):
        EmbeddedControlServer(port=port)


def test_an_embedded_server_asks_for_its_token():
    token = "0123456789abcdef"
    with EmbeddedControlServer(token=token) as server:
        with ControlClient(server.address, token=token) as client:
            publish(client)
        for wrong in (None, "", token[:-1], token + "0"):
            with (
                ControlClient(server.address, token=wrong) as client,
                pytest.raises(ControlError, match="UNAUTHENTICATED"),
            ):
                client.get_version("v")


def test_calls_are_observed():
    seen = []
    with (
        EmbeddedControlServer(observe=lambda *call: seen.append(call)) as server,
        ControlClient(server.address) as client,
    ):
        publish(client)
        with pytest.raises(VersionNotFoundError):
            client.get_version("x")
    assert [call[:2] for call in seen] == [
        ("RegisterWorker", "OK"),
        ("CreateWeightVersion", "OK"),
        ("CreateWeightVersionShard", "OK"),
        ("GetWeightVersion", "NOT_FOUND"),
    ]
    assert all(seconds > 0 for _, _, seconds in seen)


@pytest.mark.parametrize(
    "text", ["", " ", "x" * 513, "new\nline", "nul\0", "unit\x1fseparator", "\x1b[31m"]
)
def test_strings_that_cannot_be_names_are_refused(server, text):
    with grpc.insecure_channel(server.address) as channel:
        stub = refit_pb2_grpc.RefitServiceStub(channel)
        worker = refit_pb2.WorkerRegistration(
            worker_id=text, model_name="m", role=refit_pb2.WORKER_ROLE_TRAINER
        )
        for call, request in (
            (stub.GetWeightVersion, refit_pb2.GetWeightVersionRequest(uid=text)),
            (
                stub.RegisterWorker,
                refit_pb2.RegisterWorkerRequest(worker=worker, ttl_seconds=1),
            ),
            (
                stub.CreateWeightVersion,
                refit_pb2.CreateWeightVersionRequest(
                    model_name="m",
                    idempotency_key="k",
                    payload_format=1,
                    expected_source_slots=["a", text],
                ),
            ),
        ):
            with pytest.raises(grpc.RpcError) as refusal:
                call(request, timeout=PATIENCE_S)
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_numbers_and_sizes_that_make_no_sense_are_refused(server):
    with grpc.insecure_channel(server.address) as channel:
        stub = refit_pb2_grpc.RefitServiceStub(channel)
        version = {"model_name": "m", "idempotency_key": "k", "expected_source_slots": ["a"]}
        worker = {"worker_id": "w", "model_name": "m"}
        many = [str(n) for n in range(70_000)]
        for call, request in (
            (stub.CreateWeightVersion, refit_pb2.CreateWeightVersionRequest(**version)),
            (
                stub.CreateWeightVersion,
                refit_pb2.CreateWeightVersionRequest(
                    **{**version, "expected_source_slots": many}, payload_format=1
                ),
            ),
            (
                stub.CreateWeightVersion,
                refit_pb2.CreateWeightVersionRequest(**version, payload_format=1, state=9),
            ),
            (stub.RegisterWorker, refit_pb2.RegisterWorkerRequest(worker=worker, ttl_seconds=1)),
            (
                stub.RegisterWorker,
                refit_pb2.RegisterWorkerRequest(worker={**worker, "role": 1}, ttl_seconds=2**31),
            ),
            (stub.CreateWeightVersionShard, refit_pb2.CreateWeightVersionShardRequest()),
        ):
            with pytest.raises(grpc.RpcError) as refusal:
                call(request, timeout=PATIENCE_S)
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_of_leases_and_deletions_at_once_none_crosses(server):
    """Whoever gets a lease finds every shard for as long as it holds the lease."""
    rounds, receivers = 15, 4
    crossed = []
    go = threading.Barrier(receivers + 1)

    def receive(name):
        with ControlClient(server.address) as mine:
            for n in range(rounds):
                go.wait(PATIENCE_S)
                with contextlib.suppress(VersionNotReadyError), mine.lease(f"v{n}", name):
                    found = server.plane.call(
                        lambda state, _, n=n: list(state.ledger.shards.get(f"v{n}", {}))
                    )
                    if len(found) != 2:
                        crossed.append((n, name, found))
                go.wait(PATIENCE_S)

    threads = [threading.Thread(target=receive, args=(f"g{n}",)) for n in range(receivers)]
    for thread in threads:
        thread.start()
    with ControlClient(server.address) as client:
        client.register_worker("w", TRAINER, "m", ttl_s=60)
        for n in range(rounds):
            client.create_version("m", ("a", "b"), idempotency_key=f"{n}", version_id=f"v{n}")
            for slot in ("a", "b"):
                client.create_shard(shard(f"v{n}", slot))
            go.wait(PATIENCE_S)
            client.delete_version(f"v{n}")
            for slot in ("a", "b"):
                until(lambda slot=slot, n=n: deleted(client, f"v{n}", slot))
            go.wait(PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert crossed == []


def deleted(client, uid, slot):
    with contextlib.suppress(VersionLeasedError):
        return client.delete_shard(uid, slot, "w") or True
    return False


# Leases


def test_a_lease_is_renewed_while_it_is_held(server, client):
    uid = publish(client)
    with client.lease(uid, "g", ttl_s=1) as lease:
        first = lease._until
        until(lambda: lease._until > first + 1)
        lease.check()
        assert client.lease(uid, "g", ttl_s=1).lease_id == lease.lease_id
    with pytest.raises(LeaseLostError, match="given back"):
        lease.check()
    assert lease.left_s == 0
    assert server.plane.counts().leases == 0
    lease.close()


def test_a_lease_that_the_control_plane_forgot_is_lost(server, client):
    uid = publish(client)
    with client.lease(uid, "g", ttl_s=1) as lease:
        lease.check()
        server.plane.call(
            lambda state, now_ms: state.delete_lease(uid, lease.lease_id, "g", now_ms=now_ms)
        )
        until(lambda: not lease.left_s)
        # It was given again under another id, with a gap in which the version could go.
        with pytest.raises(LeaseLostError, match="lapsed before it was renewed"):
            lease.check()


def test_a_lease_on_a_version_that_went_away_is_lost(server, client):
    uid = publish(client)
    with client.lease(uid, "g", ttl_s=1) as lease:

        def end(state, now_ms):
            state.delete_lease(uid, lease.lease_id, "g", now_ms=now_ms)
            state.delete_version(uid, now_ms=now_ms)

        server.plane.call(end)
        until(lambda: not lease.left_s)
        with pytest.raises(LeaseLostError, match="needs READY"):
            lease.check()


def test_without_a_control_plane_a_lease_lasts_its_time_and_no_longer(client, server):
    uid = publish(client)
    asked = time.monotonic()
    with client.lease(uid, "g", ttl_s=2) as lease:
        server.close()
        lease.check()
        until(lambda: not lease.left_s)
        assert time.monotonic() - asked >= 2
        with pytest.raises(LeaseLostError, match="not renewed for 2 s"):
            lease.check()


def test_a_lease_and_a_heartbeat_outlast_a_restart_of_the_control_plane(tmp_path):
    path = tmp_path / "state.db"
    first = EmbeddedControlServer(store=SqliteStore(path))
    port = int(first.address.rpartition(":")[2])
    with (
        ControlClient(first.address, rpc_timeout_s=2.0) as client,
        Heartbeat(client, "w", TRAINER, "m", ttl_s=20, on_sigterm=False) as heartbeat,
    ):
        uid = publish(client)
        with client.lease(uid, "g", ttl_s=20) as lease:
            first.close()
            with EmbeddedControlServer(port=port, store=SqliteStore(path)) as second:
                until(lambda: can_read(client, uid))
                renewed = lease._until, heartbeat._until
                until(lambda: lease._until > renewed[0] and heartbeat._until > renewed[1])
                lease.check()
                assert client.get_version(uid).state is VersionState.READY
                assert second.plane.counts().leases == 1


def can_read(client, uid):
    with contextlib.suppress(ControlUnavailableError, RefitTimeoutError):
        return client.get_version(uid)


# Heartbeat and STALE


def test_a_heartbeat_keeps_a_worker_alive_and_says_stale_on_close(server, client):
    with Heartbeat(client, "w", TRAINER, "m", ttl_s=1, on_sigterm=False) as heartbeat:
        uid = client.create_version("m", ["a"], idempotency_key="k").version_id
        client.create_shard(shard(uid))
        first = heartbeat._until
        until(lambda: heartbeat._until > first + 1)
        assert client.get_version(uid).state is VersionState.READY
        assert heartbeat.is_live
        assert heartbeat.error is None
    assert client.get_version(uid).state is VersionState.RELEASING
    assert not heartbeat.is_live
    heartbeat.close()
    with pytest.raises(ControlError, match="said STALE"):
        Heartbeat(client, "w", TRAINER, "m", on_sigterm=False)


def test_a_worker_that_stops_its_heartbeat_takes_its_version_along(client):
    client.register_worker("w", TRAINER, "m", ttl_s=1)
    uid = client.create_version("m", ["a"], idempotency_key="k").version_id
    client.create_shard(shard(uid))
    until(lambda: client.get_version(uid).state is VersionState.RELEASING)
    assert client.list_shards(uid) == []


def test_a_heartbeat_notices_that_it_is_refused(client):
    with Heartbeat(client, "w", TRAINER, "m", ttl_s=1, on_sigterm=False) as heartbeat:
        client.mark_stale("w", TRAINER, "m")
        until(lambda: heartbeat.error is not None)
        assert "said STALE" in str(heartbeat.error)
        assert not heartbeat.is_live


def test_a_heartbeat_without_a_control_plane_says_since_when(client, server):
    with Heartbeat(client, "w", TRAINER, "m", ttl_s=1, on_sigterm=False) as heartbeat:
        server.close()
        until(lambda: not heartbeat.is_live)
        assert isinstance(heartbeat.error, ControlUnavailableError)


@pytest.mark.parametrize("has_p2p", [True, False])
def test_stale_is_said_to_a_server_that_knows_no_such_source_by_a_short_registration(has_p2p):
    registered = []

    class Old(refit_pb2_grpc.RefitServiceServicer, p2p_pb2_grpc.P2pServiceServicer):
        """Answers as a server that has never heard of the source."""

        def RegisterWorker(self, request, context):  # noqa: N802
            registered.append((request.worker.worker_id, request.ttl_seconds))
            return refit_pb2.RegisterWorkerResponse(worker=request.worker)

        def UpdateStatus(self, request, context):  # noqa: N802
            return p2p_pb2.UpdateStatusResponse(success=False, message="unknown")

    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    refit_pb2_grpc.add_RefitServiceServicer_to_server(Old(), server)
    if has_p2p:
        p2p_pb2_grpc.add_P2pServiceServicer_to_server(Old(), server)
    server.start()
    try:
        with ControlClient(f"127.0.0.1:{port}") as client:
            client.mark_stale("w", TRAINER, "m")
        assert registered == [("w", 1)]
    finally:
        server.stop(None).wait(PATIENCE_S)


def test_stale_is_believed_of_the_worker_s_own_model_alone(server, client):
    publish(client)
    request = p2p_pb2.UpdateStatusRequest(
        mx_source_id=refit_source_id("another"),
        worker_id="w",
        status=p2p_pb2.SOURCE_STATUS_STALE,
    )
    with grpc.insecure_channel(server.address) as channel:
        stub = p2p_pb2_grpc.P2pServiceStub(channel)
        assert not stub.UpdateStatus(request, timeout=PATIENCE_S).success
        assert server.plane.counts().workers == {"trainer": 1}
        request.mx_source_id = refit_source_id("m")
        assert stub.UpdateStatus(request, timeout=PATIENCE_S).success
    assert server.plane.counts().workers == {}


def test_a_time_to_live_below_the_protocol_s_unit_is_refused(client):
    with pytest.raises(RefitConfigError, match="at least 1"):
        Heartbeat(client, "w", TRAINER, "m", ttl_s=0.5)


@pytest.fixture
def start(server):
    started = []

    def run(end):
        process = subprocess.Popen(
            [sys.executable, str(PROCESS), server.address, end],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        assert ready
        assert process.stdout.readline() == "live\n", process.stderr.read()
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def is_stale(server):
    worker = server.plane._state.ledger.workers["w"]
    return worker.stale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"), [("wait", -signal.SIGTERM), ("handler", 7), ("busy", -signal.SIGTERM)]
)
def test_sigterm_says_stale_and_then_does_what_it_did_before(server, start, end, status):
    process = start(end)
    assert not is_stale(server)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert is_stale(server)
    assert process.returncode == status
    assert out == ("handled\n" if end == "handler" else "")


@pytest.mark.slow
def test_the_interpreter_s_exit_says_stale(server, start):
    process = start("exit")
    process.communicate("\n", timeout=PATIENCE_S)
    assert process.returncode == 0
    assert is_stale(server)


@pytest.mark.slow
def test_after_close_sigterm_ends_the_process_as_before(server, start):
    process = start("closed")
    assert process.stdout.readline() == "closed\n"
    assert is_stale(server)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_sigterm_is_not_held_up_by_a_control_plane_that_is_gone(server, start):
    process = start("wait")
    server.close()
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGTERM
    assert time.monotonic() - asked < 20


@pytest.mark.slow
def test_a_killed_worker_is_dead_after_its_time_to_live_and_not_before(tmp_path):
    with EmbeddedControlServer(limits=Limits()) as server, ControlClient(server.address) as client:
        process = subprocess.Popen(
            [sys.executable, str(PROCESS), server.address, "wait"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout.readline() == "live\n"
            uid = client.create_version("m", ["a"], idempotency_key="k").version_id
            assert client.create_shard(shard(uid)).state is VersionState.READY
            os.kill(process.pid, signal.SIGKILL)
            process.wait(PATIENCE_S)
            # The next registration that it would have made is a short one, made for it here.
            client.register_worker("w", TRAINER, "m", ttl_s=1)
            assert client.get_version(uid).state is VersionState.READY
            until(lambda: client.get_version(uid).state is VersionState.RELEASING)
        finally:
            process.kill()
            process.wait(PATIENCE_S)
