"""`Live`: a thread that polls the data plane, and queries with a deadline.

Requests read `Live.snapshot` and so never wait for the data plane. For data that no snapshot has,
such as a page of samples, a request queries the data plane in a separate thread with a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TypeVar

import structlog

from dataplane_admin.live.connect import Connector
from dataplane_admin.live.scan import Scanner
from dataplane_admin.live.snapshot import Snapshot
from dataplane_admin.live.stuck import find_stuck
from dataplane_admin.live.trend import Trends
from dataplane_core import DataPlaneError, StorageSummary, StoreInspector, UnsupportedError

T = TypeVar("T")

MAX_PARTITIONS = 500
"""Maximum number of partitions with trends and scans."""

_MAX_QUERIES = 4
_PRIORITY_S = 60.0
"""Seconds for which a partition that a page shows is scanned before others."""
# Interval at which pages are updated if only ages change.
_AGES_S = 5.0
_HISTORY_INTERVAL_S = 30.0
"""Seconds between the points of a history; `POLLS` points cover an hour."""
_MAX_BACKOFF_S = 30.0
_STORAGE_PAUSE = 10.0
"""Pause after a failed read of the storage units, as a multiple of the read's duration."""
_STOP_S = 5.0

logger = structlog.get_logger("dataplane_admin.live")


class NotAttached(Exception):
    """A query without a connection to the data plane."""


class TooManyQueries(Exception):
    """A query beyond the maximum number of running queries."""


class QueryTimeout(Exception):
    """A query that the data plane did not answer in time."""


