"""Behavior of NIXL that the transport relies on, and the transport's handling of it.

These tests use internals: abandoned reads, and lanes that fail at one place of a fetch.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from control_clients import until
from refit_fixtures import needs_nixl
from transport_processes import SourceProcess, one_read, pattern, soon

from refit_mx import (
    ProtocolError,
    RefitConfigError,
    RefitTimeoutError,
    ScratchExhaustedError,
    SourceLostError,
)
from refit_mx.receive.scratch import ScratchPool
from refit_mx.transports import nixl
from refit_mx.transports.base import ReadTable, SourceReads
from refit_mx.transports.nixl import NixlTransport
from refit_mx.transports.nixl_library import nixl_obstacle
from refit_mx.transports.nixl_source import NixlSource

pytestmark = [pytest.mark.slow, needs_nixl]
MIB = 1 << 20
NBYTES = 32 * MIB


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch) -> None:
    """Use UCX as between two hosts; with shm a receiver reads a stopped process's memory itself."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


@pytest.mark.parametrize("lanes", [1, 2])
def test_buffer_is_busy_until_late_bytes_have_landed(monkeypatch, lanes):
    monkeypatch.setattr(nixl, "BATCH_BYTES", NBYTES // lanes)  # so that all bytes arrive late
    monkeypatch.setattr(nixl, "LANE_BYTES", 0)
    transport = NixlTransport(lanes=lanes)
    pool = ScratchPool(transport, max_bytes=NBYTES)
    with SourceProcess(NBYTES, nixl=True) as source:
        wanted = SourceReads(source.manifest, one_read(NBYTES))
        abandoned = pool.take(NBYTES, soon())
        memory = abandoned.memory
        transport.read([wanted], memory, deadline=soon())
        memory.zero_()
        source.stop()
        with pytest.raises(RefitTimeoutError, match="reading from"):
            transport.read([wanted], memory, deadline=soon(0.5))
        pool.release(abandoned)
        assert transport.busy(memory)
        with pytest.raises(RefitConfigError, match="busy"):
            transport.read([wanted], memory, deadline=soon())
        with pytest.raises(RefitConfigError, match="busy"):
            transport.unregister(memory)
        with pytest.raises(ScratchExhaustedError, match="in quarantine"):
            pool.take(NBYTES, soon(0.2))
        before = memory.clone()
        source.resume()
        # The late bytes do arrive; only then is the buffer available.
        again = pool.take(NBYTES, soon())
        assert again.memory.data_ptr() == memory.data_ptr()
        assert not torch.equal(memory, before)
        assert torch.equal(memory, pattern(NBYTES, 1))
        memory.zero_()
        transport.read([wanted], memory, deadline=soon())
        assert torch.equal(memory, pattern(NBYTES, 1))
    pool.release(again)
    pool.close()
    transport.close()


def test_buffer_is_free_once_the_stopped_peer_is_killed():
    transport = NixlTransport()
    pool = ScratchPool(transport, max_bytes=NBYTES)
    with SourceProcess(NBYTES, nixl=True) as source:
        wanted = SourceReads(source.manifest, one_read(NBYTES))
        scratch = pool.take(NBYTES, soon())
        transport.read([wanted], scratch.memory, deadline=soon())
        source.stop()
        with pytest.raises(RefitTimeoutError):
            transport.read([wanted], scratch.memory, deadline=soon(0.5))
        pool.release(scratch)
        assert pool.has_quarantined
        source.kill()
        scratch = pool.take(NBYTES, soon())
        assert not pool.has_quarantined
        pool.release(scratch)
    pool.close()
    transport.close()


def test_names_of_agents_are_unique():
    source = NixlSource()
    memory = torch.zeros(MIB, dtype=torch.uint8)
    names = []
    for _ in range(2):
        names.append(source.register(memory).name)
        source.unregister(memory)
    assert len(set(names)) == 2


def test_source_with_a_released_arena_is_lost():
    transport = NixlTransport()
    with SourceProcess(MIB, nixl=True) as source:
        scratch = torch.zeros(MIB, dtype=torch.uint8)
        transport.register(scratch)
        wanted = SourceReads(source.manifest, one_read(MIB))
        transport.read([wanted], scratch, deadline=soon())
        source.command("unregister")
        with pytest.raises(SourceLostError):
            transport.read([wanted], scratch, deadline=soon())
    transport.close()


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).parent / "nixl_programs.py"), program]
    return subprocess.run(command, timeout=120, check=False, capture_output=True, text=True)


