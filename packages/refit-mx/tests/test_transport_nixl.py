"""What NIXL does by itself, fact by fact, and beside it what ours makes of it."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transport_processes import SourceProcess, pattern

from refit_mx.arena import Arena
from refit_mx.deadline import Deadline
from refit_mx.errors import (
    ProtocolError,
    RefitConfigError,
    RefitTimeoutError,
    ScratchExhaustedError,
    SourceLostError,
)
from refit_mx.reads import ReadTable
from refit_mx.scratch import ScratchPool
from refit_mx.transports import nixl, nixl_library
from refit_mx.transports.base import Fetch
from refit_mx.transports.descriptors import descriptors
from refit_mx.transports.nixl import NixlSource, NixlTransport, nixl_available

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        nixl_available() is not None, reason=f"needs the package nixl-cu12: {nixl_available()}"
    ),
]
MIB = 1 << 20
NBYTES = 32 * MIB


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch) -> None:
    """As between two hosts; with shm a receiver reads a stopped process's memory itself."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")


def soon(timeout_s: float = 60.0) -> Deadline:
    return Deadline(timeout_s, "test")


def whole(nbytes: int = NBYTES) -> ReadTable:
    return ReadTable(np.array([[0, 0, nbytes, 1, 0, 0, 1, 0, 0]], np.int64))


