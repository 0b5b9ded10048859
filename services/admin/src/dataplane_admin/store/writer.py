"""`Writer`: the writing thread, which commits queued batches in groups and sweeps when idle.

The future of a batch completes after the commit. The queue is bounded in number and bytes. When it
is full it refuses batches at once, so that senders retry later.
"""

from __future__ import annotations

import sqlite3
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

import structlog
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError

from dataplane_admin.store.apply import apply
from dataplane_admin.store.batch import Batch, WriteResult
from dataplane_admin.store.engine import Database
from dataplane_admin.store.errors import QueueFull, StoreError, StoreUnavailable, WriteRefused
from dataplane_admin.store.rows import Counts
from dataplane_admin.store.work import Work

logger = structlog.get_logger("dataplane_admin")

MAX_WAITING = 1024
MAX_WAITING_BYTES = 256 << 20
# Per transaction: enough to share its cost, few enough to keep the latency low.
_MAX_GROUPED = 64
_MAX_GROUPED_BYTES = 16 << 20
_IDLE_S = 1.0
# Interval of sweeps while the queue is never empty.
_BUSY_SWEEP_S = 0.5
_BUSY_SWEEP_BYTES = 2 << 20
# Digests of records that were not stored, to recognize resent ones.
_MAX_RECENT = 65_536


@dataclass
class _Waiting:
    batch: Batch
    nbytes: int
    done: Future[WriteResult] = field(default_factory=Future)


class Recent:
    """Digests of the last records that were not stored, to count resent ones once."""

    def __init__(self) -> None:
        self._known: dict[bytes, None] = {}

    def count(self, digests: Iterable[bytes]) -> int:
        """Add digests; return how many are new."""
        before = len(self._known)
        self._known.update(dict.fromkeys(digests))
        count = len(self._known) - before
        for digest in list(islice(self._known, max(0, len(self._known) - _MAX_RECENT))):
            del self._known[digest]
        return count


