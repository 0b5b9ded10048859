"""A slow source is not lost; a silent one is lost soon.

These tests use internals: a fetch with a stall deadline, and the size of NIXL's transfers.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
import torch
from refit_fixtures import needs_nixl, new_transport
from transport_processes import SourceProcess, one_read, pattern

from refit_mx import Deadline, ReceiverSettings, RefitTimeoutError
from refit_mx.deadline import StallDeadline
from refit_mx.transports import nixl
from refit_mx.transports.base import SourceReads
from refit_mx.transports.nixl_lane import IN_FLIGHT
from refit_mx.transports.source_client import SourceClient

pytestmark = pytest.mark.slow
MIB = 1 << 20
STALL_S = 1.0


def stall(timeout_s: float = 60.0) -> StallDeadline:
    return StallDeadline(Deadline(timeout_s, "test"), STALL_S, "test")


class SlowLink:
    """A link to an address that forwards ``burst`` bytes every ``pause_s`` in each direction.

    Attributes:
        address: address to connect to.
        maximum: bytes forwarded from the remote end before the link falls silent.
    """

    def __init__(self, address: str, *, burst: int, pause_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._remote = (host, int(port))
        self._burst, self._pause_s = burst, pause_s
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.maximum = 1 << 62
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                local = self._listener.accept()[0]
                remote = socket.create_connection(self._remote)
                self._sockets += [local, remote]
                for ends in ((local, remote, False), (remote, local, True)):
                    threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, counted: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(self._burst):
                if counted and passed >= self.maximum:
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
def slowly_over_tcp() -> Iterator[tuple[SlowLink, SourceReads]]:
    """Yield a link of about 5 MB/s and reads of one batch, which take three stall time-outs."""
    with SourceProcess(16 * MIB) as source:
        link = SlowLink(source.manifest.endpoint, burst=1 << 18, pause_s=0.05)
        manifest = msgspec.structs.replace(source.manifest, endpoint=link.address)
        yield link, SourceReads(manifest, one_read(16 * MIB))
        link.close()


def test_slow_batch_over_tcp_is_no_stall(slowly_over_tcp):
    _, wanted = slowly_over_tcp
    transport = new_transport("tcp")
    scratch = torch.zeros(16 * MIB, dtype=torch.uint8)
    transport.register(scratch)
    done = transport.read([wanted], scratch, deadline=stall())
    assert done.seconds > 2 * STALL_S
    assert torch.equal(scratch[: 16 * MIB], pattern(16 * MIB, 1))
    transport.close()


def test_silent_source_over_tcp_is_a_stall(slowly_over_tcp):
    link, wanted = slowly_over_tcp
    link.maximum = 4 * MIB
    transport = new_transport("tcp")
    scratch = torch.zeros(16 * MIB, dtype=torch.uint8)
    transport.register(scratch)
    started = time.monotonic()
    with pytest.raises(RefitTimeoutError, match="no data for 1 s"):
        transport.read([wanted], scratch, deadline=stall())
    assert time.monotonic() - started < 10
    transport.close()


@contextlib.contextmanager
def pulsing(sources: list[SourceProcess]) -> Iterator[None]:
    """Let sources run for only two milliseconds in each quarter of a second."""
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
def over_nixl(monkeypatch) -> Iterator[tuple[list[SourceProcess], list[SourceReads]]]:
    """Yield two sources that count as remote, and reads of many small transfers from each."""
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    monkeypatch.setattr(SourceClient, "local", False)
    monkeypatch.setattr(nixl, "BATCH_BYTES", 16 * MIB)
    monkeypatch.setattr(nixl, "MIN_BATCH_BYTES", MIB // 2)
    monkeypatch.setattr(nixl, "IN_FLIGHT_BYTES", 4 * MIB)
    with SourceProcess(32 * MIB, nixl=True) as first, SourceProcess(32 * MIB, nixl=True) as second:
        sources = [first, second]
        source_reads = [
            SourceReads(source.manifest, one_read(32 * MIB, index * 32 * MIB))
            for index, source in enumerate(sources)
        ]
        yield sources, source_reads


@needs_nixl
@pytest.mark.parametrize("silent", [False, True], ids=["steady", "silent"])
def test_slow_transfers_over_nixl_are_no_stall(over_nixl, silent):
    sources, source_reads = over_nixl
    transport = new_transport("nixl")
    scratch = torch.zeros(64 * MIB, dtype=torch.uint8)
    transport.register(scratch)
    transport.read(source_reads, scratch, deadline=stall())
    scratch.zero_()
    deadline = stall()
    moves = 0

    def on_moved() -> None:
        nonlocal moves
        moves += 1
        if silent and moves == 3:
            for source in sources:
                source.stop()

    record_progress = deadline.record_progress
    deadline.record_progress = lambda: (record_progress(), on_moved())  # type: ignore[method-assign]
    started = time.monotonic()
    if silent:
        with pytest.raises(RefitTimeoutError, match="no data for 1 s"):
            transport.read(source_reads, scratch, deadline=deadline)
        assert time.monotonic() - started < 10
    else:
        with pulsing(sources):
            transport.read(source_reads, scratch, deadline=deadline)
        assert time.monotonic() - started > 2 * STALL_S
        assert torch.equal(scratch[: 64 * MIB], pattern(32 * MIB, 1).repeat(2))
    for source in sources:
        source.kill()
    transport.close()


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("sources", [1, 4, 16, 64])
def test_nixl_transfers_fit_into_the_stall_timeout_at_1_gbit(sources, lanes):
    batch = nixl.batch_bytes(sources * lanes, copies=True, local=False)
    assert MIB <= batch <= nixl.BATCH_BYTES
    seconds = batch * sources * lanes * IN_FLIGHT / 125e6
    assert seconds < ReceiverSettings().stall_timeout_s / 4


@pytest.mark.parametrize("sources", [1, 4])
def test_local_sources_are_read_at_the_maximum_length(sources):
    assert nixl.batch_bytes(sources * nixl.MAX_LANES, copies=True, local=True) == (
        nixl.NixlTransport.max_read_bytes
    )


@needs_nixl
@pytest.mark.parametrize(
    ("remote", "maximum"), [(0, nixl.LOCAL_IN_FLIGHT_BYTES), (1, nixl.IN_FLIGHT_BYTES)]
)
def test_one_remote_source_makes_all_transfers_small(monkeypatch, remote, maximum):
    in_flight_bytes: list[int] = []
    batch_bytes = nixl.batch_bytes

    def record_batch_bytes(readers: int, *, copies: bool, local: bool) -> int:
        size = batch_bytes(readers, copies=copies, local=local)
        in_flight_bytes.append(size * readers * IN_FLIGHT)
        return size

    monkeypatch.setattr(nixl, "batch_bytes", record_batch_bytes)
    with contextlib.ExitStack() as stack:
        sources = [stack.enter_context(SourceProcess(32 * MIB, nixl=True)) for _ in range(8)]
        links = {source.manifest.endpoint for source in sources[:remote]}
        local = SourceClient.local.fget

        monkeypatch.setattr(
            SourceClient,
            "local",
            property(lambda self: self._source.endpoint not in links and local(self)),
        )
        source_reads = [
            SourceReads(source.manifest, one_read(32 * MIB, index * 32 * MIB))
            for index, source in enumerate(sources)
        ]
        transport = stack.enter_context(contextlib.closing(new_transport("nixl")))
        scratch = torch.zeros(256 * MIB, dtype=torch.uint8)
        transport.register(scratch)
        transport.read(source_reads, scratch, deadline=Deadline(60, "test"))
        assert torch.equal(scratch[: 256 * MIB], pattern(32 * MIB, 1).repeat(8))
    assert in_flight_bytes == [maximum]


@pytest.mark.parametrize("sources", [1, 8, 64, 512])
def test_rdma_transfers_fit_into_the_stall_timeout_at_25_gbit(sources):
    batch = nixl.batch_bytes(sources, copies=False, local=False)
    seconds = batch * sources * IN_FLIGHT / 3.125e9
    assert seconds < ReceiverSettings().stall_timeout_s / 2
