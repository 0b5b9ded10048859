"""Manifests are handed out as ModelExpress's workers do it, and believed only when they match."""

from __future__ import annotations

import socket
from contextlib import closing

import grpc
import pytest

from refit_mx.control.messages import refit_pb2, refit_pb2_grpc
from refit_mx.deadline import Deadline
from refit_mx.errors import ProtocolError, RefitConfigError, RefitTimeoutError, SourceLostError
from refit_mx.manifest_service import ManifestClient, ManifestService, manifest_digest

DATA = b"a manifest is opaque here"


@pytest.fixture
def service():
    made = ManifestService(most_bytes=1 << 20)
    yield made
    made.close()


def fetch(endpoint, digest, *, version="v1", most_s=5.0, most_bytes=1 << 20):
    with closing(ManifestClient(most_bytes)) as client:
        return asked(client, endpoint, digest, version=version, most_s=most_s)


def asked(client, endpoint, digest, *, version="v1", most_s=5.0):
    return client.fetch(
        endpoint,
        version,
        "fsdp-0",
        digest=digest,
        deadline=Deadline(30, "a test"),
        most_s=most_s,
    )


def test_a_manifest_is_fetched_as_it_was_put(service):
    digest = service.put("v1", "fsdp-0", DATA)
    assert fetch(service.endpoint, digest) == DATA


def test_modelexpress_own_stub_finds_it(service):
    digest = service.put("v1", "fsdp-0", DATA)
    with grpc.insecure_channel(service.endpoint) as channel:
        answer = refit_pb2_grpc.RefitWorkerServiceStub(channel).GetWeightVersionShardManifest(
            refit_pb2.GetWeightVersionShardManifestRequest(
                version_id="v1", source_slot_id="fsdp-0"
            ),
            timeout=5,
        )
    assert (answer.manifest, answer.manifest_digest) == (DATA, digest)


def test_another_manifest_than_the_control_plane_names_is_refused(service):
    service.put("v1", "fsdp-0", DATA)
    with pytest.raises(ProtocolError, match="the control plane names"):
        fetch(service.endpoint, manifest_digest(b"another"))


def test_a_version_that_is_not_served_is_lost(service):
    with pytest.raises(SourceLostError, match="NOT_FOUND"):
        fetch(service.endpoint, manifest_digest(DATA))


def test_a_dropped_manifest_is_served_no_more(service):
    digest = service.put("v1", "fsdp-0", DATA)
    service.drop("v1", "fsdp-0")
    service.drop("v1", "fsdp-0")
    with pytest.raises(SourceLostError, match="NOT_FOUND"):
        fetch(service.endpoint, digest)


def test_a_version_cannot_get_another_manifest(service):
    service.put("v1", "fsdp-0", DATA)
    service.put("v1", "fsdp-0", DATA)
    with pytest.raises(RefitConfigError, match="another manifest"):
        service.put("v1", "fsdp-0", b"changed")


def test_a_manifest_beyond_the_bound_is_refused_where_it_is_put(service):
    with pytest.raises(RefitConfigError, match="expected at most"):
        service.put("v1", "fsdp-0", bytes((1 << 20) + 1))


def test_a_manifest_of_the_largest_size_travels(service):
    data = bytes(1 << 20)
    assert fetch(service.endpoint, service.put("v1", "fsdp-0", data)) == data


def test_a_manifest_beyond_the_receivers_bound_is_refused(service):
    digest = service.put("v1", "fsdp-0", bytes(1 << 20))
    with pytest.raises(ProtocolError, match="too large"):
        fetch(service.endpoint, digest, most_bytes=1000)


def test_nobody_there_is_told_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SourceLostError, match="UNAVAILABLE"):
            fetch(endpoint, manifest_digest(DATA))


def test_one_that_never_answers_costs_no_more_than_its_share():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SourceLostError, match="DEADLINE_EXCEEDED"):
            fetch(endpoint, manifest_digest(DATA), most_s=0.3)


def test_a_deadline_that_has_passed_is_not_a_lost_source(service):
    deadline = Deadline(1e-9, "a test")
    while deadline.left_s:
        pass
    with pytest.raises(RefitTimeoutError), closing(ManifestClient()) as client:
        client.fetch(service.endpoint, "v1", "fsdp-0", digest="00", deadline=deadline, most_s=5.0)


def test_two_services_never_share_a_port(service):
    port = int(service.endpoint.rpartition(":")[2])
    with pytest.raises(RefitConfigError, match="cannot be served"):
        ManifestService(port=port)
