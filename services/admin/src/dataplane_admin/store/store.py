"""`Store`: telemetry and audit log in a SQLite file or in PostgreSQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import wraps
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from dataplane_admin.models import AuditEntry
from dataplane_admin.store import (
    read_alerts,
    read_curves,
    read_events,
    read_load,
    read_runs,
    read_samples,
    read_series,
    read_staleness,
    read_traces,
    read_waits,
)
from dataplane_admin.store.batch import Batch, WriteResult
from dataplane_admin.store.engine import Database
from dataplane_admin.store.errors import StoreUnavailable, WriteUnfinished
from dataplane_admin.store.migrate import migrate
from dataplane_admin.store.reader import Reader
from dataplane_admin.store.retention import Retention, Sweeper
from dataplane_admin.store.rows import StoreTotals
from dataplane_admin.store.tables import EventModel, StateRow, TraceModel
from dataplane_admin.store.writer import Writer

_CLOSE_S = 10.0

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


def _bound(
    read: Callable[Concatenate[Reader, _Arguments], _Answer],
) -> Callable[Concatenate[Store, _Arguments], _Answer]:
    """Return ``read`` as a method of the store."""

    @wraps(read)
    def method(store: Store, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
        return read(store._reader, *args, **kwargs)

    return method


class Store:
    """Store of spans, lifecycle events, metrics and the audit log; see `Store.open`.

    Thread-safe. Reads have separate connections and do not wait for writes. Every method raises
    `StoreUnavailable` if the database fails; `free_bytes` raises OSError.
    """

    def __init__(self, database: Database, retention: Retention) -> None:
        self._database = database
        self._reader = Reader(database)
        self._writer = Writer(database, Sweeper(database, retention).step)

    @classmethod
    def open(cls, url: str, *, retention: Retention | None = None) -> Store:
        """Open a database, create its file if missing, and run migrations.

        Args:
            url: ``sqlite:///path`` or ``postgresql+psycopg://user@host/database``.
            retention: limits of the stored telemetry; `Retention()` if None.

        Raises:
            ValueError: ``url`` is invalid.
            StoreUnavailable: the database cannot be opened.
            StoreError: another version of this service, or another program, created it.
            OSError: the file cannot be created.
        """
        database = Database(url)
        try:
            database.check_owner()
            migrate(database)
        except (DBAPIError, sqlite3.Error) as error:
            database.close()
            where = database.url.render_as_string(hide_password=True)
            reason = error.orig if isinstance(error, DBAPIError) else error
            raise StoreUnavailable(f"{where}: cannot be opened: {reason}") from error
        except BaseException:  # the caller has no handle to close it
            database.close()
            raise
        return cls(database, retention or Retention())

    def close(self) -> None:
        """Write queued batches within ten seconds, and close. Idempotent."""
        self._writer.close(_CLOSE_S)
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def submit(self, batch: Batch) -> Future[WriteResult]:
        """Queue a batch without waiting; the future ends with the commit or a `StoreError`.

        Raises:
            QueueFull: the queue is full.
            StoreUnavailable: the store is closed.
        """
        return self._writer.submit(batch)

    def write(self, batch: Batch, timeout_s: float = 10.0) -> WriteResult:
        """Write a batch; once this returns, the batch survives any end of this process. Idempotent.

        Raises:
            QueueFull: the queue is full; retry later.
            StoreUnavailable: the database failed, or did not begin within ``timeout_s`` seconds.
            WriteUnfinished: it began but did not commit; the batch may still be written.
            WriteRefused: the database rejects the batch permanently.
        """
        waiting = self._writer.submit(batch)
        try:
            return waiting.result(timeout_s)
        except FutureTimeout as error:
            message = f"the store did not write within {timeout_s:g} s"
            if waiting.cancel():
                raise StoreUnavailable(message) from error
            raise WriteUnfinished(f"{message}, but may still do so") from error

    @property
    def revision(self) -> int:
        """Number that grows with every change, also by other services and over restarts."""
        with self._reader.connect() as connection:
            return int(connection.execute(select(StateRow.revision)).scalar_one())

    # Each of these methods is a function of a `read_*` module, bound to this store's reader.
    runs = _bound(read_runs.read_runs)
    run = _bound(read_runs.read_run)
    last_seen_ns = _bound(read_runs.read_last_seen)
    count_runs = _bound(read_runs.count_runs)
    run_with_steps = _bound(read_traces.read_run_with_steps)
    run_steps = _bound(read_traces.read_run_steps)
    traces = _bound(read_traces.read_traces)
    steps = _bound(read_traces.read_steps)
    trace = _bound(read_traces.read_trace)
    trace_records = _bound(read_traces.read_trace_records)
    concurrent_spans = _bound(read_traces.read_concurrent_spans)
    linked = _bound(read_traces.read_linked)
    logs = _bound(read_traces.read_logs)
    sample_records = _bound(read_events.read_sample_records)
    runs_of_sample = _bound(read_events.read_runs_of_sample)
    run_of_partition = _bound(read_events.read_run_of_partition)
    find_samples = _bound(read_events.read_samples)
    sample_facts = _bound(read_samples.read_sample_facts)
    group = _bound(read_samples.read_group)
    sample_text = _bound(read_samples.read_sample_text)
    turns = _bound(read_samples.read_turns)
    runs_with_facts = _bound(read_samples.read_runs_with_facts)
    wait_records = _bound(read_waits.read_wait_records)
    newest_claims = _bound(read_events.read_newest_claims)
    claimants = _bound(read_events.read_claimants)
    generator_events = _bound(read_events.read_generator_events)
    staleness = _bound(read_staleness.read_staleness)
    trace_staleness = _bound(read_staleness.read_trace_staleness)
    newest_point = _bound(read_curves.read_newest_point)
    curve_facts = _bound(read_curves.read_curve_facts)
    curves = _bound(read_curves.read_curves)
    load = _bound(read_load.read_load)
    series = _bound(read_series.read_series)
    dropped_spans = _bound(read_series.read_dropped_spans)
    dropped_items = _bound(read_series.read_dropped_items)
    audit = _bound(read_series.read_audit)
    unfinished_runs = _bound(read_alerts.read_unfinished_runs)
    failed_runs = _bound(read_alerts.read_failed_runs)
    raised_alerts = _bound(read_alerts.read_raised_alerts)
    cleared_alerts = _bound(read_alerts.read_cleared_alerts)
    pending_notifications = _bound(read_alerts.read_pending)

    def record_action(self, entry: AuditEntry) -> None:
        """Add an entry to the audit log. Raises as `write`."""
        self.write(Batch(audit=(entry,)))

    def tag_run(self, run_id: str, tags: Sequence[str]) -> None:
        """Replace the tags of a run, if it is stored. Raises as `write`."""
        self.write(Batch(tags=((run_id, tuple(tags)),)))

    def free_bytes(self) -> int | None:
        """Return the free bytes on the disk of a SQLite file; None for PostgreSQL."""
        return self._database.free_bytes()

    def totals(self) -> StoreTotals:
        """Return totals of the store."""
        oldest_trace = select(TraceModel.updated_ns).order_by(TraceModel.updated_ns).limit(1)
        oldest_event = select(EventModel.received_ns).order_by(EventModel.id).limit(1)
        with self._reader.connect() as connection:
            state = connection.execute(select(StateRow.__table__)).one()
            oldest = [connection.scalar(query) for query in (oldest_trace, oldest_event)]
            nbytes = self._database.disk_bytes(connection)
        return StoreTotals(
            traces=state.traces,
            spans=state.spans,
            events=state.events,
            samples=state.samples,
            nbytes=nbytes,
            oldest_ns=min((time_ns for time_ns in oldest if time_ns is not None), default=None),
            counts=self._writer.counts(),
        )
