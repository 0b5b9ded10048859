"""`Connection`: what one client asks of the directory, and what it leaves under way.

Everything that a client has begun and not ended hangs on its connection: when that ends, it is
undone.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any  # Any: answers differ by request

import msgspec
import numpy as np

from dataplane_core import (
    CapacityExceeded,
    DataPlaneError,
    DeadlineExceededError,
    InvalidRequestError,
    UnavailableError,
)
from dataplane_core.ledger import PartitionBook, PutTicket, Row
from dataplane_core.ledger.origins import count_origins
from dataplane_tq import protocol as p
from dataplane_tq.keepalive import (
    CLIENT_TURN_S,
    PART_TURN_S,
    end_when_silent,
    expect_acknowledgement,
)
from dataplane_tq.leftovers import Drop, Leftovers, grouped
from dataplane_tq.looking import LOOKS
from dataplane_tq.packed.catalogue import Block, Catalogue
from dataplane_tq.peer_log import fault
from dataplane_tq.wire import HEADER, MAX_FRAME, Failure, Reply

if TYPE_CHECKING:
    from dataplane_tq.directory import Directory


@dataclass(frozen=True)
class Early:
    """An answer that is sent before the rest is done, which cannot fail.

    Nothing else runs in between, so whoever asks after the answer sees what the rest did.
    """

    answer: Any
    rest: Callable[[], None]


DISMANTLED_AT_ONCE = 64
"""Samples of a cleared partition that are dropped between two requests."""
_PAGE = 1024
"""Samples that a client is told to drop in TransferQueue by one answer."""
_REQUEST_S = 60.0
"""How long a request may take to arrive after its header, in seconds."""


class Connection:
    """One client connection: its requests in turn, and what they left under way."""

    def __init__(
        self, directory: Directory, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._directory = directory
        self._ledger = directory.ledger
        self._reader = reader
        self._writer = writer
        self._socket: socket.socket = writer.get_extra_info("socket")
        self._turn_s = CLIENT_TURN_S
        end_when_silent(self._socket, self._turn_s)
        self._put: tuple[PutTicket, list[Block]] | None = None
        self._pinned: list[Row] = []
        self._dropping: tuple[str, Drop] | None = None
        self._closing: Leftovers | None = None
        self._dismantling: PartitionBook | None = None
        self._held: set[str] = set()
        self._clear_timeout_s = 0.0
        self._entering: tuple[str, list[str]] | None = None
        self._tied = ""
        self.peer = str((writer.get_extra_info("peername") or ("unknown",))[0])

    async def serve(self) -> None:
        """Answer until the client goes away, then undo what it left under way."""
        try:
            while True:
                (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if length > MAX_FRAME:
                    return
                async with asyncio.timeout(_REQUEST_S):
                    body = await self._reader.readexactly(length)
                reply, rest = await self._reply(body)
                if reply is not None:
                    frame = _encoder.encode(reply)
                    expect_acknowledgement(self._socket, len(frame), self._turn_s)
                    self._writer.write(HEADER.pack(len(frame)) + frame)
                    if rest is not None:
                        rest()
                    if self._writer.transport.get_write_buffer_size() > MAX_FRAME // 4:
                        await self._writer.drain()
        finally:
            self._undo()

    async def _reply(self, body: bytes) -> tuple[Reply | None, Callable[[], None] | None]:
        """The answer to a request, and what is still to do when it is sent."""
        rest = request = None
        try:
            request = _requests.decode(body)
            if self._directory.failure is not None:
                raise self._directory.failure
            look = LOOKS.get(type(request))
            if look is not None:
                answer = look(self._directory, request)
            else:
                answer = _HANDLERS[type(request)](self, request)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if isinstance(answer, Early):
                answer, rest = answer.answer, answer.rest
        except DataPlaneError as error:
            return Reply(failure=Failure.of(error)), None
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            kind = "undecodable" if request is None else type(request).__name__
            self._directory.log.warn("request_refused", self.peer, request=kind, error=fault(error))
            return Reply(failure=Failure.of(InvalidRequestError(f"directory: {error}"))), None
        if isinstance(request, p.Unpin):
            return None, None
        return Reply(answer=msgspec.Raw(_encoder.encode(answer))), rest

    def _undo(self) -> None:
        self._end_read()
        self._end_entering()
        if self._put is not None:
            self._give_up_put()
        if self._dropping is not None:
            partition_id, drop = self._dropping
            left = self._directory.leftovers[partition_id]
            left.dropping.difference_update(drop)
            left.orphans.update(drop)
            if self._dismantling is not None:
                self._directory.dismantle(partition_id, self._dismantling)
                self._closing = None
            self._end_closing()
            self._directory.tidy(partition_id)
            self._directory.changed(partition_id)
        self._end_closing()
        if self._tied:
            self._directory.fail(
                UnavailableError(f"{self._tied} is dead: its process ended, or its machine is away")
            )

    def _give_up_put(self) -> None:
        """Undo a put that was begun: what it placed, reserved, and may have left behind."""
        assert self._put is not None
        ticket, blocks = self._put
        self._put = None
        self._ledger.abort_put(ticket)
        for block in blocks:
            self._catalogue.free_block(block)
        if self._directory.catalogue is None:  # with packed TransferQueue is told after the commit
            self._leave_behind(ticket)
        self._directory.everything_changed()

    def _leave_behind(self, ticket: PutTicket) -> None:
        """Remember what a put that was given up may have written to TransferQueue."""
        partition = self._ledger.partitions.get(ticket.partition_id)
        left = self._directory.leftovers[ticket.partition_id]
        # Also samples that were there when it began: they may have been cleared meanwhile, all or
        # with their partition, whose name may be registered again by now.
        for sample_id in ticket.sample_ids:
            there = partition is not None and (
                sample_id in partition.rows or sample_id in partition.reserved
            )
            if not there and sample_id not in left.pinned:
                left.orphans.setdefault(sample_id, tuple(ticket.kinds))
        self._directory.tidy(ticket.partition_id)

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

    def _tie(self, request: p.Tie) -> None:
        self._tied = request.name
        self._turn_s = PART_TURN_S
        end_when_silent(self._socket, self._turn_s)

    def _register(self, request: p.Register) -> None:
        self._ledger.register(request.declaration)
        self._directory.changed(request.declaration.partition_id)

    async def _begin_put(self, request: p.BeginPut) -> p.PutAnswer:
        if self._put is not None:
            raise InvalidRequestError("this connection already has a put under way")
        deadline = time.monotonic() + request.timeout_s
        partition = self._ledger.partition(request.partition_id)
        while True:
            self._check_failure()
            self._ledger.check_registered(partition)
            left = self._directory.leftovers.get(request.partition_id)
            busy = left is not None and left.blocks(request.sample_ids)
            ticket = placed = None
            if not busy:
                ticket = self._ledger.begin_put(
                    request.partition_id,
                    request.sample_ids,
                    request.kinds,
                    request.token,
                    request.forms,
                )
            if ticket is not None:
                placed = self._place(ticket, request)
                if placed is not None:
                    self._put = ticket, placed
                    # Rows left over by a clear that died must go before their ids come back.
                    stale = {} if left is None else left.take(request.sample_ids)
                    self._dropping = (request.partition_id, stale) if stale else None
                    return p.PutAnswer(partition.declaration.enums, placed, grouped(stale))
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
        usage = self._catalogue.usage()
        wanted = sum(layout.nbytes for layout in request.layouts)
        free = sum(unit.free for unit in usage)
        pieces = (
            f" in pieces of at most {self._catalogue.largest_free}: the free memory is fragmented"
            if wanted <= free
            else ""
        )
        return CapacityExceeded(
            f"put_samples(partition={request.partition_id!r}): {wanted} bytes, "
            f"{free} of {sum(unit.capacity for unit in usage)} free{pieces}; "
            "nothing was cleared in time: clear samples or raise global_segment_size"
        )

    def _check_put(self, request: p.CheckPut) -> None:
        if self._put is None:
            raise InvalidRequestError("this connection has no put under way")
        self._directory.expire()
        self._ledger.check_commit(self._put[0])

    async def _commit_put(self, request: p.CommitPut) -> Early:
        if self._put is None:
            raise InvalidRequestError("this connection has no put under way")
        # Whoever gave up while this process was stopped may have withdrawn the samples since.
        await asyncio.sleep(0)
        if self._reader.at_eof() or self._reader.exception() is not None:
            raise ConnectionError("the producer went away")
        ticket, blocks = self._put
        try:
            self._ledger.check_commit(ticket)
            if request.tags is not None and len(request.tags) != len(ticket.sample_ids):
                raise InvalidRequestError(
                    f"put_samples(partition={ticket.partition_id!r}): {len(request.tags)} tags "
                    f"for {len(ticket.sample_ids)} samples"
                )
        except DataPlaneError:
            self._give_up_put()
            raise
        return Early(None, lambda: self._make_visible(ticket, blocks, request))

    def _make_visible(self, ticket: PutTicket, blocks: list[Block], request: p.CommitPut) -> None:
        self._put = None
        partition = self._ledger.partition(ticket.partition_id)
        cells: dict[str, list[Any]] = {
            name: [None] * (0 if blocks else len(ticket.sample_ids)) for name in ticket.kinds
        }
        for block in blocks:
            cells[block.layout.name].extend(zip(repeat(block), range(block.layout.rows)))
        nbytes: dict[str, int] = {}
        for block in blocks:
            name = block.layout.name
            nbytes[name] = nbytes.get(name, 0) + block.layout.nbytes
        if blocks:
            self._disown(partition, ticket)
        self._ledger.commit_put(ticket, cells, request.tags, request.origin, nbytes=nbytes)
        rows = [partition.rows[sample_id] for sample_id in ticket.sample_ids]
        for block in blocks:
            if block.layout.rows == len(rows):
                self._catalogue.own(block, rows)
        if request.entering:
            # As long as they are pinned nobody drops them in TransferQueue, or puts them again
            # after a clear.
            self._pinned = rows
            self._ledger.pin(rows)
            self._entering = ticket.partition_id, ticket.sample_ids
            self._directory.leftovers[ticket.partition_id].entering.update(ticket.sample_ids)
        else:
            self._dropped(p.Dropped())
        self._directory.changed(ticket.partition_id)

    def _disown(self, partition: PartitionBook, ticket: PutTicket) -> None:
        """Blocks of which the put overwrites a row no longer belong to their rows as a whole."""
        overwritten = [name for name in ticket.kinds if partition.field_counts.get(name)]
        if not overwritten:
            return
        for sample_id in ticket.sample_ids:
            row = partition.rows.get(sample_id)  # another put may have made it since this began
            if row is not None:
                for name in overwritten:
                    if name in row.cells:
                        self._catalogue.disown(row.cells[name][0])

    def _entered(self, request: p.Entered) -> list[p.Consumption]:
        self._end_read()
        consumed = self._end_entering()
        self._dropped(p.Dropped())
        return consumed

    def _end_entering(self) -> list[p.Consumption]:
        if self._entering is None:
            return []
        (partition_id, sample_ids), self._entering = self._entering, None
        consumed = self._directory.leftovers[partition_id].entered(sample_ids)
        self._directory.tidy(partition_id)
        self._directory.changed(partition_id)
        return consumed

    def _read(self, request: p.Read) -> Early:
        partition = self._ledger.partition(request.partition_id)
        rows = partition.lookup(request.sample_ids, request.fields)
        self._end_read()
        kinds = [partition.kinds[name] for name in request.fields] if rows else []
        parts = []
        if self._directory.catalogue is not None and rows:
            parts = [_parts(rows, name, self._catalogue) for name in request.fields]

        def pin() -> None:
            self._ledger.pin(rows)
            self._pinned = rows

        origins = count_origins(rows, request.fields) if request.origins else {}
        forms = {name: partition.forms[name] for name in request.fields if name in partition.forms}
        return Early(p.ReadAnswer(kinds, parts, origins, forms), pin)

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
        # Whoever gave up while this process was stopped closed the connection; that is read now.
        await asyncio.sleep(0)
        while True:
            self._check_failure()
            self._directory.expire()
            partition = self._ledger.partition(request.partition_id)
            if self._reader.at_eof() or self._reader.exception() is not None:
                raise ConnectionError("the claimer went away")
            if not partition.prepare(wanted):
                await asyncio.sleep(0)  # others are served between the parts of a long look
                continue
            revision = partition.revision
            claimed = partition.claim(wanted, time.monotonic())
            if partition.revision != revision:
                # Others may be able to go on, and a share may have a deadline, also if this claim
                # got nothing.
                self._directory.changed(request.partition_id)
            if claimed is not None:
                break
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                tally = partition.tally(wanted)
                while not tally.step():
                    await asyncio.sleep(0)
                raise partition.claim_timeout(wanted, request.timeout_s, time.monotonic(), tally)
            await self._directory.wait(request.partition_id, remaining)
        tags = [row.tags for row in claimed.rows]
        ids = [row.sample_id for row in claimed.rows]
        entered = (
            [] if claimed.token else self._consume(request.partition_id, wanted.task_name, ids)
        )
        return p.ClaimAnswer(ids, tags if any(tags) else None, claimed.token, entered)

    def _consume(self, partition_id: str, task_name: str, sample_ids: list[str]) -> list[str]:
        """Which of the samples that a task consumed TransferQueue can be told of now."""
        left = self._directory.leftovers.get(partition_id)
        return sample_ids if left is None else left.consume(task_name, sample_ids)

    def _settle(self, request: p.Settle) -> list[str]:
        self._directory.expire()
        partition = self._ledger.partition(request.partition_id)
        entered: list[str] = []
        if request.how == "renew":
            partition.renew(request.token, request.sample_ids, time.monotonic())
        else:
            acknowledge = request.how == "acknowledge"
            task_name = partition.settle(request.token, request.sample_ids, acknowledge=acknowledge)
            if acknowledge:
                entered = self._consume(request.partition_id, task_name, request.sample_ids)
        self._directory.changed(request.partition_id)
        return entered

    async def _clear(self, request: p.Clear) -> p.ClearAnswer:
        if self._dropping is not None:
            raise InvalidRequestError("this connection already has a clear under way")
        self._directory.expire()
        left = self._directory.leftovers[request.partition_id]
        self._held, self._clear_timeout_s = set(), request.timeout_s
        try:
            if request.sample_ids is None:
                # The partition is gone at once; it is taken apart page by page.
                self._dismantling = self._ledger.detach(request.partition_id, force=request.force)
                dropped = 0 if self._dismantling is None else len(self._dismantling.rows)
                # Nothing may be put before TransferQueue has forgotten the partition as well.
                left.closing += 1
                self._closing = left
            else:
                rows = self._ledger.clear(
                    request.partition_id,
                    request.sample_ids,
                    force=request.force,
                    withdrawn=request.withdrawn,
                )
                dropped = len(rows)
                left.drop(rows, self._held)
        except DataPlaneError:
            self._directory.tidy(request.partition_id)
            raise
        self._dropping = request.partition_id, {}
        self._directory.everything_changed()
        return await self._next_page(request.partition_id, dropped)

    async def _next_page(self, partition_id: str, dropped: int = 0) -> p.ClearAnswer:
        """Hand the next orphans to the client, which drops them in TransferQueue."""
        left = self._directory.leftovers[partition_id]
        for _ in range(_PAGE // DISMANTLED_AT_ONCE):
            if self._dismantling is None:
                break
            rows = self._ledger.dismantle(self._dismantling, DISMANTLED_AT_ONCE)
            left.drop(rows, self._held)
            if not rows:
                self._dismantling = None
            await asyncio.sleep(0)  # others are served meanwhile
        if self._dismantling is None:
            await self._until_read(partition_id, left)
        taken = left.take(limit=_PAGE)
        self._dropping = partition_id, taken
        more = self._dismantling is not None or bool(left.orphans)
        return p.ClearAnswer(dropped, grouped(taken), more)

    async def _until_read(self, partition_id: str, left: Leftovers) -> None:
        """Wait for the reads of cleared samples that are under way."""
        deadline = time.monotonic() + self._clear_timeout_s
        while any(left.pinned[i].pins for i in self._held & left.pinned.keys()):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                break  # a read that does not end keeps its rows; a later clear drops them
            await self._directory.wait(partition_id, remaining)
            self._check_failure()

    async def _next_leftovers(self, request: p.NextLeftovers) -> p.ClearAnswer:
        if self._dropping is None:
            raise InvalidRequestError("this connection has no clear under way")
        partition_id, drop = self._dropping
        self._directory.leftovers[partition_id].dropping.difference_update(drop)
        self._dropping = partition_id, {}
        return await self._next_page(partition_id)

    def _dropped(self, request: p.Dropped) -> None:
        if self._dropping is not None:
            partition_id, drop = self._dropping
            self._dropping = None
            self._end_closing()
            self._directory.leftovers[partition_id].dropping.difference_update(drop)
            self._directory.tidy(partition_id)
            self._directory.changed(partition_id)


def _parts(rows: list[Row], name: str, catalogue: Catalogue) -> p.FieldParts:
    first, start = rows[0].cells[name]
    stop = start + len(rows)
    if (owners := catalogue.owners(first)) is not None and owners[start:stop] == rows:
        # Rows as they were put, or a run of them: nothing has to be looked at one by one.
        whole = len(rows) == first.layout.rows
        run = b"" if whole else np.arange(start, stop, dtype=np.int64).tobytes()
        return p.FieldParts([first], b"", run)
    cells = [row.cells[name] for row in rows]
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
    p.Tie: Connection._tie,
    p.Register: Connection._register,
    p.BeginPut: Connection._begin_put,
    p.CheckPut: Connection._check_put,
    p.CommitPut: Connection._commit_put,
    p.Entered: Connection._entered,
    p.Read: Connection._read,
    p.Unpin: Connection._unpin,
    p.Claim: Connection._claim,
    p.Settle: Connection._settle,
    p.Clear: Connection._clear,
    p.NextLeftovers: Connection._next_leftovers,
    p.Dropped: Connection._dropped,
}
