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
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent import futures
from typing import Any  # Any: answers differ by request

import structlog

from dataplane_core import DataPlaneError, UnavailableError
from dataplane_core.ledger import ClaimOrder, Ledger, PartitionBook
from dataplane_tq.connection import DISMANTLED_AT_ONCE, Connection
from dataplane_tq.leftovers import Leftovers
from dataplane_tq.packed.catalogue import Catalogue, UnitSpec, bytes_of
from dataplane_tq.packed.lifeline import until_gone
from dataplane_tq.packed.unit_wire import UnitAddress
from dataplane_tq.peer_log import PeerLog, fault, max_connections
from dataplane_tq.wire import TOKEN_BYTES, Address

_HANDSHAKE_S = 5.0
_BACKLOG = 1024
_ACCEPTED_AT_ONCE = 16


class Directory:
    """The server. Threads: one, started by `start`; other methods are for that thread alone.

    Args:
        capacity: samples that all partitions together may hold.
        units: the packed backend's units; empty for other backends.
        host: address to listen on.
        order: of claims without a seed; None is the order of first puts.
    """

    def __init__(
        self,
        capacity: int,
        units: Sequence[UnitSpec],
        host: str,
        order: ClaimOrder | None = None,
    ) -> None:
        self.catalogue = Catalogue(units) if units else None
        self.ledger = Ledger(capacity, self._discard, order, bytes_of if units else None)
        self.failure: DataPlaneError | None = None
        self.leftovers: dict[str, Leftovers] = defaultdict(Leftovers)
        self._host = host
        self._token = secrets.token_bytes(TOKEN_BYTES)
        self._loop = asyncio.new_event_loop()
        self._changed: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._expiry: asyncio.TimerHandle | None = None
        self._watching: list[futures.Future[None]] = []
        self.log = PeerLog(structlog.get_logger("dataplane_tq.directory"))
        self._tasks: set[asyncio.Task[None]] = set()
        self._known = 0
        self._unknown: dict[asyncio.StreamWriter, None] = {}
        """Connections that have not brought the token yet, the oldest first."""
        self._max_connections = max_connections()

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
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listening_on = socket.create_server((self._host, 0), family=family)
        # asyncio accepts as many in a row as it is told may wait, and serves nobody meanwhile.
        self._loop.run_until_complete(
            asyncio.start_server(self._connected, sock=listening_on, backlog=_ACCEPTED_AT_ONCE)
        )
        listening_on.listen(_BACKLOG)
        self._port: int = listening_on.getsockname()[1]
        # Full collections over the ledger's many small objects would be its worst latencies.
        gc.collect()
        gc.freeze()
        gc.set_threshold(5_000, 5, 40_000)
        listening.set()
        self._loop.run_forever()

    def watch(self, units: Iterable[UnitAddress], token: bytes) -> None:
        """Fail every request as soon as a unit is gone; from any thread."""
        for unit in units:
            watched = asyncio.run_coroutine_threadsafe(self._watch(unit, token), self._loop)
            self._watching.append(watched)

    async def _watch(self, unit: UnitAddress, token: bytes) -> None:
        self.fail(UnavailableError(await until_gone(unit, token)))

    def fail(self, error: DataPlaneError) -> None:
        """Make every request fail from now on, those that wait included; from any thread."""

        def mark() -> None:
            self.failure = self.failure or error
            for partition_id in list(self._changed):
                self.changed(partition_id)

        self._loop.call_soon_threadsafe(mark)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(self, reader, writer)
        if not self._admit(writer):
            self.log.warn("connection_refused", connection.peer, error="too many connections")
            writer.transport.abort()
            return
        try:
            token = await asyncio.wait_for(reader.readexactly(TOKEN_BYTES), _HANDSHAKE_S)
            self._unknown.pop(writer, None)
            if not hmac.compare_digest(token, self._token):
                self.log.warn("connection_refused", connection.peer, error="wrong token")
                return
            self._known += 1
            try:
                await connection.serve()
            finally:
                self._known -= 1
        except (OSError, asyncio.IncompleteReadError):
            pass  # the peer or its machine went away, or is silent: how connections end
        except Exception as error:  # noqa: BLE001  # asyncio would log it with all that it says
            self.log.warn("connection_failed", connection.peer, error=fault(error))
        finally:
            self._unknown.pop(writer, None)
            writer.close()

    def _admit(self, writer: asyncio.StreamWriter) -> bool:
        """Make room for a connection, if need be of the one that has been silent longest."""
        if self._known + len(self._unknown) >= self._max_connections:
            if not self._unknown:
                return False
            oldest = next(iter(self._unknown))
            del self._unknown[oldest]
            oldest.transport.abort()
        self._unknown[writer] = None
        return True

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

    def dismantle(self, partition_id: str, partition: PartitionBook) -> None:
        """Go on with a clear whose client is gone: drop the rest of a detached partition."""

        async def go_on() -> None:
            left = self.leftovers[partition_id]
            while rows := self.ledger.dismantle(partition, DISMANTLED_AT_ONCE):
                left.drop(rows, set())
                await asyncio.sleep(0)
            left.closing -= 1
            self.tidy(partition_id)
            self.changed(partition_id)

        task = self._loop.create_task(go_on())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def tidy(self, partition_id: str) -> None:
        """Forget a partition's leftovers if there are none."""
        if not self.leftovers[partition_id]:
            del self.leftovers[partition_id]

    def _plan_expiry(self) -> None:
        """Be there when the next lease expires: nobody else would notice."""
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
