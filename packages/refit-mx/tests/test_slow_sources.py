"""A source whose bytes come slowly is not lost; one that fell silent is, and soon."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch
from refit_fixtures import needs_nixl, new_transport
from transport_processes import SourceProcess, pattern

from refit_mx.arena import Arena
from refit_mx.deadline import Deadline, StallDeadline
from refit_mx.errors import RefitTimeoutError
from refit_mx.reads import ReadTable
from refit_mx.settings import ReceiverSettings
from refit_mx.source_client import SourceClient
from refit_mx.transports import nixl
from refit_mx.transports.base import Fetch
from refit_mx.transports.nixl_lane import IN_FLIGHT

pytestmark = pytest.mark.slow
MIB = 1 << 20
STALL_S = 1.0


def stall(timeout_s: float = 60.0) -> StallDeadline:
    return StallDeadline(Deadline(timeout_s, "test"), STALL_S, "test")


def whole(nbytes: int, first: int = 0) -> ReadTable:
    return ReadTable(np.array([[0, first, nbytes, 1, 0, 0, 1, 0, 0]], np.int64))


class SlowLink:
    """A link to an address that lets ``burst`` bytes through every ``pause_s`` in each direction.

    Attributes:
        address: to connect to instead.
        most: bytes that it lets through from the far end before it falls silent.
    """

    def __init__(self, address: str, *, burst: int, pause_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._far = (host, int(port))
        self._burst, self._pause_s = burst, pause_s
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.most = 1 << 62
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(self._far)
                self._sockets += [near, far]
                for ends in ((near, far, False), (far, near, True)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(self._burst):
                if counted and passed >= self.most:
                    self._over.wait()
                sink.sendall(data)
                passed += len(data)
                if len(data) == self._burst:
                    self._over.wait(self._pause_s)

    def close(self) -> None:
        self._over.set()
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture
def slowly_over_tcp() -> Iterator[tuple[SlowLink, Fetch]]:
    """One batch on one connection, about 5 MB/s: three times as long as a stall may be."""
    with SourceProcess(16 * MIB) as source:
        link = SlowLink(source.manifest.endpoint, burst=1 << 18, pause_s=0.05)
        manifest = msgspec.structs.replace(source.manifest, endpoint=link.address)
        yield link, Fetch(manifest, whole(16 * MIB))
        link.close()


def test_over_tcp_a_batch_that_comes_slowly_is_no_stall(slowly_over_tcp):
    _, fetch = slowly_over_tcp
    transport = new_transport("tcp")
    scratch = Arena(16 * MIB).memory
    transport.register(scratch)
    done = transport.fetch([fetch], scratch, deadline=stall())
    assert done.seconds > 2 * STALL_S
    assert torch.equal(scratch[: 16 * MIB], pattern(16 * MIB, 1))
    transport.close()


def test_over_tcp_a_source_that_falls_silent_within_a_batch_is_a_stall(slowly_over_tcp):
    link, fetch = slowly_over_tcp
    link.most = 4 * MIB
    transport = new_transport("tcp")
    scratch = Arena(16 * MIB).memory
    transport.register(scratch)
    started = time.monotonic()
    with pytest.raises(RefitTimeoutError, match="nothing came for 1 s"):
        transport.fetch([fetch], scratch, deadline=stall())
    assert time.monotonic() - started < 10
    transport.close()


@contextlib.contextmanager
def pulsing(sources: list[SourceProcess]) -> Iterator[None]:
    """They work for some milliseconds of each quarter of a second."""
    over = threading.Event()

    def pulse() -> None:
        while not over.is_set():
            for source in sources:
                source.stop()
            over.wait(0.25)
            for source in sources:
                source.resume()
            over.wait(0.002)

    thread = threading.Thread(target=pulse)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.fixture
def over_nixl(monkeypatch) -> Iterator[tuple[list[SourceProcess], list[Fetch]]]:
    """Two sources, as between hosts, of which all bytes would be under way at once."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setattr(SourceClient, "local", False)
    monkeypatch.setattr(nixl, "BATCH_BYTES", 16 * MIB)
    monkeypatch.setattr(nixl, "LEAST_BATCH_BYTES", MIB // 2)
    monkeypatch.setattr(nixl, "IN_FLIGHT_BYTES", 4 * MIB)
    with SourceProcess(32 * MIB, nixl=True) as one, SourceProcess(32 * MIB, nixl=True) as two:
        sources = [one, two]
        fetches = [
            Fetch(source.manifest, whole(32 * MIB, index * 32 * MIB))
            for index, source in enumerate(sources)
        ]
        yield sources, fetches


@needs_nixl
@pytest.mark.parametrize("silent", [False, True], ids=["steady", "silent"])
def test_over_nixl_transfers_are_small_enough_that_one_ends_before_a_stall(over_nixl, silent):
    sources, fetches = over_nixl
    transport = new_transport("nixl")
    scratch = Arena(64 * MIB).memory
    transport.register(scratch)
    transport.fetch(fetches, scratch, deadline=stall())
    scratch.zero_()
    deadline = stall()
    told: list[int] = []

    def on_moved() -> None:
        told.append(1)
        if silent and len(told) == 3:
            for source in sources:
                source.stop()

    moved = deadline.moved
    deadline.moved = lambda: (moved(), on_moved())  # type: ignore[method-assign]
    started = time.monotonic()
    if silent:
        with pytest.raises(RefitTimeoutError, match="nothing came for 1 s"):
            transport.fetch(fetches, scratch, deadline=deadline)
        assert time.monotonic() - started < 10
    else:
        with pulsing(sources):
            transport.fetch(fetches, scratch, deadline=deadline)
        assert time.monotonic() - started > 2 * STALL_S
        assert torch.equal(scratch[: 64 * MIB], pattern(32 * MIB, 1).repeat(2))
    for source in sources:
        source.kill()
    transport.close()


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("sources", [1, 4, 16, 64])
def test_what_is_under_way_over_nixl_takes_a_network_of_1_gigabit_a_part_of_a_stall(sources, lanes):
    batch = nixl.batch_bytes(sources * lanes, copies=True, local=False)
    assert MIB <= batch <= nixl.BATCH_BYTES
    seconds = batch * sources * lanes * IN_FLIGHT / 125e6
    assert seconds < ReceiverSettings().stall_timeout_s / 4


@pytest.mark.parametrize("sources", [1, 4])
def test_from_sources_of_this_machine_whole_pieces_are_read(sources):
    assert nixl.batch_bytes(sources * nixl.MOST_LANES, copies=True, local=True) == (
        nixl.NixlTransport.piece_bytes
    )


@needs_nixl
@pytest.mark.parametrize(
    ("far", "most"), [(0, nixl.LOCAL_IN_FLIGHT_BYTES), (1, nixl.IN_FLIGHT_BYTES)]
)
def test_one_source_of_another_machine_makes_the_transfers_of_all_small(monkeypatch, far, most):
    asked: list[int] = []
    batch_bytes = nixl.batch_bytes

    def noted(readers: int, *, copies: bool, local: bool) -> int:
        found = batch_bytes(readers, copies=copies, local=local)
        asked.append(found * readers * IN_FLIGHT)
        return found

    monkeypatch.setattr(nixl, "batch_bytes", noted)
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(SourceProcess(32 * MIB, nixl=True)) for _ in range(8)]
        links = {source.manifest.endpoint for source in sources[:far]}
        local = SourceClient.local.fget

        monkeypatch.setattr(
            SourceClient,
            "local",
            property(lambda self: self._source.endpoint not in links and local(self)),
        )
        fetches = [
            Fetch(source.manifest, whole(32 * MIB, index * 32 * MIB))
            for index, source in enumerate(sources)
        ]
        transport = stack.enter_context(contextlib.closing(new_transport("nixl")))
        scratch = Arena(256 * MIB).memory
        transport.register(scratch)
        transport.fetch(fetches, scratch, deadline=Deadline(60, "test"))
        assert torch.equal(scratch[: 256 * MIB], pattern(32 * MIB, 1).repeat(8))
    assert asked == [most]


@pytest.mark.parametrize("sources", [1, 8, 64, 512])
def test_with_rdma_it_takes_25_gigabits_a_part_of_a_stall(sources):
    batch = nixl.batch_bytes(sources, copies=False, local=False)
    seconds = batch * sources * IN_FLIGHT / 3.125e9
    assert seconds < ReceiverSettings().stall_timeout_s / 2