def test_buffer_cannot_be_registered_twice():
    source, transport = NixlSource(), NixlTransport()
    memory = torch.zeros(MIB, dtype=torch.uint8)
    source.register(memory)
    with pytest.raises(RefitConfigError, match="already registered"):
        source.register(memory)
    transport.register(memory)
    with pytest.raises(RefitConfigError, match="already registered"):
        transport.register(memory)
    source.close()
    source.close()
    transport.unregister(memory)


@pytest.mark.parametrize(
    ("program", "tls"),
    [
        ("read_and_leave", "tcp,self"),
        ("read_and_leave", "tcp,shm,self"),
        # Over shm a read of a stopped process ends, so none is abandoned there.
        ("leave_with_an_abandoned_read", "tcp,self"),
    ],
)
def test_process_that_used_nixl_exits_with_0(program, tls, monkeypatch):
    monkeypatch.setenv("UCX_TLS", tls)
    done = run(program)
    assert done.returncode == 0, done.stderr


def test_source_without_valid_nixl_metadata_is_refused():
    transport = NixlTransport()
    with SourceProcess(MIB, nixl=True) as source:
        scratch = torch.zeros(MIB, dtype=torch.uint8)
        transport.register(scratch)
        plain = source.manifest
        assert plain.nixl is not None
        without = msgspec.structs.replace(plain, nixl=None)
        with pytest.raises(RefitConfigError, match="has no NIXL agent; read it over TCP"):
            transport.read([SourceReads(without, one_read(MIB))], scratch, deadline=soon())
        for changed, message in (
            ({"metadata": b"garbage"}, "NIXL refuses its metadata"),
            ({"metadata": b""}, "NIXL refuses its metadata"),
            ({"name": "other"}, "its metadata belongs to agent"),
        ):
            nixl = msgspec.structs.replace(plain.nixl, **changed)
            hostile = msgspec.structs.replace(plain, nixl=nixl)
            with pytest.raises(ProtocolError, match=message):
                transport.read([SourceReads(hostile, one_read(MIB))], scratch, deadline=soon())
        transport.read([SourceReads(plain, one_read(MIB))], scratch, deadline=soon())
    transport.close()


def test_unused_source_is_disconnected():
    transport = NixlTransport()
    with SourceProcess(MIB, nixl=True) as old, SourceProcess(MIB, nixl=True) as new:
        scratch = torch.zeros(MIB, dtype=torch.uint8)
        transport.register(scratch)
        transport.read([SourceReads(old.manifest, one_read(MIB))], scratch, deadline=soon())
        for _ in range(6):
            transport.read([SourceReads(new.manifest, one_read(MIB))], scratch, deadline=soon())
        assert new.manifest.nixl is not None
        assert list(transport._sources) == [new.manifest.nixl.name]
    transport.close()