def until(holds: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Whether it holds before the time is over."""
    end = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


class RawReader:
    """NIXL's own API, as its examples use it."""

    def __init__(self, source: SourceProcess) -> None:
        assert source.manifest.nixl is not None
        self.agent = nixl_library.new_agent("raw", serves=False)
        self.memory = Arena(NBYTES).memory
        self.memory.zero_()
        self.agent.register_memory(self.memory)
        self.remote = self.agent.add_remote_agent(source.manifest.nixl.metadata)
        self.far = source.manifest.arena_address

    def read(self, nbytes: int = NBYTES):
        ends = [
            self.agent.get_xfer_descs(
                descriptors(np.array([0]), np.array([nbytes]), address, 0), "DRAM"
            )
            for address in (self.memory.data_ptr(), self.far)
        ]
        handle = self.agent.initialize_xfer("READ", *ends, self.remote)
        self.agent.transfer(handle)
        return handle

    def state(self, handle) -> str:
        try:
            return self.agent.check_xfer_state(handle)
        except Exception as error:  # noqa: BLE001 - NIXL's errors have no common base
            return type(error).__name__

    def finish(self, handle) -> str:
        assert until(lambda: self.state(handle) != "PROC")
        return self.state(handle)

    def progress(self) -> None:
        """Let the agent work; it has no thread of its own."""
        self.agent.get_new_notifs()


@contextlib.contextmanager
def raw_reader(nbytes: int = NBYTES) -> Iterator[tuple[SourceProcess, RawReader]]:
    with SourceProcess(nbytes, nixl=True) as source:
        reader = RawReader(source)
        assert reader.finish(reader.read(4096)) == "DONE"
        reader.memory.zero_()
        yield source, reader


def test_nixl_says_disconnected_soon_after_a_peer_is_killed():
    with raw_reader() as (source, reader):
        source.stop()
        handle = reader.read()
        source.kill()
        assert reader.finish(handle) == "nixlRemoteDisconnectError"


def test_nixl_never_ends_a_read_of_a_stopped_peer():
    with raw_reader() as (source, reader):
        source.stop()
        handle = reader.read()
        assert not until(lambda: reader.state(handle) != "PROC", timeout_s=1.0)
        source.resume()
        assert reader.finish(handle) == "DONE"


@pytest.mark.parametrize("removed", [False, True], ids=["released", "released and removed"])
def test_nixl_lets_late_bytes_into_a_buffer_whose_read_was_released(removed):
    with raw_reader() as (source, reader):
        source.stop()
        handle = reader.read()
        assert not until(lambda: reader.state(handle) != "PROC", timeout_s=0.2)
        handle.release()
        if removed:
            reader.agent.remove_remote_agent(reader.remote)
        before = reader.memory.clone()
        source.resume()

        def landed() -> bool:
            reader.progress()
            return not torch.equal(reader.memory, before)

        assert until(landed)


@pytest.mark.parametrize("lanes", [1, 2])
def test_our_buffer_is_busy_until_the_late_bytes_are_there_and_is_given_to_nobody(
    monkeypatch, lanes
):
    monkeypatch.setattr(nixl, "BATCH_BYTES", NBYTES // lanes)  # so that all of them come late
    monkeypatch.setattr(nixl, "LANE_BYTES", 0)
    transport = NixlTransport(lanes=lanes)
    pool = ScratchPool(transport, most_bytes=NBYTES)
    with SourceProcess(NBYTES, nixl=True) as source:
        fetch = Fetch(source.manifest, whole())
        abandoned = pool.take(NBYTES, soon())
        memory = abandoned.memory
        transport.fetch([fetch], memory, deadline=soon())
        memory.zero_()
        source.stop()
        with pytest.raises(RefitTimeoutError, match="reading from"):
            transport.fetch([fetch], memory, deadline=soon(0.5))
        pool.quarantine(abandoned)
        assert transport.busy(memory)
        with pytest.raises(RefitConfigError, match="busy"):
            transport.fetch([fetch], memory, deadline=soon())
        with pytest.raises(RefitConfigError, match="busy"):
            transport.unregister(memory)
        with pytest.raises(ScratchExhaustedError, match="in quarantine"):
            pool.take(NBYTES, soon(0.2))
        before = memory.clone()
        source.resume()
        # The bytes do land late; only then somebody gets the buffer.
        again = pool.take(NBYTES, soon())
        assert again.memory.data_ptr() == memory.data_ptr()
        assert not torch.equal(memory, before)
        assert torch.equal(memory, pattern(NBYTES, 1))
        memory.zero_()
        transport.fetch([fetch], memory, deadline=soon())
        assert torch.equal(memory, pattern(NBYTES, 1))
    pool.give_back(again)
    pool.close()
    transport.close()


def test_our_buffer_is_free_once_the_stopped_peer_is_killed():
    transport = NixlTransport()
    pool = ScratchPool(transport, most_bytes=NBYTES)
    with SourceProcess(NBYTES, nixl=True) as source:
        fetch = Fetch(source.manifest, whole())
        scratch = pool.take(NBYTES, soon())
        transport.fetch([fetch], scratch.memory, deadline=soon())
        source.stop()
        with pytest.raises(RefitTimeoutError):
            transport.fetch([fetch], scratch.memory, deadline=soon(0.5))
        pool.quarantine(scratch)
        assert pool.counts().quarantined
        source.kill()
        scratch = pool.take(NBYTES, soon())
        assert pool.counts().quarantined == 0
        pool.give_back(scratch)
    pool.close()
    transport.close()


def test_a_transport_with_an_abandoned_read_still_reads_from_other_sources():
    transport = NixlTransport()
    pool = ScratchPool(transport, most_bytes=2 * NBYTES)
    with SourceProcess(NBYTES, nixl=True) as stops, SourceProcess(NBYTES, nixl=True) as lives:
        scratch = pool.take(NBYTES, soon())
        fetch = Fetch(stops.manifest, whole())
        transport.fetch([fetch], scratch.memory, deadline=soon())
        stops.stop()
        with pytest.raises(RefitTimeoutError):
            transport.fetch([fetch], scratch.memory, deadline=soon(0.5))
        pool.quarantine(scratch)
        with pool.take(NBYTES, soon()) as other:
            transport.fetch([Fetch(lives.manifest, whole())], other.memory, deadline=soon())
            assert torch.equal(other.memory, pattern(NBYTES, 1))
        transport.close()
        assert transport.busy(scratch.memory)
    pool.close()


def test_nixl_refuses_an_agent_that_came_back_under_the_same_name():
    api = nixl_library._api()
    reader = nixl_library.new_agent("raw", serves=False)
    config = api.nixl_agent_config(backends=["UCX"])
    old, new = (api.nixl_agent("same-name", config) for _ in range(2))
    assert reader.add_remote_agent(old.get_agent_metadata()) in (b"same-name", "same-name")
    with pytest.raises(Exception, match="NIXL_ERR"):
        reader.add_remote_agent(new.get_agent_metadata())
    reader.remove_remote_agent("same-name")
    reader.add_remote_agent(new.get_agent_metadata())


def test_our_agents_never_have_a_name_twice():
    source = NixlSource()
    memory = Arena(MIB).memory
    names = []
    for _ in range(2):
        names.append(source.register(memory).name)
        source.unregister(memory)
    assert len(set(names)) == 2


def test_nixl_reads_memory_that_its_owner_has_deregistered():
    with raw_reader() as (source, reader):
        source.tell("deregister")
        assert reader.finish(reader.read()) == "DONE"
        assert torch.equal(reader.memory, pattern(NBYTES, 1))


def test_ours_is_lost_once_the_owner_gave_up_the_arena():
    transport = NixlTransport()
    with SourceProcess(MIB, nixl=True) as source:
        scratch = Arena(MIB).memory
        transport.register(scratch)
        fetch = Fetch(source.manifest, whole(MIB))
        transport.fetch([fetch], scratch, deadline=soon())
        source.tell("unregister")
        with pytest.raises(SourceLostError):
            transport.fetch([fetch], scratch, deadline=soon())
    transport.close()


def test_nixl_says_done_when_the_owner_overwrites_during_a_read_and_ours_says_gone():
    with raw_reader() as (source, reader):
        source.stop()
        handle = reader.read()
        assert not until(lambda: reader.state(handle) != "PROC", timeout_s=0.1)
        source.resume()
        source.tell("fill 9")
        assert reader.finish(handle) == "DONE"
        assert not torch.equal(reader.memory, pattern(NBYTES, 1))
        transport = NixlTransport()
        scratch = Arena(MIB).memory
        transport.register(scratch)
        source.tell("drop v1")
        with pytest.raises(SourceLostError, match="gone"):
            transport.fetch([Fetch(source.manifest, whole(MIB))], scratch, deadline=soon())
        transport.close()


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(Path(__file__).parent / "nixl_programs.py"), program]
    return subprocess.run(command, timeout=120, check=False, capture_output=True, text=True)


def test_nixl_crashes_when_a_tensor_that_is_registered_twice_is_deregistered():
    assert run("register_twice").returncode != 0


def test_ours_refuses_to_register_a_buffer_twice():
    source, transport = NixlSource(), NixlTransport()
    memory = Arena(MIB).memory
    source.register(memory)
    with pytest.raises(RefitConfigError, match="registered already"):
        source.register(memory)
    transport.register(memory)
    with pytest.raises(RefitConfigError, match="registered already"):
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
def test_a_process_that_used_nixl_exits_with_0(program, tls, monkeypatch):
    monkeypatch.setenv("UCX_TLS", tls)
    done = run(program)
    assert done.returncode == 0, done.stderr


def test_a_source_without_nixl_or_with_other_metadata_is_refused():
    transport = NixlTransport()
    with SourceProcess(MIB, nixl=True) as source:
        scratch = Arena(MIB).memory
        transport.register(scratch)
        plain = source.manifest
        assert plain.nixl is not None
        without = msgspec.structs.replace(plain, nixl=None)
        with pytest.raises(RefitConfigError, match="has no NIXL agent; read it over TCP"):
            transport.fetch([Fetch(without, whole(MIB))], scratch, deadline=soon())
        for changed, message in (
            ({"metadata": b"garbage"}, "NIXL refuses its metadata"),
            ({"metadata": b""}, "NIXL refuses its metadata"),
            ({"name": "other"}, "its metadata is of agent"),
        ):
            nixl = msgspec.structs.replace(plain.nixl, **changed)
            hostile = msgspec.structs.replace(plain, nixl=nixl)
            with pytest.raises(ProtocolError, match=message):
                transport.fetch([Fetch(hostile, whole(MIB))], scratch, deadline=soon())
        transport.fetch([Fetch(plain, whole(MIB))], scratch, deadline=soon())
    transport.close()


def test_a_source_whose_agent_ended_before_it_was_connected_to_is_lost():
    transport = NixlTransport()
    with SourceProcess(MIB, nixl=True) as source:
        scratch = Arena(MIB).memory
        transport.register(scratch)
        source.tell("unregister")
        with pytest.raises(SourceLostError):
            transport.fetch([Fetch(source.manifest, whole(MIB))], scratch, deadline=soon())
    transport.close()


def test_a_source_that_is_not_read_from_any_more_is_disconnected():
    transport = NixlTransport()
    with SourceProcess(MIB, nixl=True) as old, SourceProcess(MIB, nixl=True) as new:
        scratch = Arena(MIB).memory
        transport.register(scratch)
        transport.fetch([Fetch(old.manifest, whole(MIB))], scratch, deadline=soon())
        for _ in range(6):
            transport.fetch([Fetch(new.manifest, whole(MIB))], scratch, deadline=soon())
        assert new.manifest.nixl is not None
        assert list(transport._sources) == [new.manifest.nixl.name]
    transport.close()


@pytest.fixture
def two_lanes(monkeypatch):
    """A transport with two lanes, a source, its fetch and a registered buffer."""
    monkeypatch.setattr(nixl, "BATCH_BYTES", MIB)
    monkeypatch.setattr(nixl, "LANE_BYTES", 0)
    transport = NixlTransport(lanes=2)
    with SourceProcess(NBYTES, nixl=True) as source:
        scratch = Arena(NBYTES).memory
        transport.register(scratch)
        rows = np.repeat(whole(MIB).rows, NBYTES // MIB, axis=0)
        rows[:, 0] = rows[:, 1] = np.arange(len(rows)) * MIB
        yield transport, Fetch(source.manifest, ReadTable(rows)), scratch
    transport.close()


def test_a_large_fetch_is_carried_out_by_two_threads_at_once(two_lanes):
    transport, fetch, scratch = two_lanes
    both = threading.Barrier(2)
    seen: dict[int, int] = {}

    def meet(index: int, first: int, last: int) -> None:
        if threading.get_ident() not in seen:
            seen[threading.get_ident()] = first
            both.wait(30)

    transport.fetch([fetch], scratch, deadline=soon(), on_done=meet)
    assert len(seen) == 2
    assert torch.equal(scratch, pattern(NBYTES, 1))


def test_what_fails_in_the_second_lane_ends_the_fetch_and_leaves_it_usable(two_lanes):
    transport, fetch, scratch = two_lanes
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
        transport.fetch([fetch], scratch, deadline=soon(), on_done=fail)
    assert until(lambda: not transport.busy(scratch))
    scratch.zero_()
    transport.fetch([fetch], scratch, deadline=soon())
    assert torch.equal(scratch, pattern(NBYTES, 1))


def test_an_interrupt_while_the_second_lane_works_is_raised_when_that_has_ended(two_lanes):
    transport, fetch, scratch = two_lanes
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
            transport.fetch([fetch], scratch, deadline=soon(), on_done=on_done)
        assert ended == [1]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert until(lambda: not transport.busy(scratch))
    transport.fetch([fetch], scratch, deadline=soon())
    assert torch.equal(scratch, pattern(NBYTES, 1))


def test_a_lane_that_cannot_be_made_is_done_without(two_lanes, monkeypatch):
    transport, fetch, scratch = two_lanes

    def refuse(*_: object, **__: object) -> None:
        raise RefitConfigError("no more memory can be registered")

    monkeypatch.setattr(nixl, "Lane", refuse)
    transport.fetch([fetch], scratch, deadline=soon())
    assert torch.equal(scratch, pattern(NBYTES, 1))


def test_importing_nixl_leaves_the_logging_module_as_it_was():
    code = (
        "import logging; from refit_mx.transports.nixl import nixl_available; "
        "assert nixl_available() is None; assert logging.raiseExceptions"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert logging.raiseExceptions


def test_the_environment_is_prepared_only_where_the_user_has_not_and_there_is_no_rdma(tmp_path):
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


def test_nixl_is_not_available_where_yuanrongs_libraries_are_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "yr.datasystem", types.ModuleType("yr.datasystem"))
    assert "this process holds yr.datasystem" in (nixl_available() or "")
