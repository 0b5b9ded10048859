"""`Store`: what arrived, in one file of SQLite or in PostgreSQL."""

from __future__ import annotations

import json
import sqlite3
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from types import TracebackType

from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from dataplane_admin.store.batch import AuditEntry, Batch, WriteResult
from dataplane_admin.store.engine import Database
from dataplane_admin.store.errors import StoreUnavailable
from dataplane_admin.store.migrate import migrate
from dataplane_admin.store.models import AuditModel, EventModel, SeriesModel, StateRow, TraceModel
from dataplane_admin.store.read_events import (
    read_claimants,
    read_events,
    read_newest_claims,
    read_sample_records,
    read_samples,
)
from dataplane_admin.store.read_staleness import read_staleness, read_trace_staleness
from dataplane_admin.store.read_traces import (
    read_linked,
    read_run_steps,
    read_run_with_steps,
    read_runs,
    read_steps,
    read_trace,
    read_trace_records,
    read_traces,
)
from dataplane_admin.store.read_waits import read_wait_records
from dataplane_admin.store.reader import Reader
from dataplane_admin.store.retention import Retention, Sweeper
from dataplane_admin.store.rows import (
    ClaimRow,
    Cursor,
    EventRow,
    RunRow,
    SampleCursor,
    SampleRow,
    SeriesRow,
    StalenessRow,
    StepRow,
    StoreTotals,
    TraceFilter,
    TraceRow,
    WaitRecords,
)
from dataplane_admin.store.texts import storable
from dataplane_admin.store.writer import Writer
from observability.records import Records

_CLOSE_S = 10.0
_MOST_SERIES = 10_000


