"""`Connection`: serves one client's requests in sequence, with one operation under way."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, TypeVar  # Any: answers differ by request

import msgspec

from dataplane_core import DataPlaneError, InvalidRequestError
from dataplane_core.ledger import Shortage
from dataplane_core.peer_log import fault
from dataplane_tq.directory import protocol as p
from dataplane_tq.directory.clears import Clearing
from dataplane_tq.directory.inspection import INSPECTIONS
from dataplane_tq.directory.operations import Bound, Idle, Operation, Reading, State
from dataplane_tq.directory.puts import Putting, Reporting, begin_put
from dataplane_tq.directory.reads import find
from dataplane_tq.directory.restores import Restoring, begin_restore
from dataplane_tq.directory.store_state import StoreState
from dataplane_tq.directory.wire import HEADER, MAX_FRAME, Failure, Reply
from dataplane_tq.sockets import (
    CLIENT_PROBE_S,
    PART_PROBE_S,
    close_when_silent,
    limit_unacknowledged,
)

TRANSITIONS: dict[type[Any], dict[State, set[State]]] = {
    p.BindActor: {State.IDLE: {State.BOUND}},
    p.BeginPut: {State.IDLE: {State.PUTTING}},
    p.CheckPut: {State.PUTTING: {State.PUTTING}},
    p.CommitPut: {State.PUTTING: {State.REPORTING, State.IDLE}},  # IDLE: refused, or no report
    p.Reported: {State.REPORTING: {State.IDLE}},
    p.BeginRestore: {State.IDLE: {State.RESTORING}},
    p.CommitRestore: {State.RESTORING: {State.IDLE}},
    p.Read: {State.IDLE: {State.READING}, State.READING: {State.READING}},
    p.Unpin: {state: {State.IDLE} for state in (State.IDLE, State.READING, State.REPORTING)},
    p.Clear: {state: {State.CLEARING} for state in (State.IDLE, State.READING)},
    p.NextOrphans: {State.CLEARING: {State.CLEARING}},
    p.Dropped: {State.CLEARING: {State.IDLE}},
}
"""States in which each request is allowed, each with the states that the request may lead to.

Other requests are allowed in every state and do not change it. A request that fails does not change
it either, with two exceptions: a refused commit aborts the put, and a clear that fails while it
waits for readers remains under way.
"""

_REQUEST_S = 60.0
"""Deadline of a request's body after its header, in seconds."""

OperationT = TypeVar("OperationT", bound=Operation)


@dataclass(frozen=True)
class Deferred:
    """An answer that is sent before its effect is applied.

    The effect cannot fail. No other request runs in between, so all later requests see it.
    """

    answer: Any
    effect: Callable[[], None]


