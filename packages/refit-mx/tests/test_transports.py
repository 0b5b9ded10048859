"""Promises of all transports, with sources in separate processes.

These tests use internals: sources are killed between two batches of a fetch.
"""

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from refit_fixtures import needs_nixl, needs_shm, new_transport
from transport_processes import SourceProcess, pattern, random_reads, reference_bytes, soon

from refit_mx import (
    RefitConfigError,
    RefitTimeoutError,
    SourceLostError,
    Transport,
)
from refit_mx.memory.arena import Arena
from refit_mx.receive.scratch import ScratchPool
from refit_mx.transports import nixl as nixl_module
from refit_mx.transports import shm as shm_module
from refit_mx.transports import tcp as tcp_module
from refit_mx.transports.base import ReadTable, SourceReads
from refit_mx.transports.batches import Batch, BatchQueue

pytestmark = pytest.mark.slow
# UCX over TCP alone is what two hosts have; with shm a receiver reads the source's memory itself.
KINDS = [
    pytest.param("tcp"),
    pytest.param("shm", marks=needs_shm),
    pytest.param("nixl-shm", marks=needs_nixl),
    pytest.param("nixl-tcp", marks=needs_nixl),
]
MIB = 1 << 20


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch) -> str:
    # UCX reads it when an agent is made, in this process and in the sources.
    if request.param.startswith("nixl"):
        tls = "tcp,self" if request.param == "nixl-tcp" else "tcp,shm,self"
        monkeypatch.setenv("UCX_TLS", tls)
    # Use several threads even for small source_reads; test_transport_nixl uses one.
    for module in (nixl_module, shm_module):
        monkeypatch.setattr(module, "LANE_BYTES", 0)
    return request.param


@pytest.fixture
def transport(kind) -> Iterator[Transport]:
    fresh = new_transport(kind.partition("-")[0])
    yield fresh
    fresh.close()


@pytest.fixture
def small_batches(monkeypatch) -> None:
    """Use many small batches, so that a fault can happen between two."""
    for module in (nixl_module, shm_module, tcp_module):
        monkeypatch.setattr(module, "BATCH_BYTES", MIB)


def source(kind: str, nbytes: int = MIB, **options) -> SourceProcess:
    return SourceProcess(nbytes, nixl=kind.startswith("nixl"), shm=kind == "shm", **options)


def rows(count: int, nbytes: int = MIB, first: int = 0) -> ReadTable:
    """Return consecutive reads of ``nbytes``; byte b of the arena goes to byte ``first + b``."""
    table = np.zeros((count, 9), np.int64)
    table[:, 0] = np.arange(count) * nbytes
    table[:, 1] = table[:, 0] + first
    table[:, 2] = nbytes
    table[:, [3, 6]] = 1
    return ReadTable(table)


@contextlib.contextmanager
def taken(pool: ScratchPool, nbytes: int) -> Iterator[Arena]:
    scratch = pool.take(nbytes, soon())
    try:
        yield scratch
    finally:
        pool.release(scratch)


@contextlib.contextmanager
def registered(transport: Transport, nbytes: int) -> Iterator[torch.Tensor]:
    pool = ScratchPool(transport, max_bytes=nbytes + 4096)
    with taken(pool, nbytes) as scratch:
        scratch.memory.zero_()
        yield scratch.memory
    pool.close()


def test_exactly_the_read_bytes_arrive(kind, transport):
    with source(kind) as there, registered(transport, MIB) as scratch:
        for seed in range(5):
            reads = random_reads(MIB, 30, seed, max_run=[7, 512, 30_000][seed % 3])
            scratch.fill_(seed)
            expected = scratch.clone()
            memory = pattern(MIB, 1)
            for row, data in zip(
                reads.rows.tolist(), reference_bytes(memory, reads, "source"), strict=True
            ):
                _, dst, run, n1, _, dst1, n2, _, dst2 = row
                places = itertools.product(range(n2), range(n1))
                for k, (j, i) in enumerate(places):
                    part = bytearray(data[k * run : (k + 1) * run])
                    at = dst + j * dst2 + i * dst1
                    expected[at : at + run] = torch.frombuffer(part, dtype=torch.uint8)
            stats = transport.read([SourceReads(there.manifest, reads)], scratch, deadline=soon())
            assert stats.nbytes == reads.nbytes
            assert stats.connected == (seed == 0)
            assert torch.equal(scratch, expected)
            assert not transport.busy(scratch)


