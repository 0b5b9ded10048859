"""`Directory`: the one place that knows what is stored, who claimed it, and where it lies.

It serves one store's `Ledger` and, for the packed backend, its `Catalogue`, from one thread with
one event loop: between two awaits nothing else runs, so every request is atomic. It never holds a
sample's values, and it imports neither torch nor TransferQueue.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any  # Any: answers differ by request

import msgspec
import numpy as np
import structlog

from dataplane_core import (
    CapacityExceeded,
    DataPlaneError,
    DeadlineExceededError,
    InvalidRequestError,
    PartitionSummary,
    SampleState,
    TaskCounts,
    UnavailableError,
)
from dataplane_core.ledger import Ledger, PutTicket, Row
from dataplane_core.ledger.inspect import page, summarise
from dataplane_tq import protocol as p
from dataplane_tq.packed.catalogue import Block, Catalogue, UnitSpec
from dataplane_tq.wire import HEADER, MAX_FRAME, TOKEN_BYTES, Address, Failure, Reply

logger = structlog.get_logger("dataplane_tq.directory")

_HANDSHAKE_S = 5.0
_MAX_PAGE = 10_000


class Directory:
    """The server. Threads: one, started by `start`; other methods are for that thread alone.

    Args:
        capacity: samples that all partitions together may hold.
        units: the packed backend's units; empty for other backends.
        host: address to listen on.
    """

    def __init__(self, capacity: int, units: Sequence[UnitSpec], host: str) -> None:
        self.catalogue = Catalogue(units) if units else None
        self.ledger = Ledger(capacity, self._discard)
        self.failure: DataPlaneError | None = None
        self.leftovers: dict[str, Leftovers] = defaultdict(Leftovers)
        self._host = host
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._loop = asyncio.new_event_loop()
        self._changed: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._expiry: asyncio.TimerHandle | None = None

    def start(self) -> Address:
        """Listen, and serve until the process ends."""
        listening = threading.Event()
        thread = threading.Thread(target=self._serve, args=(listening,), daemon=True)
        thread.start()
        if not listening.wait(10.0):
            raise UnavailableError(f"the partition directory could not listen on {self._host}")
        return Address(self._host, self._port, self._token)

    def _serve(self, listening: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._connected, self._host, 0, backlog=1024)
        )
        self._port: int = server.sockets[0].getsockname()[1]
        # Full collections over the ledger's many small objects would be its worst latencies.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 1_000)
        listening.set()
        self._loop.run_forever()

    def fail(self, error: DataPlaneError) -> None:
        """Make every request fail from now on, those that wait included; from any thread."""

        def mark() -> None:
            self.failure = error
            for partition_id in list(self._changed):
                self.changed(partition_id)

        self._loop.call_soon_threadsafe(mark)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            token = await asyncio.wait_for(reader.readexactly(TOKEN_BYTES), _HANDSHAKE_S)
            if hmac.compare_digest(token, self._token):
                await Connection(self, reader, writer).serve()
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            pass  # the peer went away, which is how connections end
        finally:
            writer.close()

    def changed(self, partition_id: str) -> None:
        """Wake whoever waits for the partition."""
        waiting = self._changed.pop(partition_id, None)
        for future in waiting or ():
            if not future.done():
                future.set_result(None)
        self._plan_expiry()

    def everything_changed(self) -> None:
        """Wake whoever waits: there may be room."""
        for partition_id in list(self._changed):
            self.changed(partition_id)

    async def wait(self, partition_id: str, timeout_s: float) -> None:
        """Return at the partition's next change, or after ``timeout_s``."""
        future = self._loop.create_future()
        self._changed[partition_id].add(future)
        try:
            await asyncio.wait_for(future, max(0.0, timeout_s))
        except TimeoutError:
            pass
        finally:
            if partition_id in self._changed:
                self._changed[partition_id].discard(future)

    def _plan_expiry(self) -> None:
        """Be there when the next lease runs out: nobody else would notice."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        moment = self.ledger.next_expiry()
        if moment is not None:
            delay = max(0.0, moment - time.monotonic())
            self._expiry = self._loop.call_later(delay, self.expire)

    def expire(self) -> None:
        """End the leases whose time is over, and wake who waits for their samples."""
        for partition in self.ledger.expire(time.monotonic()):
            self.changed(partition.declaration.partition_id)

    def _discard(self, cells: list[Any]) -> None:
        if self.catalogue is not None:
            self.catalogue.free(cells)
            self.everything_changed()


class Leftovers:
    """Rows of one partition that were cleared here and may still be in TransferQueue.

    Attributes:
        orphans: those that nobody is dropping, with the fields they had.
        pinned: those that a read still needs.
        dropping: those that a connection is dropping.
        closing: how many connections are dropping the partition as a whole.
    """

    def __init__(self) -> None:
        self.orphans: dict[str, tuple[str, ...]] = {}
        self.pinned: dict[str, Row] = {}
        self.dropping: set[str] = set()
        self.closing = 0

    def settle(self) -> None:
        """Move rows whose reads have ended to the orphans."""
        free = [row for row in self.pinned.values() if row.pins == 0]
        for row in free:
            del self.pinned[row.sample_id]
            self.orphans[row.sample_id] = tuple(row.cells)

    def take(self, only: Sequence[str] | None = None) -> Drop:
        """Hand orphans to a connection to drop: all, or those among ``only``."""
        self.settle()
        asked = list(self.orphans) if only is None else only
        taken = {
            sample_id: self.orphans.pop(sample_id)
            for sample_id in asked
            if sample_id in self.orphans
        }
        self.dropping.update(taken)
        return taken

    def blocks(self, sample_ids: Sequence[str]) -> bool:
        """Whether one of the samples cannot be put before a drop has ended."""
        if self.closing:
            return True
        self.settle()
        if not (self.dropping or self.pinned):
            return False
        return any(
            sample_id in self.dropping or sample_id in self.pinned for sample_id in sample_ids
        )


Drop = dict[str, tuple[str, ...]]
"""Samples to drop from TransferQueue, with the fields they had there."""


def _grouped(drop: Drop) -> list[p.Leftover]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for sample_id, fields in drop.items():
        groups.setdefault(fields, []).append(sample_id)
    return [p.Leftover(ids, list(fields)) for fields, ids in groups.items()]


class Connection:
    """One client connection: its requests in turn, and what they left under way."""

    def __init__(
        self, directory: Directory, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._directory = directory
        self._ledger = directory.ledger
        self._reader = reader
        self._writer = writer
        self._put: tuple[PutTicket, list[Block]] | None = None
        self._pinned: list[Row] = []
        self._dropping: tuple[str, Drop] | None = None
        self._closing: Leftovers | None = None

    async def serve(self) -> None:
        """Answer until the client goes away, then undo what it left under way."""
        try:
            while True:
                (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if length > MAX_FRAME:
                    return
                body = await self._reader.readexactly(length)
                reply = await self._reply(body)
                if reply is not None:
                    frame = _encoder.encode(reply)
                    self._writer.write(HEADER.pack(len(frame)) + frame)
                    if self._writer.transport.get_write_buffer_size() > MAX_FRAME // 4:
                        await self._writer.drain()
        finally:
            self._undo()

    async def _reply(self, body: bytes) -> Reply | None:
        try:
            request = _requests.decode(body)
            if self._directory.failure is not None:
                raise self._directory.failure
            answer = _HANDLERS[type(request)](self, request)
            if asyncio.iscoroutine(answer):
                answer = await answer
        except DataPlaneError as error:
            return Reply(failure=Failure.of(error))
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            logger.exception("request_failed")
            return Reply(failure=Failure.of(InvalidRequestError(f"directory: {error}")))
        if isinstance(request, p.Unpin):
            return None
        return Reply(answer=msgspec.Raw(_encoder.encode(answer)))

    def _undo(self) -> None:
        self._end_read()
        if self._put is not None:
            self._give_up_put()
        if self._dropping is not None:
            partition_id, drop = self._dropping
            left = self._directory.leftovers[partition_id]
            left.dropping.difference_update(drop)
            left.orphans.update(drop)
            self._directory.changed(partition_id)
        self._end_closing()

    def _give_up_put(self) -> None:
        """Undo a put that was begun: what it placed, reserved, and may have left behind."""
        assert self._put is not None
        ticket, blocks = self._put
        self._put = None
        self._ledger.abort_put(ticket)
        for block in blocks:
            self._catalogue.free_block(block)
        partition = self._ledger.partitions.get(ticket.partition_id)
        if partition is not None:
            left = self._directory.leftovers[ticket.partition_id]
            for sample_id in ticket.reserved:
                if sample_id not in partition.rows and sample_id not in partition.reserved:
                    left.orphans.setdefault(sample_id, tuple(ticket.kinds))
        self._directory.everything_changed()

    def _end_closing(self) -> None:
        if self._closing is not None:
            self._closing.closing -= 1
            self._closing = None

    @property
    def _catalogue(self) -> Catalogue:
        assert self._directory.catalogue is not None
        return self._directory.catalogue

    def _check_failure(self) -> None:
        if self._directory.failure is not None:
            raise self._directory.failure

    def _register(self, request: p.Register) -> None:
        self._ledger.register(request.declaration)
        self._directory.changed(request.declaration.partition_id)

    async def _begin_put(self, request: p.BeginPut) -> p.PutAnswer:
        if self._put is not None:
            raise InvalidRequestError("this connection already has a put under way")
        deadline = time.monotonic() + request.timeout_s
        while True:
            self._check_failure()
            left = self._directory.leftovers[request.partition_id]
            busy = left.blocks(request.sample_ids)
            ticket = placed = None
            if not busy:
                ticket = self._ledger.begin_put(
                    request.partition_id, request.sample_ids, request.kinds, request.token
                )
            if ticket is not None:
                placed = self._place(ticket, request)
                if placed is not None:
                    self._put = ticket, placed
                    # Rows left over by a clear that died must go before their ids come back.
                    stale = left.take(request.sample_ids)
                    self._dropping = (request.partition_id, stale) if stale else None
                    return p.PutAnswer(
                        self._ledger.partition(request.partition_id).declaration.enums,
                        placed,
                        _grouped(stale),
                    )
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                if busy:
                    raise DeadlineExceededError(
                        f"put_samples(partition={request.partition_id!r}): after "
                        f"{request.timeout_s:g} s some of the ids are still being cleared or read"
                    )
                if ticket is None:
                    raise self._ledger.full(request.partition_id, request.sample_ids)
                raise self._no_bytes(request)
            await self._directory.wait(request.partition_id, remaining)

    def _place(self, ticket: PutTicket, request: p.BeginPut) -> list[Block] | None:
        if not request.layouts:
            return []
        try:
            placed = self._catalogue.place(request.layouts, near=request.node)
        except DataPlaneError:
            self._ledger.abort_put(ticket)
            raise
        if placed is None:
            self._ledger.abort_put(ticket)
        return placed

    def _no_bytes(self, request: p.BeginPut) -> CapacityExceeded:
        usage = self._catalogue.usage().values()
        return CapacityExceeded(
            f"put_samples(partition={request.partition_id!r}): "
            f"{sum(layout.nbytes for layout in request.layouts)} bytes, "
            f"{sum(unit.free for unit in usage)} of {sum(unit.capacity for unit in usage)} free; "
            "nothing was cleared in time: clear samples or raise global_segment_size"
        )

    def _commit_put(self, request: p.CommitPut) -> None:
        if self._put is None:
            raise InvalidRequestError("this connection has no put under way")
        ticket, blocks = self._put
        cells: dict[str, list[Any]] = {
            name: [None] * (0 if blocks else len(ticket.sample_ids)) for name in ticket.kinds
        }
        for block in blocks:
            cells[block.layout.name] += [(block, row) for row in range(block.layout.rows)]
        try:
            self._ledger.commit_put(ticket, cells, request.tags)
        except DataPlaneError:
            self._give_up_put()
            raise
        self._put = None
        self._dropped(p.Dropped())
        self._directory.changed(ticket.partition_id)

    def _read(self, request: p.Read) -> p.ReadAnswer:
        partition = self._ledger.partition(request.partition_id)
        rows = partition.lookup(request.sample_ids, request.fields)
        self._end_read()
        self._ledger.pin(rows)
        self._pinned = rows
        kinds = [partition.kinds[name] for name in request.fields] if rows else []
        if self._directory.catalogue is None or not rows:
            return p.ReadAnswer(kinds, [])
        return p.ReadAnswer(kinds, [_parts(rows, name) for name in request.fields])

    def _end_read(self) -> None:
        if self._pinned:
            rows, self._pinned = self._pinned, []
            self._ledger.unpin(rows)
            if any(row.dropped for row in rows):
                self._directory.everything_changed()

    def _unpin(self, request: p.Unpin) -> None:
        self._end_read()

    async def _claim(self, request: p.Claim) -> p.ClaimAnswer:
        wanted = request.wanted
        deadline = time.monotonic() + request.timeout_s
        while True:
            self._check_failure()
            self._directory.expire()
            partition = self._ledger.partition(request.partition_id)
            if self._reader.at_eof():
                raise ConnectionError("the claimer went away")
            claimed = partition.claim(wanted, time.monotonic())
            if claimed is not None:
                break
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise partition.claim_timeout(wanted, request.timeout_s)
            await self._directory.wait(request.partition_id, remaining)
        if claimed.token is not None:
            self._directory.changed(request.partition_id)
        tags = [row.tags for row in claimed.rows]
        return p.ClaimAnswer(
            [row.sample_id for row in claimed.rows], tags if any(tags) else None, claimed.token
        )

    def _settle(self, request: p.Settle) -> None:
        self._directory.expire()
        partition = self._ledger.partition(request.partition_id)
        if request.how == "renew":
            partition.renew(request.token, request.sample_ids, time.monotonic())
        else:
            partition.settle(
                request.token, request.sample_ids, acknowledge=request.how == "acknowledge"
            )
        self._directory.changed(request.partition_id)

    def _consumed(self, request: p.Consumed) -> bool:
        self._directory.expire()
        partition = self._ledger.partitions.get(request.partition_id)
        return partition is not None and partition.consumed(request.task_names)

    def _count(self, request: p.Count) -> TaskCounts:
        self._directory.expire()
        partition = self._ledger.partition(request.partition_id)
        return partition.counts(request.task_name, request.required_fields)

    async def _clear(self, request: p.Clear) -> p.ClearAnswer:
        if self._dropping is not None:
            raise InvalidRequestError("this connection already has a clear under way")
        self._directory.expire()
        rows = self._ledger.clear(request.partition_id, request.sample_ids, force=request.force)
        left = self._directory.leftovers[request.partition_id]
        for row in rows:
            left.pinned[row.sample_id] = row
        if request.sample_ids is None:
            # Nothing may be put before TransferQueue has forgotten the partition as well.
            left.closing += 1
            self._closing = left
        self._directory.everything_changed()
        deadline = time.monotonic() + request.timeout_s
        mine = {row.sample_id for row in rows}
        while any(left.pinned[i].pins for i in mine & left.pinned.keys()):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break  # a read that does not end keeps its rows; a later clear drops them
            await self._directory.wait(request.partition_id, remaining)
        taken = left.take()
        self._dropping = request.partition_id, taken
        return p.ClearAnswer(len(rows), _grouped(taken))

    def _dropped(self, request: p.Dropped) -> None:
        if self._dropping is not None:
            partition_id, drop = self._dropping
            self._dropping = None
            self._end_closing()
            left = self._directory.leftovers[partition_id]
            left.dropping.difference_update(drop)
            if not (left.orphans or left.pinned or left.dropping or left.closing):
                del self._directory.leftovers[partition_id]
            self._directory.changed(partition_id)

    def _list_partitions(self, request: p.ListPartitions) -> list[PartitionSummary]:
        self._directory.expire()
        return [summarise(partition) for partition in self._ledger.partitions.values()]

    def _list_samples(self, request: p.ListSamples) -> list[SampleState]:
        if request.start < 0 or not 0 <= request.limit <= _MAX_PAGE:
            raise InvalidRequestError(
                f"list_samples: start {request.start}, limit {request.limit}; expected a limit of "
                f"at most {_MAX_PAGE}"
            )
        partition = self._ledger.partition(request.partition_id)
        return page(partition, request.start, request.limit)

    def _usage(self, request: p.Usage) -> Any:
        return {} if self._directory.catalogue is None else self._catalogue.usage()


def _parts(rows: Sequence[Row], name: str) -> p.FieldParts:
    cells = [row.cells[name] for row in rows]
    first: Block = cells[0][0]
    numbers = [number for _, number in cells]
    if all(block is first for block, _ in cells):
        whole = len(numbers) == first.layout.rows and numbers == list(range(len(numbers)))
        return p.FieldParts([first], b"", b"" if whole else _packed(numbers, np.int64))
    places: dict[int, int] = {}
    blocks: list[Block] = []
    source = []
    for block, _ in cells:
        place = places.get(block.id)
        if place is None:
            place = places[block.id] = len(blocks)
            blocks.append(block)
        source.append(place)
    return p.FieldParts(blocks, _packed(source, np.int32), _packed(numbers, np.int64))


def _packed(values: list[int], dtype: type[np.signedinteger[Any]]) -> bytes:
    return np.array(values, dtype=dtype).tobytes()


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(p.Request)

_HANDLERS: dict[type[Any], Callable[[Connection, Any], Any]] = {
    p.Register: Connection._register,
    p.BeginPut: Connection._begin_put,
    p.CommitPut: Connection._commit_put,
    p.Read: Connection._read,
    p.Unpin: Connection._unpin,
    p.Claim: Connection._claim,
    p.Settle: Connection._settle,
    p.Consumed: Connection._consumed,
    p.Count: Connection._count,
    p.Clear: Connection._clear,
    p.Dropped: Connection._dropped,
    p.ListPartitions: Connection._list_partitions,
    p.ListSamples: Connection._list_samples,
    p.Usage: Connection._usage,
}
