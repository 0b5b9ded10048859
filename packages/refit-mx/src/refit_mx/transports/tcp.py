"""`TcpTransport`: reads through the source servers, without NIXL or shared memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from time import monotonic

import torch

from refit_mx.deadline import Deadline
from refit_mx.errors import RefitConfigError, SourceLostError
from refit_mx.manifest.byte_spans import ByteSpans, check_reads
from refit_mx.transports.base import UNUSED_FETCHES, ReadStats, SourceReads
from refit_mx.transports.batches import Batch, BatchQueue, OnDone
from refit_mx.transports.source_client import SourceClient
from refit_mx.transports.source_protocol import MAX_READS

BATCH_BYTES = 16 << 20
"""Size of one request."""

_Key = tuple[str, str]


_Event = tuple[BatchQueue, Batch] | BaseException


class TcpTransport:
    """Transport over TCP; see `refit_mx.transports.base.Transport`.

    Its buffers are never busy after a fetch: no read is in progress when `read` raises.

    Arguments are those of `refit_mx.settings.ReceiverSettings`.
    """

    name = "tcp"
    max_read_bytes = BATCH_BYTES

    def __init__(self, *, connect_timeout_s: float = 5.0, connections_per_source: int = 2) -> None:
        if connections_per_source < 1:
            raise RefitConfigError(
                f"connections_per_source {connections_per_source}; expected at least 1"
            )
        self._connect_timeout_s = connect_timeout_s
        self._connections = connections_per_source
        self._clients: dict[_Key, list[SourceClient]] = {}
        self._unused: dict[_Key, int] = {}
        self._registered: set[int] = set()

    def register(self, scratch: torch.Tensor) -> None:
        ByteSpans(scratch)  # raises if it cannot write to the buffer
        self._registered.add(scratch.data_ptr())

    def unregister(self, scratch: torch.Tensor) -> None:
        self._registered.discard(scratch.data_ptr())

    def busy(self, scratch: torch.Tensor) -> bool:
        """Return False: `read` ends its threads before it raises."""
        return False

    def read(
        self,
        source_reads: Sequence[SourceReads],
        scratch: torch.Tensor,
        *,
        deadline: Deadline,
        on_done: OnDone | None = None,
    ) -> ReadStats:
        check_source_reads(source_reads, scratch, self._registered)
        started = monotonic()
        queues = [
            BatchQueue(index, each, on_done, batch_bytes=BATCH_BYTES, batch_reads=MAX_READS)
            for index, each in enumerate(source_reads)
        ]
        events: SimpleQueue[_Event] = SimpleQueue()
        clients: list[SourceClient] = []
        threads: list[threading.Thread] = []
        aborted: list[SourceClient] = []
        connected = 0
        for queue, each in zip(queues, source_reads, strict=True):
            known = self._clients.get(_key(each), [])
            connected += bool(queue.count) and not any(client.connected for client in known)
            for client in self._clients_of(each, min(self._connections, queue.count)):
                clients.append(client)
                threads.append(
                    threading.Thread(
                        target=_run,
                        args=(queue, client, ByteSpans(scratch), deadline, events),
                        name="refit-tcp",
                        daemon=True,
                    )
                )
        try:
            for thread in threads:
                thread.start()
            for _ in range(sum(queue.count for queue in queues)):
                event = _next(events, deadline)
                if isinstance(event, BaseException):
                    raise _with_other_errors(event, events)
                queue, batch = event
                queue.done(batch)
        except BaseException:  # end the threads also on an interrupt
            # The caller may reuse the buffer when this returns, so no thread may remain.
            for client in clients:
                client.abort()
            for each in source_reads:
                aborted += self._clients.pop(_key(each), [])
            raise
        finally:
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            for client in aborted:
                client.close()
        self._forget_unused(source_reads)
        nbytes = sum(each.reads.nbytes for each in source_reads)
        return ReadStats(nbytes, monotonic() - started, connected)

    def close(self) -> None:
        for clients in self._clients.values():
            for client in clients:
                client.close()
        self._clients.clear()

    def _forget_unused(self, source_reads: Sequence[SourceReads]) -> None:
        used = {_key(each) for each in source_reads if len(each.reads)}
        for key in list(self._clients):
            self._unused[key] = 0 if key in used else self._unused.get(key, 0) + 1
            if self._unused[key] > UNUSED_FETCHES:
                for client in self._clients.pop(key):
                    client.close()
        self._unused = {key: count for key, count in self._unused.items() if key in self._clients}

    def _clients_of(self, source_reads: SourceReads, count: int) -> list[SourceClient]:
        key = _key(source_reads)
        clients = self._clients.setdefault(key, [])
        while len(clients) < count:
            clients.append(
                SourceClient(source_reads.source, connect_timeout_s=self._connect_timeout_s)
            )
        return clients[:count]


def _key(source_reads: SourceReads) -> _Key:
    return source_reads.source.endpoint, source_reads.source.incarnation


def check_source_reads(
    source_reads: Sequence[SourceReads], scratch: torch.Tensor, registered: set[int]
) -> None:
    """Check that reads stay inside the scratch and the arenas, before any byte moves.

    Raises:
        RefitConfigError: a read reaches outside, or the scratch is not registered.
    """
    if scratch.data_ptr() not in registered:
        raise RefitConfigError("the scratch buffer is not registered with this transport")
    for each in source_reads:
        try:
            check_reads(each.reads, scratch.numel(), "scratch")
            check_reads(each.reads, each.source.arena_bytes, "source")
        except ValueError as error:
            raise RefitConfigError(f"source {each.source.worker_id!r}: {error}") from None


def _run(
    queue: BatchQueue,
    client: SourceClient,
    spans: ByteSpans,
    deadline: Deadline,
    events: SimpleQueue[_Event],
) -> None:
    try:
        while (batch := queue.take()) is not None:
            client.read(
                batch.rows_of(queue.reads),
                spans,
                version_id=queue.source.version_id,
                deadline=deadline,
            )
            events.put((queue, batch))
    except BaseException as error:  # noqa: BLE001 - the caller's thread raises it
        events.put(error)


def _next(events: SimpleQueue[_Event], deadline: Deadline) -> _Event:
    while True:
        try:
            # The threads have the same deadline, and their errors name the source.
            return events.get(timeout=deadline.left_s + 1.0)
        except Empty:
            if not deadline.left_s:  # part of a batch may have arrived meanwhile
                raise deadline.error("reading") from None


def _with_other_errors(first: BaseException, events: SimpleQueue[_Event]) -> BaseException:
    """Return the first error, with the workers of all sources lost so far."""
    if not isinstance(first, SourceLostError):
        return first
    lost = dict.fromkeys(first.worker_ids)
    while not events.empty():
        event = events.get()
        if isinstance(event, SourceLostError):
            lost.update(dict.fromkeys(event.worker_ids))
    return SourceLostError(str(first), tuple(lost))
