"""What is special about memory that two processes of a machine map."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from refit_fixtures import World, a_world, needs_nixl, needs_shm, zeros
from refit_processes import SHAPES, fsdp_shards, same, targets_of, weights
from transport_processes import SourceProcess, pattern

from refit_mx import offered_transports, transport_choice
from refit_mx.arena import Arena
from refit_mx.deadline import Deadline
from refit_mx.errors import ProtocolError, RefitConfigError, SourceLostError
from refit_mx.manifest import BLOCK_BYTES, Manifest, SharedMemory
from refit_mx.reads import ReadTable
from refit_mx.shared_memory import attach, create
from refit_mx.transports import shm as shm_module
from refit_mx.transports.base import Fetch
from refit_mx.transports.shm import UNUSED_FETCHES, ShmTransport, reaches
from refit_mx.transports.tcp import TcpTransport

pytestmark = [pytest.mark.slow, needs_shm]
NBYTES = 1 << 20
WHOLE = ReadTable(np.array([[0, 0, NBYTES, 1, 0, 0, 1, 0, 0]], np.int64))


def fetch(transport: ShmTransport, source: Manifest) -> torch.Tensor:
    """All of a source's bytes."""
    scratch = torch.zeros(NBYTES, dtype=torch.uint8)
    transport.register(scratch)
    transport.fetch([Fetch(source, WHOLE)], scratch, deadline=Deadline(30, "test"))
    transport.unregister(scratch)
    return scratch


def maps_of(source: Manifest) -> int:
    """How often this process maps a source's memory."""
    assert source.shm is not None
    return Path("/proc/self/maps").read_text().count(source.shm.name)


def mapped(source: Manifest) -> bool:
    """Whether this process maps the memory of a source in another one."""
    return maps_of(source) > 0


@pytest.fixture
def world():
    with a_world() as made:
        yield made


# The memory


def test_memory_is_the_same_in_both_processes_and_cannot_be_written_by_the_other():
    arena = Arena(NBYTES, shared=True)
    there = np.frombuffer(attach(arena.shared, NBYTES), np.uint8)
    arena.memory[7] = 9
    assert there[7] == 9
    assert not there.flags.writeable
    assert arena.address % 4096 == 0


def test_nobody_else_can_write_to_it_whatever_they_open_it_for():
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


def test_its_descriptor_is_closed_with_the_arena():
    arena = Arena(NBYTES, shared=True)
    shared = arena.shared
    del arena
    with pytest.raises(FileNotFoundError):
        attach(shared, NBYTES)


@pytest.mark.parametrize("kind", ["another memory", "no descriptor", "no process", "a file"])
def test_what_is_not_the_memory_that_was_named_is_not_mapped(kind, tmp_path):
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


