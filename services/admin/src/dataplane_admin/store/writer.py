"""The one thread that writes: it groups what waits into one transaction, and tidies when idle.

Whoever submits a batch is told once it is committed. What waits is bounded in number and in bytes;
past that a batch is refused at once, so that the sender holds it back.
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
from dataplane_admin.store.work import Work

logger = structlog.get_logger("dataplane_admin")

MOST_WAITING = 1024
MOST_WAITING_BYTES = 256 << 20
# In one transaction: enough to share its cost, and so little that who waits does not wait long.
_MOST_GROUPED = 64
_MOST_GROUPED_BYTES = 16 << 20
_IDLE_S = 1.0
# Between looks at what is to be tidied, while something always waits.
_BUSY_TIDY_S = 0.5
_BUSY_TIDY_BYTES = 2 << 20
# Records that were not stored, by which ones that are sent again are known.
_MAX_RECENT = 65_536


@dataclass
class _Waiting:
    batch: Batch
    nbytes: int
    done: Future[WriteResult] = field(default_factory=Future)


@dataclass
class Counts:
    """Since the writer started."""

    spans: int = 0
    events: int = 0
    repeated: int = 0
    refused: int = 0
    ignored: int = 0


class Recent:
    """The last records that were not stored, so that one that is sent again is counted once."""

    def __init__(self) -> None:
        self._known: dict[bytes, None] = {}

    def count(self, digests: Iterable[bytes]) -> int:
        """How many of these did not come before."""
        before = len(self._known)
        self._known.update(dict.fromkeys(digests))
        count = len(self._known) - before
        for digest in list(islice(self._known, max(0, len(self._known) - _MAX_RECENT))):
            del self._known[digest]
        return count


class Writer:
    """Starts with the thread running.

    Args:
        database: migrated.
        tidy: one small step of what is to be done when nothing waits; whether there is more to do.
            While something waits it is called now and then, and as long as there is more to do
            it gets as much time as the writing, so that the store does not outgrow its limits.
    """

    def __init__(self, database: Database, tidy: Callable[[], bool]) -> None:
        self._database = database
        self._tidy = tidy
        self._changed = threading.Condition()
        self._waiting: deque[_Waiting] = deque()
        self._nbytes = 0
        self._closing = False
        self._counts = Counts()
        self._refused, self._ignored = Recent(), Recent()
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def submit(self, batch: Batch) -> Future[WriteResult]:
        """Queue a batch; never waits.

        Returns:
            Done once the batch is committed, or failed with `StoreError`.

        Raises:
            QueueFull: too much waits.
            StoreUnavailable: the store is closed.
        """
        one = _Waiting(batch, batch.nbytes)
        with self._changed:
            if self._closing:
                raise StoreUnavailable("the store is closed")
            over = self._nbytes + one.nbytes > MOST_WAITING_BYTES and self._waiting
            if len(self._waiting) >= MOST_WAITING or over:
                raise QueueFull(
                    f"{len(self._waiting)} requests of {self._nbytes} bytes wait to be written, "
                    f"expected at most {MOST_WAITING} of {MOST_WAITING_BYTES} bytes; send it again"
                )
            self._waiting.append(one)
            self._nbytes += one.nbytes
            self._changed.notify()
        return one.done

    def counts(self) -> Counts:
        """What became of the batches so far."""
        with self._changed:
            return Counts(**self._counts.__dict__)

    def close(self, timeout_s: float) -> None:
        """Write what waits within ``timeout_s`` seconds, fail the rest, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        self._fail_waiting("the store was closed before it was written")

    def _fail_waiting(self, reason: str) -> None:
        with self._changed:
            self._closing = True
            left = list(self._waiting)
            self._waiting.clear()
        for one in left:
            if one.done.set_running_or_notify_cancel():
                one.done.set_exception(StoreUnavailable(reason))

    def _run(self) -> None:
        try:
            self._work()
        finally:
            # Whatever ended the thread, nobody waits for it.
            self._fail_waiting("the store's writer has ended")

    def _work(self) -> None:
        tidied = time.monotonic()
        written = 0
        behind = False
        while True:
            group = self._next_group()
            if group is None:
                return
            began = time.monotonic()
            if group:
                self._write(group)
                written += sum(one.nbytes for one in group)
            now = time.monotonic()
            due = now - tidied > _BUSY_TIDY_S or written > _BUSY_TIDY_BYTES
            if not group or behind or due:
                behind = self._tidy_up(now - began)
                tidied, written = time.monotonic(), 0

    def _next_group(self) -> list[_Waiting] | None:
        """What to write now; nothing if it is time to tidy, None if it is time to end."""
        with self._changed:
            if not self._waiting and not self._closing:
                self._changed.wait(_IDLE_S)
            if not self._waiting:
                return None if self._closing else []
            group: list[_Waiting] = []
            nbytes = 0
            while self._waiting and len(group) < _MOST_GROUPED and nbytes < _MOST_GROUPED_BYTES:
                one = self._waiting.popleft()
                self._nbytes -= one.nbytes
                # From here on it cannot be cancelled.
                if one.done.set_running_or_notify_cancel():
                    group.append(one)
                    nbytes += one.nbytes
            return group

    def _write(self, group: list[_Waiting]) -> None:
        try:
            results = self._commit([one.batch for one in group])
        except StoreError as error:
            if len(group) == 1 or isinstance(error, StoreUnavailable):
                for one in group:
                    one.done.set_exception(error)
                return
            # One of them is to blame; the others must not suffer for it.
            for one in group:
                self._write([one])
            return
        with self._changed:
            for one, result in zip(group, results, strict=True):
                self._counts.spans += result.spans
                self._counts.events += result.events
                self._counts.repeated += result.repeated
                self._counts.refused += self._refused.count(one.batch.refused)
                self._counts.ignored += self._ignored.count(one.batch.ignored)
        for one, result in zip(group, results, strict=True):
            one.done.set_result(result)

    def _commit(self, batches: list[Batch]) -> list[WriteResult]:
        if trouble := self._database.trouble():
            raise StoreUnavailable(trouble)
        try:
            with self._database.writer.begin() as connection:
                self._database.lock(connection)
                work = Work.begin(connection, is_sqlite=self._database.is_sqlite)
                return apply(work, batches)
        except (OperationalError, InterfaceError) as error:
            self._database.note(error.orig)
            logger.error("store_unavailable", reason=str(error.orig))
            raise StoreUnavailable(f"the database does not take it now: {error.orig}") from error
        except DBAPIError as error:
            self._database.note(error.orig)
            if trouble := self._database.trouble():
                raise StoreUnavailable(trouble) from error
            logger.error("write_refused", reason=str(error.orig))
            raise WriteRefused(f"the database refuses it: {error.orig}") from error
        except Exception as error:
            # Without the values: they are long, and others'.
            where = traceback.format_tb(error.__traceback__)[-3:]
            logger.error("write_failed", error=repr(error)[:300], where=where)
            raise WriteRefused("it could not be written; the log says why") from error

    def _tidy_up(self, share_s: float) -> bool:
        """Tidy until nothing is left, or something waits and ``share_s`` seconds are spent; whether
        there is more to do."""
        if self._database.trouble():
            return False
        until = time.monotonic() + share_s
        try:
            while self._tidy():
                with self._changed:
                    if self._closing or (self._waiting and time.monotonic() >= until):
                        return True
        except (SQLAlchemyError, sqlite3.Error, OSError) as error:
            self._database.note(getattr(error, "orig", error))
            logger.warning("tidying_failed", reason=str(getattr(error, "orig", error)))
        except Exception:  # what comes in has to be written whatever is wrong with tidying
            logger.exception("tidying_failed")
        return False
