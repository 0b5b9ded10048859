"""Shared memory that two processes of a machine map.

These tests use internals: memory that a hostile manifest names, and a process's mappings.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from pathlib import Path

import msgspec
import pytest
import torch
from refit_fixtures import World, needs_nixl, needs_shm, zeros
from refit_processes import SHAPES, fsdp_shards, same, targets_of, weights
from transport_processes import SourceProcess, one_read, pattern

from refit_mx import Deadline, Manifest, ProtocolError, RefitConfigError, SourceLostError
from refit_mx.manifest.format import SharedMemory
from refit_mx.memory.arena import Arena
from refit_mx.memory.mapping import attach, create
from refit_mx.receive import transport_choice
from refit_mx.source import served_transports
from refit_mx.transports import shm as shm_module
from refit_mx.transports.base import SourceReads
from refit_mx.transports.shm import UNUSED_FETCHES, ShmTransport, can_map
from refit_mx.transports.tcp import TcpTransport

BLOCK_BYTES = 1 << 20
pytestmark = [pytest.mark.slow, needs_shm]
NBYTES = 1 << 20


def fetch(transport: ShmTransport, source: Manifest) -> torch.Tensor:
    """Return all of a source's bytes."""
    scratch = torch.zeros(NBYTES, dtype=torch.uint8)
    transport.register(scratch)
    transport.read([SourceReads(source, one_read(NBYTES))], scratch, deadline=Deadline(30, "test"))
    transport.unregister(scratch)
    return scratch


def maps_of(source: Manifest) -> int:
    """Return how often this process maps a source's memory."""
    assert source.shm is not None
    return Path("/proc/self/maps").read_text().count(source.shm.name)


def mapped(source: Manifest) -> bool:
    """Return whether this process maps a source's memory."""
    return maps_of(source) > 0


# The memory


def test_sealed_memory_has_no_other_writers():
    fd, memory, _ = create(4096)
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & 0x10:
        pytest.skip("needs Linux 5.1, which seals memory against other writers")
    memory[0] = 1
    other = os.open(f"/proc/{os.getpid()}/fd/{fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(other, 4096)
    with pytest.raises(PermissionError):
        os.pwrite(other, b"x", 0)
    for each in (fd, other):
        os.close(each)


def test_descriptor_is_closed_with_the_arena():
    arena = Arena(NBYTES, shared=True)
    shared = arena.shared
    del arena
    with pytest.raises(FileNotFoundError):
        attach(shared, NBYTES)


@pytest.mark.parametrize("kind", ["another memory", "no descriptor", "no process", "a file"])
def test_only_the_named_memory_is_mapped(kind, tmp_path):
    fd, _, shared = create(NBYTES)
    other, *_ = create(NBYTES)
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, NBYTES)
    wrong = {
        "another memory": msgspec.structs.replace(shared, fd=other),
        "no descriptor": msgspec.structs.replace(shared, fd=1 << 20),
        "no process": msgspec.structs.replace(shared, pid=1 << 30),
        "a file": msgspec.structs.replace(shared, fd=file, name=str(tmp_path / "file")),
    }[kind]
    with pytest.raises(FileNotFoundError):
        attach(wrong, NBYTES)
    for each in (fd, other, file):
        os.close(each)


def test_pipe_named_by_a_manifest_is_not_opened(tmp_path):
    # Opening a pipe would block until another process writes, or wake a blocked writer.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    fd = os.open(pipe, os.O_RDWR)
    assert stat.S_ISFIFO(os.fstat(fd).st_mode)
    with pytest.raises(FileNotFoundError, match="expected the memory"):
        attach(SharedMemory(os.getpid(), fd, "refit-mx-x"), NBYTES)
    os.close(fd)


def test_too_small_memory_is_refused():
    fd, _, shared = create(4096)
    with pytest.raises(ProtocolError, match="4096 bytes; expected 8192 or more"):
        attach(shared, 8192)
    os.close(fd)


def test_shrinkable_memory_is_refused():
    name = "refit-mx-unsealed"
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(ProtocolError, match="may shrink"):
        attach(SharedMemory(os.getpid(), fd, name), 4096)
    os.close(fd)


# Published and mapped memory


@pytest.mark.parametrize(
    ("transports", "nixl", "shared"),
    [
        (("tcp",), None, False),
        (("shm", "tcp"), None, True),
        (None, "not installed", True),
        pytest.param(None, None, True, marks=needs_nixl),
        pytest.param(("nixl", "tcp"), None, False, marks=needs_nixl),
    ],
)
def test_memory_is_shared_unless_transports_exclude_it(
    world: World, monkeypatch, transports, nixl, shared
):
    if nixl is not None:
        monkeypatch.setattr(served_transports, "nixl_obstacle", lambda: nixl)
    publisher = world.publisher(transports=transports)
    world.version("v1")
    assert (publisher.publish("v1", weights(1, SHAPES)).shm is not None) == shared