class Connection:
    """Connection of one client; when it closes, its operation is undone."""

    def __init__(
        self, store: StoreState, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._store = store
        self._ledger = store.ledger
        self._reader = reader
        self._writer = writer
        self._socket: socket.socket = writer.get_extra_info("socket")
        self._probe_s = CLIENT_PROBE_S
        close_when_silent(self._socket, self._probe_s)
        self._operation: Operation = Idle()
        self.peer = str((writer.get_extra_info("peername") or ("unknown",))[0])

    async def serve(self) -> None:
        """Answer requests until the client disconnects, then undo its operation."""
        try:
            while True:
                (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
                if length > MAX_FRAME:
                    return
                async with asyncio.timeout(_REQUEST_S):
                    body = await self._reader.readexactly(length)
                reply, effect = await self._reply(body)
                if reply is not None:
                    frame = _encoder.encode(reply)
                    limit_unacknowledged(self._socket, len(frame), self._probe_s)
                    self._writer.write(HEADER.pack(len(frame)) + frame)
                    if effect is not None:
                        effect()
                    if self._writer.transport.get_write_buffer_size() > MAX_FRAME // 4:
                        await self._writer.drain()
        finally:
            self._operation.undo()

    async def _reply(self, body: bytes) -> tuple[Reply | None, Callable[[], None] | None]:
        """Return the answer to a request, and the effect to apply once it is sent."""
        effect = request = None
        try:
            request = _requests.decode(body)
            self._store.check_failure()
            self._check_state(request)
            inspection = INSPECTIONS.get(type(request))
            if inspection is not None:
                answer = inspection(self._store, request)
            else:
                answer = _HANDLERS[type(request)](self, request)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if isinstance(answer, Deferred):
                answer, effect = answer.answer, answer.effect
        except DataPlaneError as error:
            return Reply(failure=Failure.of(error)), None
        except (msgspec.MsgspecError, ValueError, TypeError) as error:
            kind = "undecodable" if request is None else type(request).__name__
            self._store.log.warn("request_refused", self.peer, request=kind, error=fault(error))
            return Reply(failure=Failure.of(InvalidRequestError(f"directory: {error}"))), None
        if isinstance(request, p.Unpin):
            return None, None
        return Reply(answer=msgspec.Raw(_encoder.encode(answer))), effect

    def _check_state(self, request: Any) -> None:
        transitions = TRANSITIONS.get(type(request))
        if transitions is not None and self._operation.state not in transitions:
            expected = " or ".join(state.value for state in transitions)
            raise InvalidRequestError(
                f"directory: {type(request).__name__}: this connection has "
                f"{self._operation.state.value} under way; expected {expected}"
            )

    def _transition(self, request: Any, operation: Operation) -> None:
        assert operation.state in TRANSITIONS[type(request)][self._operation.state]
        self._operation = operation

    def _current_operation(self, kind: type[OperationT]) -> OperationT:
        """Return the operation; `TRANSITIONS` ensures that it is of this kind."""
        assert isinstance(self._operation, kind)
        return self._operation

    async def _check_present(self) -> None:
        """Raise `ConnectionError` if the client left, even while this process was stopped."""
        await asyncio.sleep(0)  # let the event loop read what the client sent or closed
        if self._reader.at_eof() or self._reader.exception() is not None:
            raise ConnectionError("the client disconnected")

    def _bind_actor(self, request: p.BindActor) -> None:
        self._probe_s = PART_PROBE_S
        close_when_silent(self._socket, self._probe_s)
        self._transition(request, Bound(self._store, request.name))

    def _register(self, request: p.Register) -> None:
        self._ledger.register(request.declaration)
        self._store.changed(request.declaration.partition_id)

    async def _begin_put(self, request: p.BeginPut) -> p.PutAnswer:
        answer, putting = await begin_put(self._store, request)
        self._transition(request, putting)
        return answer

    def _check_put(self, request: p.CheckPut) -> None:
        self._current_operation(Putting).check()

    async def _commit_put(self, request: p.CommitPut) -> Deferred:
        putting = self._current_operation(Putting)
        deadline = time.monotonic() + putting.timeout_s
        try:
            while True:
                # If the client disconnected, another client may have withdrawn the samples since.
                await self._check_present()
                if not putting.is_blocked():
                    break
                await putting.wait(deadline)
            # No await follows until the effect, so no other put of the samples can intervene.
            putting.check_commit(request)
        except DataPlaneError:
            putting.undo()
            self._transition(request, Idle())
            raise
        consumed = putting.consumption(request)
        return Deferred(consumed, lambda: self._transition(request, putting.commit(request)))

    def _reported(self, request: p.Reported) -> list[p.Consumption]:
        consumed = self._current_operation(Reporting).end()
        self._transition(request, Idle())
        return consumed

    def _begin_restore(self, request: p.BeginRestore) -> p.RestoreAnswer:
        answer, restoring = begin_restore(self._store, request)
        self._transition(request, restoring)
        return answer

    def _commit_restore(self, request: p.CommitRestore) -> None:
        self._current_operation(Restoring).commit()
        self._transition(request, Idle())

    def _read(self, request: p.Read) -> Deferred:
        partition = self._ledger.partition(request.partition_id)
        answer, rows = find(partition, self._store.catalogue, request)

        def pin() -> None:
            self._operation.undo()
            self._transition(request, Reading(self._store, rows))

        return Deferred(answer, pin)

    def _unpin(self, request: p.Unpin) -> None:
        self._operation.undo()
        self._transition(request, Idle())

    async def _claim(self, request: p.Claim) -> p.ClaimAnswer:
        wanted = request.wanted
        deadline = time.monotonic() + request.timeout_s
        while True:
            await self._check_present()
            self._store.check_failure()
            self._store.expire()
            partition = self._ledger.partition(request.partition_id)
            if not partition.prepare(wanted):
                # A full garbage collection would visit the millions of entries of a seeded queue.
                # Python starts one too early, because it counts the few lists, not their entries.
                # So collect the young generations only; `Directory` makes full collections rare.
                gc.collect(1)
                continue  # serve other connections between the steps of a long search
            revision = partition.revision
            try:
                claimed = partition.claim(wanted, time.monotonic())
            finally:
                if partition.revision != revision:
                    # Even a claim that got nothing may let blocked requests continue, or make
                    # assignments, whose expiry must be scheduled.
                    self._store.changed(request.partition_id)
            if claimed is not None:
                break
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                shortage = Shortage(partition, wanted)
                while not shortage.step():
                    await asyncio.sleep(0)
                raise shortage.error(request.timeout_s, time.monotonic())
            await self._store.wait(request.partition_id, remaining)
        tags = [row.tags for row in claimed.rows]
        ids = [row.sample_id for row in claimed.rows]
        mirrored = (
            [] if claimed.token else self._consume(request.partition_id, wanted.task_name, ids)
        )
        return p.ClaimAnswer(ids, tags if any(tags) else None, claimed.token, mirrored)

    def _consume(self, partition_id: str, task_name: str, sample_ids: list[str]) -> list[str]:
        """Return the consumed samples that TransferQueue has; record the others as unreported."""
        backlog = self._store.backlog.get(partition_id)
        return sample_ids if backlog is None else backlog.consume(task_name, sample_ids)

    def _update_lease(self, request: p.UpdateLease) -> list[str]:
        self._store.expire()
        partition = self._ledger.partition(request.partition_id)
        mirrored: list[str] = []
        if request.action == "renew":
            now = time.monotonic()
            partition.renew(request.token, request.sample_ids, now, request.task_name)
        elif request.action == "acknowledge":
            task_name = partition.acknowledge(request.token, request.sample_ids, request.task_name)
            mirrored = self._consume(request.partition_id, task_name, request.sample_ids)
        else:
            partition.release(request.token, request.sample_ids, request.task_name)
        self._store.changed(request.partition_id)
        return mirrored

    async def _clear(self, request: p.Clear) -> p.ClearAnswer:
        clearing = Clearing(self._store, request)
        self._operation.undo()  # the pins of a read
        self._transition(request, clearing)
        return await clearing.next_page(clearing.dropped)

    async def _next_orphans(self, request: p.NextOrphans) -> p.ClearAnswer:
        return await self._current_operation(Clearing).next_page()

    def _dropped(self, request: p.Dropped) -> None:
        self._current_operation(Clearing).end()
        self._transition(request, Idle())


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(reduce(or_, p.Request.__subclasses__()))

_HANDLERS: dict[type[Any], Callable[[Connection, Any], Any]] = {
    p.BindActor: Connection._bind_actor,
    p.Register: Connection._register,
    p.BeginPut: Connection._begin_put,
    p.CheckPut: Connection._check_put,
    p.CommitPut: Connection._commit_put,
    p.Reported: Connection._reported,
    p.BeginRestore: Connection._begin_restore,
    p.CommitRestore: Connection._commit_restore,
    p.Read: Connection._read,
    p.Unpin: Connection._unpin,
    p.Claim: Connection._claim,
    p.UpdateLease: Connection._update_lease,
    p.Clear: Connection._clear,
    p.NextOrphans: Connection._next_orphans,
    p.Dropped: Connection._dropped,
}