def test_a_pipe_that_a_manifest_names_is_not_opened(tmp_path):
    """Opening it would wait for somebody to write, or wake who waits for a reader."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    fd = os.open(pipe, os.O_RDWR)
    assert stat.S_ISFIFO(os.fstat(fd).st_mode)
    with pytest.raises(FileNotFoundError, match="expected the memory"):
        attach(SharedMemory(os.getpid(), fd, "refit-mx-x"), NBYTES)
    os.close(fd)


def test_memory_that_is_too_small_is_refused():
    fd, _, shared = create(4096)
    with pytest.raises(ProtocolError, match="4096 bytes; expected 8192 or more"):
        attach(shared, 8192)
    os.close(fd)


def test_memory_that_could_shrink_is_refused_since_reading_it_could_end_the_process():
    name = "refit-mx-unsealed"
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(ProtocolError, match="may shrink"):
        attach(SharedMemory(os.getpid(), fd, name), 4096)
    os.close(fd)


# What is offered and taken


@pytest.mark.parametrize(
    ("asked", "nixl", "shared"),
    [
        (("tcp",), None, False),
        (("shm", "tcp"), None, True),
        (None, "not installed", True),
        pytest.param(None, None, True, marks=needs_nixl),
        pytest.param(("nixl", "tcp"), None, False, marks=needs_nixl),
    ],
)
def test_memory_is_shared_unless_other_transports_are_asked_for(
    world: World, monkeypatch, asked, nixl, shared
):
    if nixl is not None:
        monkeypatch.setattr(offered_transports, "nixl_available", lambda: nixl)
    publisher = world.publisher(transports=asked)
    world.version("v1")
    assert (publisher.publish("v1", weights(1, SHAPES)).shm is not None) == shared


def test_memory_of_a_device_is_not_shared(world: World):
    with pytest.raises(RefitConfigError, match="transport 'shm': the arenas are on meta"):
        world.publisher(transports=["shm"], device="meta")
    with pytest.raises(RefitConfigError, match="transport 'shm': the scratch memory is on meta"):
        world.receiver(transport="shm", device="meta")


@pytest.mark.parametrize("reaches", [True, False])
def test_an_auto_receiver_maps_what_it_can_and_asks_over_tcp_else(
    world: World, monkeypatch, reaches
):
    """As in a container, or on another machine, where the PID is nobody's or another's."""
    publisher = world.publisher(transports=["shm", "tcp"])
    world.version("v1")
    publisher.publish("v1", weights(1, SHAPES))
    if not reaches:
        monkeypatch.setattr(shm_module, "attach", lambda *_: (_ for _ in ()).throw(OSError("no")))
    receiver = world.receiver(targets_of(SHAPES), transport="auto")
    live = zeros(SHAPES)
    assert receiver.refit("v1", live).transport == ("shm" if reaches else "tcp")
    assert same(live, weights(1, SHAPES))


def test_the_next_version_over_another_transport_is_read_in_pieces_of_that_one(
    world: World, monkeypatch
):
    shapes = {"long": ("bfloat16", (3 * BLOCK_BYTES, 3)), "short": ("float32", (5,))}
    publisher = world.publisher(transports=["shm", "tcp"])
    receiver = world.receiver(targets_of(shapes), transport="auto")
    fetched = []

    def counting(fetch):
        def counted(transport, fetches, *args, **options):
            assert all((each.reads.rows[:, 2] <= transport.piece_bytes).all() for each in fetches)
            fetched.append((transport.name, sum(len(each.reads) for each in fetches)))
            return fetch(transport, fetches, *args, **options)

        return counted

    for each in (ShmTransport, TcpTransport):
        monkeypatch.setattr(each, "fetch", counting(each.fetch))
    for number, here in enumerate([True, True, False, True], 1):
        world.version(f"v{number}")
        publisher.publish(f"v{number}", weights(number, shapes))
        live = zeros(shapes)
        with monkeypatch.context() as elsewhere:
            if not here:
                elsewhere.setattr(transport_choice, "reaches", lambda _: False)
            receiver.refit(f"v{number}", live)
        assert same(live, weights(number, shapes))
    # 18 MiB and a few bytes, in pieces of 2 MiB and of 16.
    assert fetched == [("shm", 10), ("shm", 10), ("tcp", 3), ("shm", 10)]


def test_where_some_sources_are_elsewhere_nothing_of_the_others_stays_mapped(
    world: World, monkeypatch
):
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


def test_a_source_that_shares_nothing_is_refused_and_so_is_one_that_cannot_be_mapped():
    transport = ShmTransport()
    with (
        SourceProcess(NBYTES) as there,
        pytest.raises(RefitConfigError, match="does not share its memory"),
    ):
        fetch(transport, there.manifest)
    with SourceProcess(NBYTES, shm=True) as there:
        named = msgspec.structs.replace(there.manifest.shm, name="refit-mx-another")
        elsewhere = msgspec.structs.replace(there.manifest, shm=named)
        assert not reaches(elsewhere)
        with pytest.raises(RefitConfigError, match="cannot be mapped here"):
            fetch(transport, elsewhere)
        assert torch.equal(fetch(transport, there.manifest), pattern(NBYTES, 1))
    transport.close()


# Letting go of memory


def test_the_memory_of_a_lost_source_is_let_go_of():
    transport = ShmTransport()
    with SourceProcess(NBYTES, shm=True) as there:
        fetch(transport, there.manifest)
        assert mapped(there.manifest)
        there.kill()
        with pytest.raises(SourceLostError):
            fetch(transport, there.manifest)
    assert not mapped(there.manifest)
    transport.close()


def test_memory_that_is_not_read_from_any_more_is_let_go_of():
    """An arena that was given up for a larger one would stay for as long as it is mapped."""
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