def test_memory_of_a_device_is_not_shared(world: World):
    with pytest.raises(RefitConfigError, match="transport 'shm': the arenas are on meta"):
        world.publisher(transports=["shm"], device="meta")


@pytest.mark.parametrize("can_map", [True, False])
def test_auto_receiver_falls_back_from_shm_to_tcp(world: World, monkeypatch, can_map):
    # In a container or on another machine, the PID is unknown or belongs to another process.
    world.publish_state("v1", weights(1, SHAPES), transports=["shm", "tcp"])
    if not can_map:
        monkeypatch.setattr(shm_module, "attach", lambda *_: (_ for _ in ()).throw(OSError("no")))
    receiver = world.receiver(targets_of(SHAPES), transport="auto")
    live = zeros(SHAPES)
    assert receiver.refit("v1", live).transport == ("shm" if can_map else "tcp")
    assert same(live, weights(1, SHAPES))


def test_plan_is_cut_for_the_transport_in_use(world: World, monkeypatch):
    shapes = {"long": ("bfloat16", (3 * BLOCK_BYTES, 3)), "short": ("float32", (5,))}
    publisher = world.publisher(transports=["shm", "tcp"])
    receiver = world.receiver(targets_of(shapes), transport="auto")
    fetched = []

    def counting(read):
        def counted(transport, source_reads, *args, **options):
            assert all(
                (each.reads.rows[:, 2] <= transport.max_read_bytes).all() for each in source_reads
            )
            fetched.append((transport.name, sum(len(each.reads) for each in source_reads)))
            return read(transport, source_reads, *args, **options)

        return counted

    for each in (ShmTransport, TcpTransport):
        monkeypatch.setattr(each, "read", counting(each.read))
    for number, here in enumerate([True, True, False, True], 1):
        world.version(f"v{number}")
        publisher.publish(f"v{number}", weights(number, shapes))
        live = zeros(shapes)
        with monkeypatch.context() as elsewhere:
            if not here:
                elsewhere.setattr(transport_choice, "can_map", lambda _: False)
            receiver.refit(f"v{number}", live)
        assert same(live, weights(number, shapes))
    # 18 MiB and a few bytes, in reads of 2 MiB and of 16.
    assert fetched == [("shm", 10), ("shm", 10), ("tcp", 3), ("shm", 10)]


def test_fallback_to_tcp_leaves_no_memory_mapped(world: World, monkeypatch):
    here, elsewhere = (
        world.publisher(f"fsdp-{rank}", transports=["shm", "tcp"]) for rank in range(2)
    )
    world.version("v1", ["fsdp-0", "fsdp-1"])
    manifests = [
        publisher.publish("v1", fsdp_shards(weights(1, SHAPES), 2, rank))
        for rank, publisher in enumerate((here, elsewhere))
    ]
    attaching = shm_module.attach

    def attach_some(shared: SharedMemory, nbytes: int) -> mmap.mmap:
        if shared == manifests[1].shm:
            raise FileNotFoundError("another machine's")
        return attaching(shared, nbytes)

    monkeypatch.setattr(shm_module, "attach", attach_some)
    receiver = world.receiver(targets_of(SHAPES), transport="auto")
    live = zeros(SHAPES)
    assert receiver.refit("v1", live).transport == "tcp"
    assert same(live, weights(1, SHAPES))
    assert maps_of(manifests[0]) == 1  # the publisher's own


def test_unmappable_source_is_refused():
    transport = ShmTransport()
    with (
        SourceProcess(NBYTES) as there,
        pytest.raises(RefitConfigError, match="does not share its memory"),
    ):
        fetch(transport, there.manifest)
    with SourceProcess(NBYTES, shm=True) as there:
        named = msgspec.structs.replace(there.manifest.shm, name="refit-mx-another")
        elsewhere = msgspec.structs.replace(there.manifest, shm=named)
        assert not can_map(elsewhere)
        with pytest.raises(RefitConfigError, match="cannot be mapped here"):
            fetch(transport, elsewhere)
        assert torch.equal(fetch(transport, there.manifest), pattern(NBYTES, 1))
    transport.close()


# Release of memory


def test_memory_of_a_lost_source_is_released():
    transport = ShmTransport()
    with SourceProcess(NBYTES, shm=True) as there:
        fetch(transport, there.manifest)
        assert mapped(there.manifest)
        there.kill()
        with pytest.raises(SourceLostError):
            fetch(transport, there.manifest)
    assert not mapped(there.manifest)
    transport.close()


def test_unused_memory_is_unmapped():
    """Otherwise the arena that a larger one replaced would use memory as long as it is mapped."""
    transport = ShmTransport()
    with SourceProcess(NBYTES, shm=True) as old, SourceProcess(NBYTES, shm=True) as new:
        fetch(transport, old.manifest)
        for _ in range(UNUSED_FETCHES):
            fetch(transport, new.manifest)
        assert mapped(old.manifest)
        fetch(transport, new.manifest)
        assert not mapped(old.manifest)
        assert mapped(new.manifest)
    transport.close()
    assert not mapped(new.manifest)
