"""Heartbeats, STALE and SIGTERM, against a real server in this process."""

import os
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from control_clients import PATIENCE_S, TRAINER, publish, shard, until

from refit_mx.control import (
    ControlClient,
    EmbeddedControlServer,
    Heartbeat,
    Limits,
    VersionState,
)
from refit_mx.control.protocol import (
    p2p_pb2,
    p2p_pb2_grpc,
    refit_pb2,
    refit_pb2_grpc,
    refit_source_id,
)
from refit_mx.errors import (
    ControlError,
    ControlUnavailableError,
    RefitConfigError,
)

PROCESS = Path(__file__).with_name("control_process.py")


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


def test_a_heartbeat_goes_on_where_a_process_has_more_than_a_thousand_descriptors(
    client, many_descriptors
):
    with Heartbeat(client, "w", TRAINER, "m", ttl_s=1, on_sigterm=False) as heartbeat:
        assert heartbeat._woken.fileno() >= many_descriptors
        first = heartbeat._until
        until(lambda: heartbeat._until > first)
    assert not heartbeat._thread.is_alive()


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