def test_each_row_is_reported_once_after_its_arrival(kind, transport, small_batches):
    with source(kind, 4 * MIB) as there, registered(transport, 4 * MIB) as scratch:
        memory = pattern(4 * MIB, 1)
        sizes = np.array([100, 3 * MIB // 2, 7, MIB, 4096, MIB + 1, 1])
        table = np.zeros((len(sizes), 9), np.int64)
        table[:, 0] = table[:, 1] = np.cumsum(sizes) - sizes
        table[:, 2] = sizes
        table[:, [3, 6]] = 1
        reported: list[int] = []

        def check(index: int, first: int, last: int) -> None:
            assert index == 0
            for at, size in table[first:last][:, [1, 2]].tolist():
                assert torch.equal(scratch[at : at + size], memory[at : at + size])
            reported.extend(range(first, last))

        wanted = SourceReads(there.manifest, ReadTable(table))
        transport.read([wanted], scratch, deadline=soon(), on_done=check)
        assert sorted(reported) == list(range(len(sizes)))


def test_empty_reads_open_no_connection(kind, transport):
    with source(kind) as there, registered(transport, MIB) as scratch:
        there.kill()
        stats = transport.read([SourceReads(there.manifest, rows(0))], scratch, deadline=soon())
        assert (stats.nbytes, stats.connected) == (0, 0)
        assert transport.read([], scratch, deadline=soon()).nbytes == 0


def test_reads_outside_a_memory_move_no_byte(kind, transport):
    with source(kind) as there, registered(transport, MIB) as scratch:
        beyond_arena = ReadTable(rows(1).rows + np.array([MIB, 0, 0, 0, 0, 0, 0, 0, 0]))
        beyond_scratch = ReadTable(rows(1).rows + np.array([0, MIB, 0, 0, 0, 0, 0, 0, 0]))
        for reads, side in ((beyond_arena, "source"), (beyond_scratch, "scratch")):
            with pytest.raises(RefitConfigError, match=f"not inside the {side}"):
                transport.read([SourceReads(there.manifest, reads)], scratch, deadline=soon())
        unknown = torch.zeros(MIB, dtype=torch.uint8)
        with pytest.raises(RefitConfigError, match="not registered"):
            transport.read([SourceReads(there.manifest, rows(1))], unknown, deadline=soon())
        assert not scratch.any()


def test_killed_source_is_lost_at_once(kind, transport, small_batches):
    with source(kind, 32 * MIB) as dies, source(kind, 32 * MIB) as lives:
        pool = ScratchPool(transport, max_bytes=200 * MIB)
        started = time.monotonic()
        with taken(pool, 32 * MIB) as scratch:

            def kill(*_: int) -> None:
                dies.kill()

            wanted = SourceReads(dies.manifest, rows(32))
            with pytest.raises(SourceLostError) as lost:
                transport.read([wanted], scratch.memory, deadline=soon(300), on_done=kill)
            assert lost.value.worker_ids == (dies.manifest.worker_id,)
        assert time.monotonic() - started < 100
        with taken(pool, 32 * MIB) as scratch:
            wanted = SourceReads(lives.manifest, rows(32))
            transport.read([wanted], scratch.memory, deadline=soon())
            assert torch.equal(scratch.memory, pattern(32 * MIB, 1))
        pool.close()


def test_source_killed_between_two_fetches_is_lost(kind, transport):
    with source(kind) as there, registered(transport, MIB) as scratch:
        wanted = SourceReads(there.manifest, rows(1))
        transport.read([wanted], scratch, deadline=soon())
        there.kill()
        for _ in range(2):
            with pytest.raises(SourceLostError):
                transport.read([wanted], scratch, deadline=soon(300))


def test_stopped_source_times_out_and_can_be_retried(kind, transport, small_batches):
    with source(kind, 8 * MIB) as there:
        pool = ScratchPool(transport, max_bytes=200 * MIB)
        wanted = SourceReads(there.manifest, rows(8))
        with taken(pool, 8 * MIB) as scratch:
            transport.read([wanted], scratch.memory, deadline=soon())
            there.stop()
            started = time.monotonic()
            with pytest.raises(RefitTimeoutError, match=r"not done after 0\.5 s"):
                transport.read([wanted], scratch.memory, deadline=soon(0.5))
            assert 0.4 < time.monotonic() - started < 20
        there.resume()
        with taken(pool, 8 * MIB) as scratch:
            scratch.memory.zero_()
            transport.read([wanted], scratch.memory, deadline=soon())
            assert torch.equal(scratch.memory, pattern(8 * MIB, 1))
        pool.close()


def test_stopped_source_that_never_connected_is_lost(kind):
    transport = new_transport(kind.partition("-")[0], connect_timeout_s=0.3)
    with source(kind) as there, registered(transport, MIB) as scratch:
        there.stop()
        with pytest.raises(SourceLostError, match=r"did not answer for 0\.3 s") as lost:
            transport.read([SourceReads(there.manifest, rows(1))], scratch, deadline=soon())
        assert lost.value.worker_ids == (there.manifest.worker_id,)
        assert not transport.busy(scratch)
    transport.close()


def test_restarted_source_is_another_source(kind, transport, port):
    with source(kind, port=port) as old, registered(transport, MIB) as scratch:
        transport.read([SourceReads(old.manifest, rows(1))], scratch, deadline=soon())
        old.kill()
        with source(kind, seed=2, port=port) as new:
            assert new.manifest.endpoint == old.manifest.endpoint
            scratch.zero_()
            for _ in range(2):
                with pytest.raises(SourceLostError):
                    transport.read(
                        [SourceReads(old.manifest, rows(1))], scratch, deadline=soon(300)
                    )
            transport.read([SourceReads(new.manifest, rows(1))], scratch, deadline=soon())
            assert torch.equal(scratch[:MIB], pattern(MIB, 2))


def test_version_dropped_during_a_fetch_raises_source_lost(
    kind, transport, small_batches, monkeypatch
):
    with source(kind, 16 * MIB) as there, registered(transport, 16 * MIB) as scratch:
        take = BatchQueue.take

        def dropping(batch_queue: BatchQueue) -> Batch | None:
            batch = take(batch_queue)
            if batch is not None and batch.first == 8:
                there.command("drop v1")
                there.command("fill 9")
            return batch

        monkeypatch.setattr(BatchQueue, "take", dropping)
        with pytest.raises(SourceLostError, match="'gone': version 'v1'"):
            transport.read([SourceReads(there.manifest, rows(16))], scratch, deadline=soon())


def test_read_of_an_unknown_version_raises_source_lost(kind, transport):
    with source(kind) as there, registered(transport, MIB) as scratch:
        other = msgspec.structs.replace(there.manifest, version_id="v2")
        with pytest.raises(SourceLostError, match="'gone': version 'v2'"):
            transport.read([SourceReads(other, rows(1))], scratch, deadline=soon())


def test_one_lost_source_of_several_fails_the_fetch_and_names_it(kind, transport, small_batches):
    with (
        source(kind, 8 * MIB) as dies,
        source(kind, 8 * MIB) as lives,
        registered(transport, 16 * MIB) as scratch,
    ):
        dies.kill()
        source_reads = [
            SourceReads(lives.manifest, rows(8)),
            SourceReads(dies.manifest, rows(8, first=8 * MIB)),
        ]
        with pytest.raises(SourceLostError) as lost:
            transport.read(source_reads, scratch, deadline=soon(300))
        assert lost.value.worker_ids == (dies.manifest.worker_id,)
        transport.read(source_reads[:1], scratch, deadline=soon())
        assert torch.equal(scratch[: 8 * MIB], pattern(8 * MIB, 1))


def test_error_of_the_caller_leaves_no_pending_writes(kind, transport, small_batches):
    with source(kind, 8 * MIB) as there:
        pool = ScratchPool(transport, max_bytes=100 * MIB)

        def fail(*_: int) -> None:
            raise ZeroDivisionError

        wanted = SourceReads(there.manifest, rows(8))
        scratch = pool.take(8 * MIB, soon())
        with pytest.raises(ZeroDivisionError):
            transport.read([wanted], scratch.memory, deadline=soon(), on_done=fail)
        pool.release(scratch)
        with taken(pool, 100 * MIB - 4096) as again:  # needs the first buffer's memory
            transport.read([wanted], again.memory, deadline=soon())
            assert torch.equal(again.memory[: 8 * MIB], pattern(8 * MIB, 1))
        pool.close()


def test_closed_transport_reconnects(kind, transport):
    with source(kind) as there, registered(transport, MIB) as scratch:
        wanted = SourceReads(there.manifest, rows(1))
        for _ in range(2):
            assert transport.read([wanted], scratch, deadline=soon()).connected == 1
            transport.close()
            transport.close()


def test_source_process_exits_cleanly_after_reads(kind, transport):
    with source(kind) as there, registered(transport, MIB) as scratch:
        transport.read([SourceReads(there.manifest, rows(1))], scratch, deadline=soon())
        assert there.exit() == 0


@pytest.mark.parametrize(
    ("installed", "taken"),
    [
        (["nixl_cu12"], "nixl_cu12"),
        (["nixl_cu13"], "nixl_cu13"),
        (["nixl_cu12", "nixl_cu13"], "nixl_cu13"),
        ([], "install refit-mx[nixl], or refit-mx[nixl-cu13]"),
    ],
)
def test_installed_build_of_nixl_is_used(tmp_path, installed, taken) -> None:
    for package in ["nixl", "nixl_cu12", "nixl_cu13"]:
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        if package in installed:
            (tmp_path / package / "_api.py").touch()
    code = (
        "from refit_mx.transports.nixl_library import nixl_obstacle, _api; "
        "print(nixl_obstacle() or _api().__package__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert taken in ran.stdout
