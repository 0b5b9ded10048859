"""A receiver's cached data about its sources saves calls and is always verified.

These tests use internals: the saved calls, and answers that a correct source never gives.
"""

import hashlib
import socket

import msgspec
import pytest
from refit_fixtures import TRANSPORTS, zeros
from refit_processes import same, weights
from transport_processes import soon

from refit_mx import (
    ProtocolError,
    ReceiverSettings,
    SourceLostError,
    discover_v2_sources_for_slice,
)
from refit_mx.manifest.format import Structure
from refit_mx.receive import manifests, source_cache
from refit_mx.receive.source_cache import SourceCache
from refit_mx.transports.source_client import SourceClient


@pytest.fixture
def calls(monkeypatch):
    """Record the endpoints that are called over gRPC."""
    endpoints = []
    call = manifests._call

    def calling(endpoint, *arguments):
        endpoints.append(endpoint)
        return call(endpoint, *arguments)

    monkeypatch.setattr(manifests, "_call", calling)
    return endpoints


@pytest.fixture
def structures(monkeypatch):
    """Record the versions whose structures are requested.

    Manifests are sent without their structure, like those of large models.
    """
    monkeypatch.setattr("refit_mx.source.publisher._BRIEF_BYTES", 1)
    versions = []
    get = SourceClient.get

    def asking(client, what, *, version_id, **settings):
        if what == "structure":
            versions.append(version_id)
        return get(client, what, version_id=version_id, **settings)

    monkeypatch.setattr(SourceClient, "get", asking)
    return versions


def refit(world, receiver, number, *publishers, state=None):
    """Publish a version and install it exactly."""
    version, live = f"v{number}", zeros()
    if len(publishers) > 1:
        state = world.publish(publishers, version, number)
    else:
        world.version(version)
        state = state or weights(number)
        publishers[0].publish(version, state)
    receiver.refit(version, live)
    assert same(live, {name: state[name] for name in live})


def test_only_the_first_manifest_is_fetched_over_grpc(world, calls):
    publisher, receiver = world.publisher(), world.receiver()
    for number in range(1, 5):
        refit(world, receiver, number, publisher)
    assert calls == [publisher._manifests.endpoint]


def test_manifest_with_another_digest_is_fetched_again(world, calls):
    publisher, receiver = world.publisher(), world.receiver()
    refit(world, receiver, 1, publisher)
    world.version("v2")
    publisher.publish("v2", weights(2))
    publisher._server._held["v2"].stored["manifest"] = b"another"
    live = zeros()
    receiver.refit("v2", live)
    assert same(live, weights(2))
    assert len(calls) == 2


def test_manifest_of_a_restarted_publisher_is_fetched_again(world, calls):
    receiver = world.receiver()
    former = world.publisher()
    refit(world, receiver, 1, former)
    former.close()
    publisher = world.publisher()
    refit(world, receiver, 2, publisher)
    refit(world, receiver, 3, publisher)
    assert len(calls) == 2


def test_closed_connection_is_reopened(world, calls):
    publisher, receiver = world.publisher(), world.receiver()
    refit(world, receiver, 1, publisher)
    refit(world, receiver, 2, publisher)
    for connection in list(publisher._server._listener.connections):
        connection.end()
    refit(world, receiver, 3, publisher)
    assert len(calls) == 1


def test_long_idle_connection_is_reopened(world, calls, monkeypatch):
    monkeypatch.setattr(source_cache, "_MAX_IDLE_S", 0.0)
    publisher, receiver = world.publisher(), world.receiver()
    for number in range(1, 4):
        refit(world, receiver, number, publisher)
    assert len(calls) == 1


def test_silent_connection_takes_half_of_the_timeout(world, calls):
    publisher = world.publisher()
    receiver = world.receiver(settings=ReceiverSettings(manifest_timeout_s=0.6))
    refit(world, receiver, 1, publisher)
    world.version("v2")
    publisher.publish("v2", weights(2))
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        [(client, _)] = receiver._receiving._cache._clients.values()
        client.close()
        endpoint = f"127.0.0.1:{silent.getsockname()[1]}"
        client._source = msgspec.structs.replace(client._source, endpoint=endpoint)
        live = zeros()
        receiver.refit("v2", live)
    assert same(live, weights(2))
    assert len(calls) == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_structure_of_a_layout_is_sent_once(structures, world, transport):
    publishers = [world.publisher(f"fsdp-{rank}", transports=[transport]) for rank in range(2)]
    receiver = world.receiver(transport=transport)
    for number in range(1, 4):
        refit(world, receiver, number, *publishers)
    assert structures == ["v1", "v1"]


def test_structure_of_another_layout_replaces_the_former(structures, world):
    publisher, receiver = world.publisher(), world.receiver()
    refit(world, receiver, 1, publisher)
    refit(world, receiver, 2, publisher, state={"extra": weights(1)["embed"], **weights(2)})
    assert structures == ["v1", "v2"]
    assert len(receiver._receiving._cache._structures) == 1


def test_structure_outlives_its_source(structures, world):
    receiver = world.receiver()
    for number in (1, 2):
        with world.publisher() as publisher:
            refit(world, receiver, number, publisher)
    assert structures == ["v1"]


def test_structure_with_another_digest_leaves_its_source_out(structures, world):
    publisher = world.publish_state("v1", weights(1))
    held = publisher._server._held["v1"]
    true, held.stored["structure"] = held.stored["structure"], b"another"
    with pytest.raises(SourceLostError, match="structure of version 'v1' does not match"):
        discover_v2_sources_for_slice(world.control, "v1", deadline=soon())
    held.stored["structure"] = true
    (manifest,) = discover_v2_sources_for_slice(world.control, "v1", deadline=soon()).manifests
    assert Structure(manifest.table_digest, manifest.table, manifest.shards).encode() == true


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", bytes(100)])
def test_garbage_is_no_structure(data):
    with pytest.raises(ProtocolError, match="structure of a manifest"):
        Structure.decode(data)


def test_forged_table_digest_does_not_mix_tables(structures, world):
    all_publishers = [world.publisher(f"fsdp-{rank}") for rank in range(3)]
    world.publish(all_publishers, "v1", 1)
    publishers = all_publishers[1:]  # the first one has one more tensor
    cache = SourceCache()
    brief = [publisher._held["v1"].manifest.brief() for publisher in publishers]
    first, second = (cache._completed(manifest, soon()) for manifest in brief)
    assert first.table is second.table
    stored = publishers[1]._server._held["v1"].stored
    stored["structure"] = msgspec.structs.replace(
        Structure.decode(stored["structure"]), table=b"another"
    ).encode()
    forged = msgspec.structs.replace(
        brief[1], structure_digest=hashlib.sha256(stored["structure"]).digest()
    )
    assert cache._completed(forged, soon()).table == b"another"