@pytest.fixture
def two_lanes(monkeypatch):
    """Yield a transport with two lanes, a fetch from a source, and a registered buffer."""
    monkeypatch.setattr(nixl, "BATCH_BYTES", MIB)
    monkeypatch.setattr(nixl, "LANE_BYTES", 0)
    transport = NixlTransport(lanes=2)
    with SourceProcess(NBYTES, nixl=True) as source:
        scratch = torch.zeros(NBYTES, dtype=torch.uint8)
        transport.register(scratch)
        rows = np.repeat(one_read(MIB).rows, NBYTES // MIB, axis=0)
        rows[:, 0] = rows[:, 1] = np.arange(len(rows)) * MIB
        yield transport, SourceReads(source.manifest, ReadTable(rows)), scratch
    transport.close()


def test_large_fetch_uses_two_threads_at_once(two_lanes):
    transport, wanted, scratch = two_lanes
    both = threading.Barrier(2)
    seen: dict[int, int] = {}

    def meet(index: int, first: int, last: int) -> None:
        if threading.get_ident() not in seen:
            seen[threading.get_ident()] = first
            both.wait(30)

    transport.read([wanted], scratch, deadline=soon(), on_done=meet)
    assert len(seen) == 2
    assert torch.equal(scratch, pattern(NBYTES, 1))


def test_failed_second_lane_leaves_the_transport_usable(two_lanes):
    transport, wanted, scratch = two_lanes
    both, main = threading.Barrier(2), threading.get_ident()
    met: set[int] = set()
    failed = threading.Event()

    def fail(*_: int) -> None:
        if threading.get_ident() not in met:
            met.add(threading.get_ident())
            both.wait(30)
        if threading.get_ident() != main:
            failed.set()
            raise ZeroDivisionError
        assert failed.wait(30)

    with pytest.raises(ZeroDivisionError):
        transport.read([wanted], scratch, deadline=soon(), on_done=fail)
    until(lambda: not transport.busy(scratch))
    scratch.zero_()
    transport.read([wanted], scratch, deadline=soon())
    assert torch.equal(scratch, pattern(NBYTES, 1))


def test_interrupt_is_raised_after_the_second_lane(two_lanes):
    transport, wanted, scratch = two_lanes
    both, main = threading.Barrier(2), threading.get_ident()
    met: set[int] = set()
    ended: list[int] = []

    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    def on_done(*_: int) -> None:
        if threading.get_ident() in met:
            return
        met.add(threading.get_ident())
        both.wait(30)
        if threading.get_ident() != main:
            signal.pthread_kill(main, signal.SIGUSR1)
            time.sleep(0.3)
            ended.append(1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupted):
            transport.read([wanted], scratch, deadline=soon(), on_done=on_done)
        assert ended == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)
    until(lambda: not transport.busy(scratch))
    transport.read([wanted], scratch, deadline=soon())
    assert torch.equal(scratch, pattern(NBYTES, 1))


def test_fetch_works_without_a_failed_second_lane(two_lanes, monkeypatch):
    transport, wanted, scratch = two_lanes

    def refuse(*_: object, **__: object) -> None:
        raise RefitConfigError("no more memory can be registered")

    monkeypatch.setattr(nixl, "Lane", refuse)
    transport.read([wanted], scratch, deadline=soon())
    assert torch.equal(scratch, pattern(NBYTES, 1))


def test_importing_nixl_does_not_change_logging():
    code = (
        "import logging; from refit_mx.transports.nixl_library import nixl_obstacle; "
        "assert nixl_obstacle() is None; assert logging.raiseExceptions"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert logging.raiseExceptions


def test_ucx_variables_are_set_only_without_rdma_or_user_values(tmp_path):
    def prepared(rdma: Path, **user: str) -> list[str | None]:
        code = (
            "import os, sys; from pathlib import Path;"
            "from refit_mx.transports import nixl_library;"
            "nixl_library._RDMA = Path(sys.argv[1]); nixl_library.prepare_environment();"
            "print(os.environ.get('UCX_TLS'), os.environ.get('UCX_MODULES'))"
        )
        environ = {k: v for k, v in os.environ.items() if not k.startswith("UCX_")} | user
        command = [sys.executable, "-c", code, str(rdma)]
        done = subprocess.run(
            command, env=environ, check=True, timeout=120, capture_output=True, text=True
        )
        return done.stdout.split()

    assert prepared(tmp_path / "none") == ["tcp,shm,self", "^ib"]
    assert prepared(tmp_path / "none", UCX_TLS="all") == ["all", "^ib"]
    (tmp_path / "mlx5_0").mkdir()
    assert prepared(tmp_path) == ["None", "None"]


def test_nixl_is_unavailable_with_yuanrong(monkeypatch):
    monkeypatch.setitem(sys.modules, "yr.datasystem", types.ModuleType("yr.datasystem"))
    assert "this process has loaded yr.datasystem" in (nixl_obstacle() or "")