class Writer:
    """Writer with a running thread.

    ``sweep_step`` runs one small sweep, and returns whether more remains. It is called when the
    queue is empty, else at intervals. While more remains, it gets as much time as the writes, so
    that the store does not outgrow its limits.
    """

    def __init__(self, database: Database, sweep_step: Callable[[], bool]) -> None:
        self._database = database
        self._sweep_step = sweep_step
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._nbytes = 0
        self._closing = False
        self._counts = Counts()
        self._refused, self._ignored = Recent(), Recent()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> Future[WriteResult]:
        """Queue a batch without waiting.

        Returns:
            A future that ends with the commit or a `StoreError`.

        Raises:
            QueueFull: the queue is full.
            StoreUnavailable: the store is closed.
        """
        request = _Waiting(batch, batch.nbytes)
        with self._changed:
            if self._closing:
                raise StoreUnavailable("the store is closed")
            over = self._nbytes + request.nbytes > MAX_WAITING_BYTES and self._waiting
            if len(self._waiting) >= MAX_WAITING or over:
                raise QueueFull(
                    f"the queue is full: {len(self._waiting)} requests, {self._nbytes} bytes in "
                    f"total; expected at most {MAX_WAITING} and {MAX_WAITING_BYTES}; retry"
                )
            self._waiting.append(request)
            self._nbytes += request.nbytes
            self._changed.notify()
        return request.done

    def counts(self) -> Counts:
        """Return the counters so far."""
        with self._changed:
            return Counts(**self._counts.__dict__)

    def close(self, timeout_s: float) -> None:
        """Write queued batches within ``timeout_s`` seconds, fail the others, and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        self._fail_waiting("the store was closed before the request was written")

    def _fail_waiting(self, reason: str) -> None:
        with self._changed:
            self._closing = True
            waiting = list(self._waiting)
            self._waiting.clear()
        for request in waiting:
            if request.done.set_running_or_notify_cancel():
                request.done.set_exception(StoreUnavailable(reason))

    def _run(self) -> None:
        try:
            self._work()
        finally:
            # No future may stay pending, whatever ended the thread.
            self._fail_waiting("the store's writer has stopped")

    def _work(self) -> None:
        swept = time.monotonic()
        written = 0
        behind = False
        while True:
            group = self._next_group()
            if group is None:
                return
            began = time.monotonic()
            if group:
                self._write(group)
                written += sum(request.nbytes for request in group)
            now = time.monotonic()
            due = now - swept > _BUSY_SWEEP_S or written > _BUSY_SWEEP_BYTES
            if not group or behind or due:
                behind = self._sweep(now - began)
                swept, written = time.monotonic(), 0

    def _next_group(self) -> list[_Waiting] | None:
        """Return the requests to write; empty when it is time to sweep, None to stop."""
        with self._changed:
            if not self._waiting and not self._closing:
                self._changed.wait(_IDLE_S)
            if not self._waiting:
                return None if self._closing else []
            group: list[_Waiting] = []
            nbytes = 0
            while self._waiting and len(group) < _MAX_GROUPED and nbytes < _MAX_GROUPED_BYTES:
                request = self._waiting.popleft()
                self._nbytes -= request.nbytes
                # From here on the future cannot be cancelled.
                if request.done.set_running_or_notify_cancel():
                    group.append(request)
                    nbytes += request.nbytes
            return group

    def _write(self, group: list[_Waiting]) -> None:
        try:
            results = self._commit([request.batch for request in group])
        except StoreError as error:
            if len(group) == 1 or isinstance(error, StoreUnavailable):
                for request in group:
                    request.done.set_exception(error)
                return
            # One batch is invalid; write each alone, so that the others succeed.
            for request in group:
                self._write([request])
            return
        with self._changed:
            for request, result in zip(group, results, strict=True):
                self._counts.spans += result.spans
                self._counts.events += result.events
                self._counts.repeated += result.repeated
                self._counts.refused += self._refused.count(request.batch.refused)
                self._counts.ignored += self._ignored.count(request.batch.ignored)
        for request, result in zip(group, results, strict=True):
            request.done.set_result(result)

    def _commit(self, batches: list[Batch]) -> list[WriteResult]:
        if trouble := self._database.trouble():
            raise StoreUnavailable(trouble)
        try:
            with self._database.writer.begin() as connection:
                self._database.lock(connection)
                work = Work.begin(connection, is_sqlite=self._database.is_sqlite)
                return apply(work, batches)
        except (OperationalError, InterfaceError) as error:
            self._database.note_damage(error.orig)
            logger.error("store_unavailable", reason=str(error.orig))
            raise StoreUnavailable(f"cannot write to the database: {error.orig}") from error
        except DBAPIError as error:
            self._database.note_damage(error.orig)
            if trouble := self._database.trouble():
                raise StoreUnavailable(trouble) from error
            logger.error("write_refused", reason=str(error.orig))
            raise WriteRefused(f"the database rejects the request: {error.orig}") from error
        except Exception as error:  # the futures must end, and the thread must continue
            # Log no values: they are long and may quote samples.
            where = traceback.format_tb(error.__traceback__)[-3:]
            logger.error("write_failed", error=repr(error)[:300], where=where)
            raise WriteRefused("the request could not be written; see the service's log") from error

    def _sweep(self, max_s: float) -> bool:
        """Sweep until nothing remains, or for ``max_s`` seconds if requests are queued.

        Return whether more remains.
        """
        if self._database.trouble():
            return False
        until = time.monotonic() + max_s
        try:
            while self._sweep_step():
                with self._changed:
                    if self._closing or (self._waiting and time.monotonic() >= until):
                        return True
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            self._database.note_damage(getattr(error, "orig", error))
            logger.warning("sweep_failed", reason=str(getattr(error, "orig", error)))
        except Exception:  # a failed sweep must not stop the writes
            logger.exception("sweep_failed")
        return False
