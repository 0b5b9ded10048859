"""The calls of the client, against a real server in this process."""

import socket
import threading
import time

import grpc
import pytest
from control_clients import PATIENCE_S, TRAINER, publish, shard

from refit_mx.control import (
    ControlClient,
    EmbeddedControlServer,
    VersionState,
)
from refit_mx.control.protocol import (
    refit_pb2,
    refit_pb2_grpc,
)
from refit_mx.deadline import Deadline
from refit_mx.errors import (
    ControlError,
    ControlUnavailableError,
    RefitConfigError,
    RefitTimeoutError,
    VersionLeasedError,
    VersionNotFoundError,
    VersionNotReadyError,
)


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


def test_calls_are_observed_before_they_are_answered():
    seen = []

    def observe(*call):
        time.sleep(0.05)  # so that an answer that does not wait for it comes first
        seen.append(call)

    token = "one-that-other-tests-do-not-have-0123456789"  # others may still ask for this port
    with (
        EmbeddedControlServer(observe=observe, token=token) as server,
        ControlClient(server.address, token=token) as client,
    ):
        publish(client)
        with pytest.raises(VersionNotFoundError):
            client.get_version("x")
        seen_by_then = list(seen)
    assert [call[:2] for call in seen_by_then] == [
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