class Store:
    """Spans, lifecycle events, metrics and what people did; made by `Store.open`.

    Every method may be called from any thread. Readings have connections of their own and do not
    wait for what is being written. All of them raise `StoreUnavailable` if the database fails.
    """

    def __init__(self, database: Database, retention: Retention) -> None:
        self._database = database
        self._reader = Reader(database)
        self._writer = Writer(database, Sweeper(database, retention).step)

    @classmethod
    def open(cls, url: str, *, retention: Retention | None = None) -> Store:
        """Open a database, make it if it is a file that is not there, and bring it up to date.

        Args:
            url: ``sqlite:///path`` or ``postgresql+psycopg://user@host/database``.
            retention: what is kept; `Retention()` if None.

        Raises:
            ValueError: ``url`` is neither of these.
            StoreUnavailable: the database cannot be opened.
            StoreError: a newer version of this service made it, or another program.
            OSError: the file cannot be made.
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
        except BaseException:
            database.close()
            raise
        return cls(database, retention or Retention())

    def close(self) -> None:
        """Write what waits, within ten seconds, and close. May be called again."""
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
        """Queue a batch without waiting: done once it is committed, or failed with `StoreError`.

        Raises:
            QueueFull: too much waits already.
            StoreUnavailable: the store is closed.
        """
        return self._writer.submit(batch)

    def write(self, batch: Batch, timeout_s: float = 10.0) -> WriteResult:
        """Write a batch; once this returns it survives the end of this process, however it ends.

        To write the same batch again changes nothing.

        Raises:
            QueueFull: too much waits already; come again later.
            StoreUnavailable: the database does not take it now, or did not within ``timeout_s``
                seconds, in which case it may still be written later.
            WriteRefused: the database would never take it.
        """
        waiting = self._writer.submit(batch)
        try:
            return waiting.result(timeout_s)
        except FutureTimeout as error:
            waiting.cancel()
            raise StoreUnavailable(f"not written within {timeout_s} s") from error

    @property
    def revision(self) -> int:
        """Grows with every commit, also of other services on this database and over restarts."""
        with self._reader.connect() as connection:
            return int(connection.execute(select(StateRow.revision)).scalar_one())

    def runs(self) -> list[RunRow]:
        """The runs, the one that told something last first; at most 1,000."""
        return read_runs(self._reader)

    def run_with_steps(self) -> str | None:
        """The newest run of which a step has ended."""
        return read_run_with_steps(self._reader)

    def run_steps(self, run_id: str, limit: int) -> tuple[list[StepRow], bool]:
        """The newest ``limit`` steps of a run that have ended, in the order in which they came,
        and whether there are older ones. Of one that was done again, when the run was resumed for
        example, the newest time."""
        return read_run_steps(self._reader, run_id, limit)

    def traces(
        self,
        chosen: TraceFilter = TraceFilter(),  # noqa: B008  # frozen
        before: Cursor | None = None,
        limit: int = 50,
    ) -> tuple[list[TraceRow], Cursor | None]:
        """A page of traces, the one that came last first, and where the next page goes on."""
        return read_traces(self._reader, chosen, before, limit)

    def steps(self, run_id: str, limit: int = 10) -> list[TraceRow]:
        """The newest traces of a run that tell a step, among its newest 1,000 traces."""
        return read_steps(self._reader, run_id, limit)

    def trace(self, trace_id: str) -> TraceRow | None:
        """One trace; None if it is not there, or the id is none."""
        return read_trace(self._reader, trace_id)

    def trace_records(self, trace_id: str, *, events: bool = True) -> Records:
        """The spans of a trace, and with ``events`` the events that name it."""
        return read_trace_records(self._reader, trace_id, events=events)

    def linked(self, trace_id: str) -> tuple[list[str], list[str]]:
        """The traces that a trace links to, and those that link to it."""
        return read_linked(self._reader, trace_id)

    def sample_records(self, sample_id: str, partition: str | None = None) -> Records:
        """Every event about a sample, each with this id only, and the spans of their traces.

        Args:
            sample_id: of the sample.
            partition: only in partitions of this name.
        """
        return read_sample_records(self._reader, sample_id, partition)

    def find_samples(
        self, prefix: str, limit: int = 50, after: SampleCursor | None = None
    ) -> list[SampleRow]:
        """The samples whose ids begin so, by id; ``after`` the cursor of the last one seen."""
        return read_samples(self._reader, prefix, limit, after)

    def wait_records(
        self, *, run_id: str | None = None, silent_after_s: float = 300.0
    ) -> WaitRecords:
        """What `observability.views.why` needs: waits that have not ended, and their partitions.

        At most 200 waits: those of processes that go on before others, then the newest.

        Args:
            run_id: only what this run waits for; None for all.
            silent_after_s: for how long nothing was heard of a process that counts as silent.
        """
        return read_wait_records(self._reader, run_id, silent_after_s)

    def newest_claims(self, event_id: int, most: int) -> tuple[list[ClaimRow], int, bool]:
        """The newest claim, or wait for one, of each task of a partition.

        Args:
            event_id: only what came after this event.
            most: so many events are looked through, the newest ones.

        Returns:
            The claims in the order of their arrival, of each run its own; the id to go on from;
            whether there were no more events.
        """
        return read_newest_claims(self._reader, event_id, most)

    def claimants(self, partition: str) -> set[str]:
        """The tasks of which an event tells that they claimed in a partition, whatever the run."""
        return read_claimants(self._reader, partition)

    def staleness(self, run_id: str, steps: int = 20) -> StalenessRow:
        """How stale the samples were that the newest so many steps of a run trained on.

        The newest steps come first, and none after a quarter of a million samples; of a run that
        tells no steps the newest events.
        """
        return read_staleness(self._reader, run_id, steps)

    def trace_staleness(self, trace_id: str) -> StalenessRow:
        """How stale the samples were that a trace trained on, wherever they were put.

        Of more than a quarter of a million samples it is that of the ones told of last.
        """
        return read_trace_staleness(self._reader, trace_id)

    def events_since(self, event_id: int, limit: int = 100) -> list[EventRow]:
        """The newest events that came after one, in the order of their arrival."""
        return read_events(self._reader, event_id, limit)

    def series(self, name: str | None = None) -> list[SeriesRow]:
        """The newest value of every metric series, or of those of one name."""
        table = SeriesModel.__table__
        query = select(table).order_by(SeriesModel.name, SeriesModel.process, SeriesModel.digest)
        if name is not None:
            query = query.where(SeriesModel.name == storable(name))
        with self._reader.connect() as connection:
            rows = connection.execute(query.limit(_MOST_SERIES)).all()
        alike: dict[str, set[bytes]] = {}
        for row in rows:
            alike.setdefault(row.process, set()).add(row.process_id)
        return [
            SeriesRow(
                process=row.process
                if len(alike[row.process]) == 1
                else f"{row.process} [{row.process_id.hex()[:8]}]",
                process_id=row.process_id.hex(),
                scope=row.scope,
                name=row.name,
                unit=row.unit,
                attributes=json.loads(row.attributes),
                value=row.value,
                histogram=None if row.histogram is None else json.loads(row.histogram),
                time_ns=row.time_ns,
                received_ns=row.updated_ns,
            )
            for row in rows
        ]

    def audit(self, before: int | None = None, limit: int = 50) -> list[AuditEntry]:
        """What people did, the newest first; ``before`` the id of the last one seen."""
        query = select(AuditModel.__table__).order_by(AuditModel.id.desc()).limit(limit)
        if before is not None:
            query = query.where(AuditModel.id < before)
        with self._reader.connect() as connection:
            return [
                AuditEntry(
                    actor=row.actor,
                    action=row.action,
                    target=row.target,
                    parameters=json.loads(row.parameters),
                    outcome=row.outcome,
                    time_ns=row.time_ns,
                    id=row.id,
                )
                for row in connection.execute(query)
            ]

    def record_action(self, entry: AuditEntry) -> None:
        """Write down what somebody did; raises as `write` does."""
        self.write(Batch(audit=(entry,)))

    def room_bytes(self) -> int | None:
        """What is left on the disk of a file; None where the database is elsewhere."""
        return self._database.room_bytes()

    def totals(self) -> StoreTotals:
        """How much there is, and what became of what arrived."""
        oldest_trace = select(TraceModel.updated_ns).order_by(TraceModel.updated_ns).limit(1)
        oldest_event = select(EventModel.received_ns).order_by(EventModel.id).limit(1)
        with self._reader.connect() as connection:
            state = connection.execute(select(StateRow.__table__)).one()
            oldest = [connection.scalar(one) for one in (oldest_trace, oldest_event)]
            nbytes = self._database.disk_bytes(connection)
        counts = self._writer.counts()
        return StoreTotals(
            traces=state.traces,
            spans=state.spans,
            events=state.events,
            samples=state.samples,
            bytes_on_disk=nbytes,
            oldest_ns=min((one for one in oldest if one is not None), default=None),
            ingested_spans=counts.spans,
            ingested_events=counts.events,
            repeated=counts.repeated,
            refused=counts.refused,
            ignored=counts.ignored,
        )
