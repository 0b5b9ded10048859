"""`StoreState`: the state of one store, and the requests that are blocked on a change of it.

Call its methods only in the thread of the directory's event loop, unless they say otherwise.
Between two awaits nothing else runs there, so the code between them is atomic.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any  # Any: cells are the catalogue's

import structlog

from dataplane_core import DataPlaneError
from dataplane_core.ledger import ClaimOrder, Ledger, Partition
from dataplane_core.peer_log import PeerLog
from dataplane_tq.directory.backlog import Backlog
from dataplane_tq.directory.catalogue import Catalogue, bytes_of
from dataplane_tq.packed.unit_wire import UnitSpec

DISMANTLED_AT_ONCE = 64
"""Number of a cleared partition's samples to drop before other requests are served."""


class StoreState:
    """Samples, claims and storage locations of one store.

    Args:
        capacity: maximum number of samples over all partitions.
        units: the packed backend's units; empty for other backends.
        order: order of claims without a seed; None means the order of first puts.
        loop: the directory's event loop.
        mirrored: whether the store has a mirror, which reports its rows to TransferQueue.

    Attributes:
        failure: error that every request raises, once a part of the store is gone.
        backlog: partition id to `Backlog`.
    """

    def __init__(
        self,
        capacity: int,
        units: Sequence[UnitSpec],
        order: ClaimOrder | None,
        loop: asyncio.AbstractEventLoop,
        *,
        mirrored: bool,
    ) -> None:
        # Without a mirror the store may serve TransferQueue's own clients. Their metas have block
        # numbers, and a restored value keeps that number. The first number is random, so a value
        # restored from another store is unlikely to have the number of a block cleared here.
        first_block = 0 if mirrored else secrets.randbits(30)
        self.catalogue = Catalogue(units, first_block) if units else None
        self.ledger = Ledger(capacity, self._discard, order, bytes_of if units else None)
        self.failure: DataPlaneError | None = None
        self.backlog: dict[str, Backlog] = defaultdict(partial(Backlog, mirrored=mirrored))
        self.log = PeerLog(structlog.get_logger("dataplane_tq.directory"))
        self._loop = loop
        self._changed: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._expiry: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def fail(self, error: DataPlaneError) -> None:
        """Fail every request from now on, blocked ones included; safe in any thread."""

        def mark() -> None:
            self.failure = self.failure or error
            self.everything_changed()

        self._loop.call_soon_threadsafe(mark)

    def check_failure(self) -> None:
        """Raise `failure` if a part of the store is gone."""
        if self.failure is not None:
            raise self.failure

    def changed(self, partition_id: str) -> None:
        """Wake the requests that are blocked on the partition."""
        waiting = self._changed.pop(partition_id, None)
        for future in waiting or ():
            if not future.done():
                future.set_result(None)
        self._plan_expiry()

    def everything_changed(self) -> None:
        """Wake every blocked request, for example because space may be free."""
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

    def dismantle(self, partition_id: str, partition: Partition) -> None:
        """Finish the clear of a detached partition, whose clearing client is gone."""

        async def drop_remaining() -> None:
            backlog = self.backlog[partition_id]
            while rows := self.ledger.dismantle(partition, DISMANTLED_AT_ONCE):
                backlog.drop(rows, set())
                await asyncio.sleep(0)
            backlog.closing -= 1
            self.tidy(partition_id)
            self.changed(partition_id)

        task = self._loop.create_task(drop_remaining())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def tidy(self, partition_id: str) -> None:
        """Forget a partition's backlog if it is empty."""
        if not self.backlog[partition_id]:
            del self.backlog[partition_id]

    def _plan_expiry(self) -> None:
        """Schedule `expire` for the next expiry, in case no request arrives before it."""
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        moment = self.ledger.next_expiry()
        if moment is not None:
            delay = max(0.0, moment - time.monotonic())
            self._expiry = self._loop.call_later(delay, self._expire_as_planned)

    def _expire_as_planned(self) -> None:
        self.expire()
        self._plan_expiry()  # nothing was due if the lease was renewed meanwhile

    def expire(self) -> None:
        """Expire leases that are due, and wake the requests blocked on their samples."""
        for partition in self.ledger.expire(time.monotonic()):
            self.changed(partition.declaration.partition_id)

    def _discard(self, cells: list[Any]) -> None:
        if self.catalogue is not None:
            self.catalogue.free(cells)
            self.everything_changed()
