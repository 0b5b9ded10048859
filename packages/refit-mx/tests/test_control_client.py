"""The calls of the client, against a real server in this process.

ModelExpress's protobuf modules are imported as the package does, without NIXL.
So internals are imported.
"""

import socket
import threading
import time

import grpc
import pytest
from control_clients import TIMEOUT_S, TRAINER, publish, shard

from refit_mx import (
    ControlClient,
    ControlError,
    ControlUnavailableError,
    Deadline,
    EmbeddedControlServer,
    RefitConfigError,
    RefitTimeoutError,
    VersionLeasedError,
    VersionNotFoundError,
    VersionNotReadyError,
)
from refit_mx.control import VersionState
from refit_mx.control.protocol import refit_pb2, refit_pb2_grpc


def test_version_moves_from_staging_to_ready_to_releasing(client):
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


def test_timed_out_wait_names_the_missing_slots(client):
    slots = [f"fsdp-{n}" for n in range(8)]
    client.register_worker("w", TRAINER, "m", ttl_s=60)
    uid = client.create_version("m", slots, idempotency_key="k").version_id
    client.create_shard(shard(uid, "fsdp-0"))
    with pytest.raises(RefitTimeoutError, match=r"7 of 8 slots .*: 'fsdp-1', 'fsdp-2'"):
        client.wait_ready(uid, Deadline(0.2, "v"))
    with pytest.raises(VersionNotFoundError):
        client.wait_ready("x", Deadline(5, "v"))


def test_waiting_ends_when_the_last_slot_is_filled(client, server):
    client.register_worker("w", TRAINER, "m", ttl_s=60)
    uid = client.create_version("m", ["a"], idempotency_key="k").version_id
    ready = []
    waiter = threading.Thread(
        target=lambda: ready.append(client.wait_ready(uid, Deadline(TIMEOUT_S, "v")))
    )
    waiter.start()
    client.create_shard(shard(uid))
    waiter.join(TIMEOUT_S)
    assert [version.state for version in ready] == [VersionState.READY]


def test_missing_server_is_unavailable_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with ControlClient(address) as client:
        with pytest.raises(ControlUnavailableError, match=address):
            client.get_version("v")
        with pytest.raises(RefitTimeoutError, match="does not answer"):
            client.wait_ready("v", Deadline(0.3, "v"))
    with pytest.raises(ControlUnavailableError, match="closed"):
        client.get_version("v")


def test_silent_server_is_a_timeout():
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
def test_invalid_options_are_refused(wrong):
    with pytest.raises(RefitConfigError):
        ControlClient(**{"address": "127.0.0.1:1", **wrong})


def test_second_server_on_an_address_is_refused(server):
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(RefitConfigError, match="cannot listen"):
        EmbeddedControlServer(port=port)


def test_embedded_server_asks_for_its_token():
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
        time.sleep(0.05)  # an answer that does not wait for the observer comes first
        seen.append(call)

    token = "one-that-other-tests-do-not-have-0123456789"  # other tests may still call this port
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


TEXTS = ["", " ", "x" * 513, "new\nline", "nul\0", "unit\x1fseparator", "\x1b[31m"]
VERSION = {"model_name": "m", "idempotency_key": "k", "expected_source_slots": ["a"]}
WORKER = {"worker_id": "w", "model_name": "m"}
MANY = [str(number) for number in range(70_000)]
WRONG = [
    *(("GetWeightVersion", {"uid": text}) for text in TEXTS),
    *(
        ("RegisterWorker", {"worker": {**WORKER, "worker_id": text, "role": 1}, "ttl_seconds": 1})
        for text in TEXTS
    ),
    *(
        (
            "CreateWeightVersion",
            {**VERSION, "payload_format": 1, "expected_source_slots": ["a", text]},
        )
        for text in TEXTS
    ),
    ("CreateWeightVersion", VERSION),
    ("CreateWeightVersion", {**VERSION, "expected_source_slots": MANY, "payload_format": 1}),
    ("CreateWeightVersion", {**VERSION, "payload_format": 1, "state": 9}),
    ("RegisterWorker", {"worker": WORKER, "ttl_seconds": 1}),
    ("RegisterWorker", {"worker": {**WORKER, "role": 1}, "ttl_seconds": 2**31}),
    ("CreateWeightVersionShard", {}),
]


def test_malformed_requests_are_refused(server):
    with grpc.insecure_channel(server.address) as channel:
        stub = refit_pb2_grpc.RefitServiceStub(channel)
        for method, fields in WRONG:
            request = getattr(refit_pb2, f"{method}Request")(**fields)
            with pytest.raises(grpc.RpcError) as refusal:
                getattr(stub, method)(request, timeout=TIMEOUT_S)
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method


def test_unknown_payload_format_is_named(server):
    request = refit_pb2.CreateWeightVersionRequest(**VERSION, payload_format=9)
    with grpc.insecure_channel(server.address) as channel:
        stub = refit_pb2_grpc.RefitServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refusal:
            stub.CreateWeightVersion(request, timeout=TIMEOUT_S)
    assert "payload_format 9; expected" in refusal.value.details()
