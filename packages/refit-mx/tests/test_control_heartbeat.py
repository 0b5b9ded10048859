"""Heartbeats, STALE and SIGTERM, against a real server in this process.

ModelExpress's protobuf modules are imported as the package does, without NIXL.
So internals are imported.
"""

import contextlib
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from control_clients import TIMEOUT_S, TRAINER, publish, shard, until

from refit_mx import ControlClient, ControlError, RefitConfigError
from refit_mx.control import Heartbeat, VersionState
from refit_mx.control.protocol import (
    p2p_pb2,
    p2p_pb2_grpc,
    refit_pb2,
    refit_pb2_grpc,
    refit_source_id,
)

PROCESS = Path(__file__).with_name("control_process.py")


def expiry(server):
    return server.plane._state.ledger.workers["w"].expires_at_ms


def test_heartbeat_keeps_a_worker_alive_until_close(server, client):
    with Heartbeat(client, "w", TRAINER, "m", ttl_s=3, on_sigterm=False) as heartbeat:
        uid = client.create_version("m", ["a"], idempotency_key="k").version_id
        client.create_shard(shard(uid))
        first = expiry(server)
        until(lambda: expiry(server) > first + 1000)
        assert client.get_version(uid).state is VersionState.READY
    assert client.get_version(uid).state is VersionState.RELEASING
    heartbeat.close()
    with pytest.raises(ControlError, match="is STALE"):
        Heartbeat(client, "w", TRAINER, "m", on_sigterm=False)


def test_heartbeat_works_with_descriptors_above_1024(server, client, many_descriptors):
    with Heartbeat(client, "w", TRAINER, "m", ttl_s=1, on_sigterm=False) as heartbeat:
        assert heartbeat._stop_reader.fileno() >= many_descriptors
        first = expiry(server)
        until(lambda: expiry(server) > first)
    assert not heartbeat._thread.is_alive()


def test_version_of_a_worker_without_heartbeat_is_released(client):
    client.register_worker("w", TRAINER, "m", ttl_s=1)
    uid = client.create_version("m", ["a"], idempotency_key="k").version_id
    client.create_shard(shard(uid))
    until(lambda: client.get_version(uid).state is VersionState.RELEASING)
    assert client.list_shards(uid) == []


@contextlib.contextmanager
def serving(servicer, *adders):
    """Run a gRPC server with a test's servicer; yield a client of it."""
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    for add in adders:
        add(servicer, server)
    server.start()
    try:
        with ControlClient(f"127.0.0.1:{port}") as client:
            yield client
    finally:
        server.stop(None).wait(TIMEOUT_S)


def test_hanging_renewal_is_retried_before_the_worker_expires():
    limits_s, release = [], threading.Event()

    class Hanging(refit_pb2_grpc.RefitServiceServicer):
        """A server that answers every registration but the second."""

        def RegisterWorker(self, request, context):  # noqa: N802
            limits_s.append(context.time_remaining())
            if len(limits_s) == 2:
                release.wait(TIMEOUT_S)
            return refit_pb2.RegisterWorkerResponse(worker=request.worker)

    ttl_s = 3
    with serving(Hanging(), refit_pb2_grpc.add_RefitServiceServicer_to_server) as client:
        try:
            with Heartbeat(client, "w", TRAINER, "m", ttl_s=ttl_s, on_sigterm=False):
                until(lambda: len(limits_s) == 3)
        finally:
            release.set()
    assert limits_s[1] < ttl_s / 2


@pytest.mark.parametrize("has_p2p", [True, False])
def test_mark_stale_works_on_servers_without_the_source(has_p2p):
    registered = []

    class Old(refit_pb2_grpc.RefitServiceServicer, p2p_pb2_grpc.P2pServiceServicer):
        """A server that does not know the source."""

        def RegisterWorker(self, request, context):  # noqa: N802
            registered.append((request.worker.worker_id, request.ttl_seconds))
            return refit_pb2.RegisterWorkerResponse(worker=request.worker)

        def UpdateStatus(self, request, context):  # noqa: N802
            return p2p_pb2.UpdateStatusResponse(success=False, message="unknown")

    adders = [refit_pb2_grpc.add_RefitServiceServicer_to_server]
    if has_p2p:
        adders.append(p2p_pb2_grpc.add_P2pServiceServicer_to_server)
    with serving(Old(), *adders) as client:
        client.mark_stale("w", TRAINER, "m")
    assert registered == [("w", 1)]


def test_stale_is_accepted_only_for_the_workers_model(server, client):
    publish(client)
    request = p2p_pb2.UpdateStatusRequest(
        mx_source_id=refit_source_id("another"),
        worker_id="w",
        status=p2p_pb2.SOURCE_STATUS_STALE,
    )
    with grpc.insecure_channel(server.address) as channel:
        stub = p2p_pb2_grpc.P2pServiceStub(channel)
        assert not stub.UpdateStatus(request, timeout=TIMEOUT_S).success
        assert server.plane.counts().workers == {"trainer": 1}
        request.mx_source_id = refit_source_id("m")
        assert stub.UpdateStatus(request, timeout=TIMEOUT_S).success
    assert server.plane.counts().workers == {}


def test_time_to_live_below_one_second_is_refused(client):
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
        ready, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        assert ready
        assert process.stdout.readline() == "live\n", process.stderr.read()
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def is_stale(server):
    return server.plane._state.ledger.workers["w"].stale


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status"), [("wait", -signal.SIGTERM), ("handler", 7), ("busy", -signal.SIGTERM)]
)
def test_sigterm_marks_stale_and_runs_the_earlier_handler(server, start, end, status):
    process = start(end)
    assert not is_stale(server)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=TIMEOUT_S)
    assert is_stale(server)
    assert process.returncode == status
    assert out == ("handled\n" if end == "handler" else "")


@pytest.mark.slow
def test_exit_of_the_interpreter_marks_stale(server, start):
    process = start("exit")
    process.communicate("\n", timeout=TIMEOUT_S)
    assert process.returncode == 0
    assert is_stale(server)


@pytest.mark.slow
def test_sigterm_after_close_ends_the_process(server, start):
    process = start("closed")
    assert process.stdout.readline() == "closed\n"
    assert is_stale(server)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_sigterm_is_not_delayed_by_a_missing_control_plane(server, start):
    process = start("wait")
    server.close()
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == -signal.SIGTERM
    assert time.monotonic() - started < 20