class Live:
    """Poller of a data plane; it runs until closed.

    Args:
        stuck_after_s: age in seconds from which unclaimed samples and claims count as stuck.
        has_claimed: whether a task of a partition has claimed, in addition to what polls show.
    """

    def __init__(
        self,
        connector: Connector,
        *,
        poll_s: float,
        query_timeout_s: float,
        stuck_after_s: float,
        has_claimed: Callable[[str, str], bool] = lambda _partition, _task: False,
    ) -> None:
        self._connector = connector
        self._poll_s = poll_s
        self._query_timeout_s = query_timeout_s
        self._stuck_after_s = stuck_after_s
        self._has_claimed = has_claimed
        self._inspector: StoreInspector | None = None
        self._snapshot = Snapshot(error=f"{connector.source}: not connected yet")
        self._changed_s = time.monotonic()
        self._prioritized: dict[str, float] = {}
        self._trends = Trends()
        self._history = Trends(_HISTORY_INTERVAL_S)
        self._scanner = Scanner()
        self._next_storage_s = 0.0
        self._query_slots = threading.BoundedSemaphore(_MAX_QUERIES)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dataplane-admin-live", daemon=True)

    @property
    def source(self) -> str:
        """Human-readable name of the data plane."""
        return self._connector.source

    @property
    def snapshot(self) -> Snapshot:
        """The newest snapshot."""
        return self._snapshot

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def close(self) -> None:
        """Stop polling; wait a few seconds for a running poll."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def prioritize(self, partition_id: str) -> None:
        """Scan a partition before others, because a page shows it."""
        since = {**self._prioritized, partition_id: time.monotonic()}
        self._prioritized = dict(sorted(since.items(), key=lambda item: -item[1])[:MAX_PARTITIONS])

    def deadline_s(self) -> float:
        """Return the deadline, by `time.monotonic`, of queries that start now."""
        return time.monotonic() + self._query_timeout_s

    def ask(self, query: Callable[[StoreInspector], T], until_s: float | None = None) -> T:
        """Query the data plane with a deadline.

        Args:
            query: function that queries the data plane, run in a separate thread.
            until_s: deadline from `deadline_s`, shared by several queries; None for a new one.

        Raises:
            NotAttached: there is no connection, or the poller is closed.
            TooManyQueries: too many queries are running.
            QueryTimeout: no answer in time. The query may still run.
            Exception: any error of the query.
        """
        if self._ending.is_set():
            raise NotAttached("the service is shutting down; retry later")
        inspector = self._inspector
        if inspector is None:
            raise NotAttached(self._snapshot.error or f"{self.source}: not connected yet")
        deadline = self.deadline_s() if until_s is None else until_s
        if not self._query_slots.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise TooManyQueries(
                f"{self.source}: {_MAX_QUERIES} queries are running already; retry"
            )
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(query(inspector))
            except Exception as error:  # noqa: BLE001  # raised again by `answer.result`
                answer.set_exception(error)
            finally:
                self._query_slots.release()

        try:
            threading.Thread(target=run, name="dataplane-admin-query", daemon=True).start()
        except RuntimeError:  # the process has too many threads
            self._query_slots.release()
            raise
        if not wait([answer], max(0.0, deadline - time.monotonic())).done:
            raise QueryTimeout(f"{self.source}: no answer within {self._query_timeout_s:g} s")
        return answer.result()

    def _run(self) -> None:
        failures = 0
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                self._poll()
                failures = 0
            except Exception as error:  # noqa: BLE001  # the service outlives the data plane
                failures += 1
                self._fail(error, first=failures == 1)
            pause = self._poll_s
            if failures:
                pause = min(_MAX_BACKOFF_S, max(0.1, self._poll_s) * 2 ** min(failures - 1, 10))
            self._ending.wait(max(0.0, pause - (time.monotonic() - began)))
        self._inspector = None
        self._connector.disconnect()

    def _poll(self) -> None:
        inspector = self._inspector
        if inspector is None:
            inspector = self._inspector = self._connector.connect()
            # The new connection may be to another store, whose revisions begin anew.
            self._scanner = Scanner()
        partitions = tuple(inspector.list_partitions())
        at_ns, read_s = time.time_ns(), time.monotonic()
        followed = partitions[:MAX_PARTITIONS]
        trends = self._trends.add(at_ns, followed)
        # Only `QueueInspector` has a `fault`: it can read a data plane that does not answer its
        # clients. Tasks of a queue are not declared: they exist because they claim.
        fault: str | None = getattr(inspector, "fault", None)
        has_claimed = self._has_claimed
        if getattr(inspector, "tasks_claim", False):
            has_claimed = _always
        wanted = [name for name, since in self._prioritized.items() if read_s - since < _PRIORITY_S]
        scans = self._scanner.scan(inspector, followed, wanted, self._ending.is_set)
        storage, storage_error = self._read_storage(inspector)
        self._publish(
            Snapshot(
                attached=True,
                error=None if fault is None else f"{self.source}: {fault}",
                fault_ns=None if fault is None else self._snapshot.fault_ns or at_ns,
                at_ns=at_ns,
                read_s=read_s,
                partitions=partitions,
                storage=storage,
                storage_error=storage_error,
                storage_ns=at_ns if storage_error is None else self._snapshot.storage_ns,
                totals=_read_totals(inspector),
                trends=trends,
                history=self._history.add(at_ns, followed),
                scans=scans,
                stuck=find_stuck(
                    inspector, followed, trends, scans, self._stuck_after_s, has_claimed
                ),
            )
        )

    def _read_storage(
        self, inspector: StoreInspector
    ) -> tuple[tuple[StorageSummary, ...], str | None]:
        """Return the storage units; if they cannot be read, the last ones and the reason."""
        last, began = self._snapshot, time.monotonic()
        if last.storage_error is not None and began < self._next_storage_s:
            return last.storage, last.storage_error
        try:
            return tuple(inspector.list_storage()), None
        except UnsupportedError:
            return (), None
        except DataPlaneError as error:
            if last.storage_error is None:
                logger.warning("storage_not_read", source=self.source, reason=str(error))
            # A unit that does not answer must not delay every poll and query until its deadline.
            now = time.monotonic()
            self._next_storage_s = now + _STORAGE_PAUSE * (now - began)
            return last.storage, str(error)

    def _fail(self, error: Exception, *, first: bool) -> None:
        self._inspector = None
        self._connector.disconnect()
        if isinstance(error, DataPlaneError):
            reason = str(error)
        else:
            reason = f"{type(error).__name__}: {error}"
            if first:
                logger.error("live_poll_failed", source=self.source, exc_info=error)
        if first:
            logger.warning("data_plane_not_reached", source=self.source, reason=reason)
        self._publish(replace(self._snapshot, attached=False, error=f"{self.source}: {reason}"))

    def _publish(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        last = self._snapshot
        if snapshot.visible_state() != last.visible_state() or now - self._changed_s >= _AGES_S:
            self._changed_s = now
            self._snapshot = replace(snapshot, revision=last.revision + 1)
        else:
            self._snapshot = replace(snapshot, revision=last.revision)


def _always(_partition: str, _task: str) -> bool:
    return True


def _read_totals(inspector: StoreInspector) -> dict[str, int]:
    """Return the counters; none if the store does not support them."""
    try:
        return inspector.read_totals()
    except UnsupportedError:
        return {}
