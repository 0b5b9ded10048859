"""What does not change from version to version is asked for once, and believed by its digest."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from refit_fixtures import TRANSPORTS, a_world, zeros
from refit_processes import same, weights

from refit_mx.deadline import Deadline
from refit_mx.discovery import discover_v2_sources_for_slice
from refit_mx.errors import ProtocolError, SourceLostError
from refit_mx.manifest import Manifest, Structure
from refit_mx.source_client import SourceClient
from refit_mx.structures import Structures


@pytest.fixture
def world(monkeypatch):
    """Whose manifests travel in brief, as those of large models do."""
    monkeypatch.setattr("refit_mx.publisher._BRIEF_BYTES", 1)
    with a_world(retention=100) as made:
        yield made


@pytest.fixture
def asked(monkeypatch):
    """The versions of which structures were asked for."""
    versions = []
    structure = SourceClient.structure

    def asking(client, *, version_id, **kept):
        versions.append(version_id)
        return structure(client, version_id=version_id, **kept)

    monkeypatch.setattr(SourceClient, "structure", asking)
    return versions


def soon() -> Deadline:
    return Deadline(30, "test")


def briefly(manifest: Manifest) -> Manifest:
    """As it arrives."""
    found = Manifest.decode(manifest.brief().encode())
    assert found.in_brief
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_versions_of_one_structure_are_received_exactly_and_it_travels_once(
    world, asked, transport
):
    publishers = [world.publisher(f"fsdp-{rank}", transports=[transport]) for rank in range(2)]
    receiver = world.receiver(transport=transport)
    live = zeros()
    for number in range(1, 4):
        whole = world.publish(publishers, f"v{number}", number)
        receiver.refit(f"v{number}", live)
        assert same(live, whole)
    assert asked == ["v1", "v1"]


def test_a_small_manifest_is_not_asked_for_twice(asked):
    with a_world() as world:
        publisher = world.publisher()
        world.version("v1")
        publisher.publish("v1", weights(1))
        live = zeros()
        world.receiver().refit("v1", live)
        assert same(live, weights(1))
    assert asked == []


def test_another_layout_is_asked_for_and_the_former_one_forgotten(world, asked):
    publisher = world.publisher()
    receiver = world.receiver()
    for number, state in enumerate((weights(1), {"extra": weights(1)["embed"], **weights(2)}), 1):
        world.version(f"v{number}")
        publisher.publish(f"v{number}", state)
        live = zeros()
        receiver.refit(f"v{number}", live)
        assert same(live, {name: state[name] for name in live})
    assert asked == ["v1", "v2"]
    assert len(receiver._receiving._manifests.structures._kept) == 1


def test_a_source_that_restarted_with_the_same_layout_is_not_asked_again(world, asked):
    receiver = world.receiver()
    for number in (1, 2):
        publisher = world.publisher()
        world.version(f"v{number}")
        publisher.publish(f"v{number}", weights(number))
        live = zeros()
        receiver.refit(f"v{number}", live)
        assert same(live, weights(number))
        publisher.close()
    assert asked == ["v1"]


def test_a_structure_that_is_not_the_one_of_the_manifest_leaves_its_source_out(world):
    publisher = world.publisher()
    world.version("v1")
    publisher.publish("v1", weights(1))
    held = publisher._server._held["v1"]
    true, held.structure = held.structure, b"another"
    with pytest.raises(SourceLostError, match="structure of version 'v1' is not the one"):
        discover_v2_sources_for_slice(world.control, "v1", deadline=soon())
    held.structure = true
    (found,) = discover_v2_sources_for_slice(world.control, "v1", deadline=soon()).manifests
    assert Structure(found.table_digest, found.table, found.shards).encode() == true


def test_a_structure_larger_than_allowed_or_of_a_version_that_is_gone_is_refused(world):
    publisher = world.publisher()
    world.version("v1")
    manifest = briefly(publisher.publish("v1", weights(1)))
    with pytest.raises(ProtocolError, match="announced"):
        Structures(-(4 << 20)).complete(manifest, soon())
    whole = Structures(1 << 20).complete(manifest, soon())
    assert not whole.in_brief
    assert Structures(1 << 20).complete(whole, soon()) is whole
    publisher.release("v1")
    with pytest.raises(SourceLostError, match="not held"):
        Structures(1 << 20).complete(manifest, soon())


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", bytes(100)])
def test_garbage_is_no_structure(data):
    with pytest.raises(ProtocolError, match="structure of a manifest"):
        Structure.decode(data)


def test_equal_tables_are_kept_once_and_forged_digests_do_not_mix_them(world):
    everybody = [world.publisher(f"fsdp-{rank}") for rank in range(3)]
    world.publish(everybody, "v1", 1)
    publishers = everybody[1:]  # the first one has a tensor more
    kept = Structures(1 << 20)
    whole = [
        kept.complete(briefly(publisher._held["v1"].manifest), soon()) for publisher in publishers
    ]
    assert whole[0].table is whole[1].table
    held = publishers[1]._server._held["v1"]
    other = msgspec.structs.replace(Structure.decode(held.structure), table=b"another")
    held.structure = other.encode()
    forged = msgspec.structs.replace(
        briefly(publishers[1]._held["v1"].manifest),
        structure_digest=hashlib.sha256(held.structure).digest(),
    )
    assert kept.complete(forged, soon()).table == b"another"
    kept.keep_only([])
    assert (kept._kept, kept._tables) == ({}, {})
