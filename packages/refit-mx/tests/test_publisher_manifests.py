"""Manifests are served as by ModelExpress's workers, and accepted only with a matching digest.

These tests use internals: the service speaks ModelExpress's protocol to any client.
"""

from __future__ import annotations

import socket
import threading

import grpc
import pytest
from control_clients import until

from refit_mx import Deadline, ProtocolError, RefitConfigError, SourceLostError
from refit_mx.control.protocol import refit_pb2, refit_pb2_grpc
from refit_mx.receive import manifests
from refit_mx.receive.manifests import request_manifest
from refit_mx.source import manifest_service
from refit_mx.source.manifest_service import ManifestService, manifest_digest

DATA = b"a manifest is opaque here"


@pytest.fixture
def service():
    running = ManifestService()
    yield running
    running.close()


def fetch(endpoint, digest, *, timeout_s=5.0):
    deadline = Deadline(timeout_s, "a test")
    return request_manifest(endpoint, "v1", "fsdp-0", digest=digest, deadline=deadline)


def test_modelexpress_stub_fetches_the_manifest(service):
    digest = service.put("v1", "fsdp-0", DATA)
    with grpc.insecure_channel(service.endpoint) as channel:
        answer = refit_pb2_grpc.RefitWorkerServiceStub(channel).GetWeightVersionShardManifest(
            refit_pb2.GetWeightVersionShardManifestRequest(
                version_id="v1", source_slot_id="fsdp-0"
            ),
            timeout=5,
        )
    assert (answer.manifest, answer.manifest_digest) == (DATA, digest)


def test_manifest_with_another_digest_is_refused(service):
    service.put("v1", "fsdp-0", DATA)
    with pytest.raises(ProtocolError, match="the control plane has"):
        fetch(service.endpoint, manifest_digest(b"another"))


def test_dropped_manifest_is_not_served(service):
    digest = service.put("v1", "fsdp-0", DATA)
    service.drop("v1", "fsdp-0")
    service.drop("v1", "fsdp-0")
    with pytest.raises(SourceLostError, match="NOT_FOUND"):
        fetch(service.endpoint, digest)


def test_too_large_manifest_is_refused_by_the_service(service, monkeypatch):
    monkeypatch.setattr(manifest_service, "MAX_MANIFEST_BYTES", 1 << 20)
    with pytest.raises(RefitConfigError, match="expected at most"):
        service.put("v1", "fsdp-0", bytes((1 << 20) + 1))


def test_too_large_manifest_is_refused_by_the_receiver(service, monkeypatch):
    monkeypatch.setattr(manifests, "MAX_MANIFEST_BYTES", 1000)
    digest = service.put("v1", "fsdp-0", bytes(1 << 20))
    with pytest.raises(ProtocolError, match="too large"):
        fetch(service.endpoint, digest)


def test_missing_service_is_reported_at_once():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SourceLostError, match="UNAVAILABLE"):
            fetch(endpoint, manifest_digest(DATA))


def test_silent_service_takes_no_more_than_its_timeout():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SourceLostError, match="DEADLINE_EXCEEDED"):
            fetch(endpoint, manifest_digest(DATA), timeout_s=0.3)


def test_service_that_cannot_listen_leaves_no_thread(service):
    threads = set(threading.enumerate())
    port = int(service.endpoint.rpartition(":")[2])
    with pytest.raises(RefitConfigError, match="cannot be served"):
        ManifestService(port=port)
    until(lambda: set(threading.enumerate()) <= threads)
