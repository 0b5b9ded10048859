"""Light clients of a data plane, many processes at once: they import neither torch nor Ray.

A client sends the requests that `TQDataPlaneClient` sends, and writes prepared bytes to the units.
So it costs what the data plane costs, without the encoding of values. One process imports the
modules, and forks the clients. Imports internals: it sends requests as the client does, without
torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import numpy as np
from integration.benchmarks.garbage import freeze_garbage
from integration.benchmarks.growth_sample import (
    BULK_BYTES,
    BULK_ROW_BYTES,
    BULK_ROWS,
    PER_SAMPLE,
    PER_TOKEN,
    ROWS,
    TASK,
    TOKENS,
)
from numpy.typing import NDArray

from dataplane_core.ledger import ClaimRequest
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.wire import Address, Link
from dataplane_tq.packed.layout import FieldLayout
from dataplane_tq.packed.slices import Slices
from dataplane_tq.packed.unit_client import Transport, UnitClient
from dataplane_tq.packed.unit_wire import UnitAddress

_TIMEOUT_S = 60.0
_LEASE_S = 60.0
_ANSWER_S = 120.0
_ITEM = {"torch.int64": 8, "torch.float32": 4, "torch.uint8": 1}


@dataclass(frozen=True)
class Store:
    """Data with which a light client connects.

    Attributes:
        directory: address of the directory.
        units: name to address of each storage unit.
        token: secret that opens the units.
    """

    directory: Address
    units: Mapping[str, UnitAddress]
    token: bytes


@dataclass(frozen=True)
class Cycles:
    """Request for cycles on a partition: a claim, its acknowledgment, a clear and a put.

    Attributes:
        clients: number of clients that run; the others are idle.
        partition: name of the partition.
        begin: when operations begin to count, on the monotonic clock. The clients begin at once, so
            that the requests of all are under way then.
        end: when operations no longer count.
    """

    clients: int
    partition: str
    begin: float
    end: float


@dataclass(frozen=True)
class Bulk:
    """Request to put, get and clear one large batch several times.

    Attributes:
        clients: number of clients that run; the others are idle.
        partition: name of the partition.
        transport: transport to the units.
        times: number of batches.
    """

    clients: int
    partition: str
    transport: Transport
    times: int


@dataclass(frozen=True)
class Done:
    """One client's answer to a request.

    Attributes:
        seconds: operation to its durations.
        cpu_s: CPU time that the client's process used.
        operations: number of operations that ended while they counted; only of `Cycles`.
    """

    seconds: Mapping[str, list[float]]
    cpu_s: float
    operations: int = 0


class LightClient:
    """Client of a store for the fields of this benchmark.

    Args:
        store: the store.
        number: number of the client, part of its sample ids.
    """

    def __init__(self, store: Store, number: int) -> None:
        self._link = Link(store.directory, timeout_s=_TIMEOUT_S)
        connect = partial(self._connect, store)
        self._units: Mapping[Transport, Mapping[str, UnitClient]] = {
            "auto": connect("auto"),
            "shm": connect("shm"),
            "tcp": connect("tcp"),
        }
        self._prefix = f"client-{number:02d}"
        self._put = 0
        self._layouts = small_layouts(ROWS)
        self._small = {each.name: np.zeros(each.nbytes, np.uint8) for each in self._layouts}
        self._bulk: NDArray[np.uint8] | None = None

    @staticmethod
    def _connect(store: Store, transport: Transport) -> dict[str, UnitClient]:
        return {
            name: UnitClient(address, store.token, transport=transport)
            for name, address in store.units.items()
        }

    def put(
        self,
        partition: str,
        layouts: list[FieldLayout],
        values: Mapping[str, NDArray[np.uint8]],
        transport: Transport = "auto",
    ) -> list[str]:
        """Put new samples with tags; return their ids."""
        self._put += 1
        ids = [f"{self._prefix}_{self._put:07d}_g{row}" for row in range(layouts[0].rows)]
        kinds = {layout.name: layout.kind for layout in layouts}
        with self._link.session("put") as session:
            begin = p.BeginPut(partition, ids, kinds, layouts, "", None, _TIMEOUT_S)
            for block in session.ask(begin, p.PutAnswer).blocks:
                layout = block.layout
                flat, (start, _) = values[layout.name], layout.row_range(0)
                piece = block.offset, Slices(flat, [start], [layout.nbytes])
                self._units[transport][block.unit].write([piece], _TIMEOUT_S)
            tags = [{"weight_version": 1, "input_lengths": TOKENS} for _ in ids]
            session.ask(p.CommitPut(tags), type(None))
        return ids

    def cycles(self, request: Cycles) -> Done:
        """Run cycles until the round ends; return the seconds of each that ended in it."""
        cpu, seconds, operations = time.process_time(), [], 0
        before = now = time.monotonic()
        while now <= request.end:
            for _ in self._cycle(request.partition):
                now = time.monotonic()
                operations += request.begin <= now <= request.end
            if request.begin <= now <= request.end:
                seconds.append(now - before)
            before = now
        return Done({"cycle": seconds}, time.process_time() - cpu, operations)

    def _cycle(self, partition: str) -> Iterator[None]:
        """Run a cycle, and yield after each operation."""
        wanted = ClaimRequest(TASK, ("input_ids",), ROWS, lease_s=_LEASE_S)
        claim = p.Claim(partition, wanted, _TIMEOUT_S)
        claimed = self._link.ask("claim", claim, p.ClaimAnswer, _TIMEOUT_S)
        yield
        assert claimed.token is not None
        ids = claimed.sample_ids
        update = p.UpdateLease(partition, claimed.token, ids, "acknowledge", TASK)
        self._link.ask("acknowledge", update, list[str])
        yield
        self._clear(partition, ids)
        yield
        self.put(partition, self._layouts, self._small)
        yield

    def _clear(self, partition: str, ids: list[str]) -> None:
        with self._link.session("clear") as session:
            session.ask(p.Clear(partition, ids, False, _TIMEOUT_S), p.ClearAnswer)
            session.ask(p.Dropped(), type(None))

    def bulk(self, request: Bulk) -> Done:
        """Put, get and clear large batches; return the seconds of each put and get."""
        if self._bulk is None:
            self._bulk = np.ones(BULK_BYTES, np.uint8)
        cpu, puts, gets = time.process_time(), [], []
        for _ in range(request.times):
            began = time.perf_counter()
            ids = self.put(
                request.partition,
                [_BULK_LAYOUT],
                {_BULK_LAYOUT.name: self._bulk},
                request.transport,
            )
            puts.append(time.perf_counter() - began)
            began = time.perf_counter()
            self._get(request, ids, self._bulk)
            gets.append(time.perf_counter() - began)
            self._clear(request.partition, ids)
        return Done({"put": puts, "get": gets}, time.process_time() - cpu)

    def _get(self, request: Bulk, ids: list[str], into: NDArray[np.uint8]) -> None:
        """Copy a batch of `bulk` from the units into existing memory."""
        with self._link.session("get") as session:
            read = p.Read(request.partition, ids, [_BULK_LAYOUT.name])
            [parts] = session.ask(read, p.ReadAnswer).parts
            at = 0
            for block in parts.blocks:
                nbytes = block.layout.nbytes
                unit = self._units[request.transport][block.unit]
                span = [(block.offset, block.offset + nbytes)]
                unit.read_into(span, [into[at : at + nbytes].data], _TIMEOUT_S)
                at += nbytes
            assert at == BULK_BYTES
            session.send(p.Unpin())


def small_layouts(rows: int) -> list[FieldLayout]:
    """Return the layouts of eight fields of a GRPO sample of few tokens."""
    per_token = [
        FieldLayout(
            name, kind, True, (), np.cumsum([TOKENS * _ITEM[kind]] * rows).tobytes(), 0, rows
        )
        for name, kind in PER_TOKEN.items()
    ]
    per_sample = [
        FieldLayout(name, kind, False, (), b"", _ITEM[kind], rows)
        for name, kind in PER_SAMPLE.items()
    ]
    return [*per_token, *per_sample]


_BULK_LAYOUT = FieldLayout(
    "bulk", "torch.uint8", False, (BULK_ROW_BYTES,), b"", BULK_ROW_BYTES, BULK_ROWS
)


def light_clients(pipe: Connection, store: Store, count: int) -> None:
    """Fork ``count`` clients, and forward each request to them until one is "stop".

    The first message is "ready"; an answer is the list of `Done` of the clients that ran.
    """
    # Objects that exist now are shared with the forks; a collection in a fork would copy them.
    freeze_garbage()
    pipes: list[Connection] = []
    for number in range(count):
        parent_end, child_end = Pipe()
        if os.fork() == 0:
            status = 1
            try:
                for other in (pipe, parent_end, *pipes):
                    other.close()
                _serve(child_end, LightClient(store, number))
                status = 0
            finally:
                os._exit(status)
        child_end.close()
        pipes.append(parent_end)
    pipe.send("ready")
    while (request := pipe.recv()) != "stop":
        running = pipes[: request.clients]
        for each in running:
            each.send(request)
        pipe.send([_answer(each) for each in running])


def _answer(pipe: Connection) -> Done:
    if not wait([pipe], _ANSWER_S):
        raise RuntimeError(f"a light client did not answer within {_ANSWER_S:g} s")
    done: Done = pipe.recv()
    return done


def _serve(pipe: Connection, client: LightClient) -> None:
    """Answer requests until the parent is gone."""
    run: Callable[..., Done]
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            return
        run = client.cycles if isinstance(request, Cycles) else client.bulk
        pipe.send(run(request))
