"""A publisher that answered is asked for its next manifest over a connection that stays."""

from __future__ import annotations

import socket
from contextlib import closing

import msgspec
import pytest
from refit_fixtures import a_world, zeros
from refit_processes import same, weights

from refit_mx import known_sources
from refit_mx.deadline import Deadline
from refit_mx.known_sources import KnownSources
from refit_mx.manifest_service import ManifestClient
from refit_mx.settings import ReceiverSettings

MOST_BYTES = 1 << 20


@pytest.fixture
def world():
    with a_world(retention=100) as made:
        yield made


@pytest.fixture
def called(monkeypatch):
    """The publishers that were called over gRPC."""
    endpoints = []
    connected = ManifestClient._connected

    def connecting(client, endpoint):
        endpoints.append(endpoint)
        return connected(client, endpoint)

    monkeypatch.setattr(ManifestClient, "_connected", connecting)
    return endpoints


def refit(world, receiver, version):
    """Publish and install it."""
    live = zeros()
    world.version(version)
    number = int(version[1:])
    world.publishers[0].publish(version, weights(number))
    receiver.refit(version, live)
    return same(live, weights(number))


@pytest.fixture
def publisher(world):
    world.publishers = [world.publisher()]
    return world.publishers[0]


def test_only_the_first_manifest_comes_over_grpc(world, publisher, called):
    receiver = world.receiver()
    assert all(refit(world, receiver, f"v{number}") for number in range(1, 5))
    assert called == [publisher._manifests.endpoint]


def test_a_manifest_that_is_not_the_one_that_the_control_plane_names_is_asked_for_again(
    world, publisher, called
):
    receiver = world.receiver()
    assert refit(world, receiver, "v1")
    world.version("v2")
    publisher.publish("v2", weights(2))
    publisher._server._held["v2"].manifest = b"another"
    live = zeros()
    receiver.refit("v2", live)
    assert same(live, weights(2))
    assert len(called) == 2


def test_a_publisher_that_is_another_by_now_is_asked_anew(world, publisher, called):
    receiver = world.receiver()
    assert refit(world, receiver, "v1")
    publisher.close()
    world.publishers = [world.publisher()]
    assert refit(world, receiver, "v2")
    assert refit(world, receiver, "v3")
    assert len(called) == 2


def test_one_that_closed_the_connection_is_connected_to_again(world, publisher, called):
    receiver = world.receiver()
    assert refit(world, receiver, "v1")
    assert refit(world, receiver, "v2")
    for connection in list(publisher._server._listener.connections):
        connection.end()
    assert refit(world, receiver, "v3")
    assert len(called) == 1


def test_a_connection_of_long_ago_is_not_trusted(world, publisher, called, monkeypatch):
    monkeypatch.setattr(known_sources, "_KEPT_S", 0.0)
    receiver = world.receiver()
    assert all(refit(world, receiver, f"v{number}") for number in range(1, 4))
    assert len(called) == 1


def test_one_that_does_not_answer_costs_no_more_than_its_share(world, publisher, called):
    receiver = world.receiver(settings=ReceiverSettings(manifest_timeout_s=0.6))
    assert refit(world, receiver, "v1")
    world.version("v2")
    publisher.publish("v2", weights(2))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        known = receiver._receiving._manifests.known
        [client] = [client for client, _ in known._sources.values()]
        client.close()
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        client._source = msgspec.structs.replace(client._source, endpoint=at)
        live = zeros()
        receiver.refit("v2", live)
    assert same(live, weights(2))
    assert len(called) == 2


def test_what_is_remembered_is_who_it_is(world, publisher):
    world.version("v1")
    manifest = publisher.publish("v1", weights(1))
    with closing(KnownSources(MOST_BYTES)) as known:
        known.remember("here", manifest)
        [(client, _)] = known._sources.values()
        assert len(client._source.encode()) < len(manifest.encode())
        assert (client._source.table, client._source.digests) == (b"", b"")
        encoded = known.manifest("here", "v1", Deadline(10, "test"))
        assert publisher._manifests._manifests["v1", "fsdp-0"][0] == encoded
        assert known.manifest("elsewhere", "v1", Deadline(10, "test")) is None
        assert known.manifest("here", "v9", Deadline(10, "test")) is None
        assert known._sources == {}


def test_the_oldest_of_too_many_is_forgotten(world, publisher, monkeypatch):
    monkeypatch.setattr(known_sources, "_MOST_KEPT", 2)
    world.version("v1")
    manifest = publisher.publish("v1", weights(1))
    with closing(KnownSources(MOST_BYTES)) as known:
        for endpoint in "abc":
            known.remember(endpoint, manifest)
        assert list(known._sources) == ["b", "c"]
