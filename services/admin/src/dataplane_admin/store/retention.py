"""Lets go of the oldest, by age and by size, a little at a time.

Age counts from when something was received: clocks of others are not trusted. A trace goes as a
whole once nothing of it came for that long.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy import delete, exists, select

from dataplane_admin.store.apply_events import EVENT_BYTES, SAMPLE_BYTES
from dataplane_admin.store.engine import Database
from dataplane_admin.store.models import (
    ChunkModel,
    EventModel,
    EventSampleModel,
    LinkModel,
    OpenWaitModel,
    PlaceModel,
    RunModel,
    SampleModel,
    SeriesModel,
    SpanModel,
    TraceModel,
)
from dataplane_admin.store.packed import unpack_keys
from dataplane_admin.store.work import State, Work, in_groups

_TRACES_A_STEP = 16
_EVENTS_A_STEP = 128
_SAMPLES_A_STEP = 8192
_PAGES_A_STEP = 512
_RUNS_A_STEP = 16
# Of the limit, below which the log is left to SQLite.
_LOG_SHARE = 64


@dataclass(frozen=True)
class Retention:
    """How long and how much is kept.

    Attributes:
        max_age_s: what was received longer ago goes; None keeps it.
        max_bytes: past this the oldest goes, whatever its age; None keeps it. Of the SQLite file
            without what is free in it, and of its write-ahead log; in PostgreSQL of what was
            written, without what its tables take beside it.
    """

    max_age_s: float | None = 7 * 86_400.0
    max_bytes: int | None = 2 << 30

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            ValueError: a limit is not more than 0.
        """
        for name in ("max_age_s", "max_bytes"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: expected more than 0, or None for no limit")


class Sweeper:
    """Takes one small step at a time; each is a transaction of some milliseconds."""

    def __init__(self, database: Database, retention: Retention) -> None:
        self._database = database
        self._retention = retention

    def step(self) -> bool:
        """Let some of what is too old or too much go; whether there may be more."""
        # While somebody reads, the log cannot be cut; what is stored must not go instead.
        log_bytes = self._log_bytes()
        with self._database.writer.begin() as connection:
            self._database.lock(connection)
            work = Work.begin(connection, is_sqlite=self._database.is_sqlite)
            before_ns = self._too_old(work, log_bytes)
            gone = bool(_drop_oldest(work, before_ns)) or _drop_rest(work, before_ns)
            if gone:
                work.state.save(connection, changed=True)
        return self._database.shrink(_PAGES_A_STEP) or gone

    def _log_bytes(self) -> int:
        """Return what the log takes, cut if it and the file together pass the limit."""
        most, log_bytes = self._retention.max_bytes, self._database.log_bytes()
        if most is None or self._database.file_bytes() + log_bytes <= most:
            return log_bytes
        if log_bytes < most // _LOG_SHARE:  # not worth forcing the file to the disk
            return log_bytes
        return self._database.log_bytes() if self._database.empty_log() else 0

    def _too_old(self, work: Work, log_bytes: int) -> int:
        """What was received before this, in nanoseconds since 1970, has to go."""
        state: State = work.state
        most, age = self._retention.max_bytes, self._retention.max_age_s
        live_bytes = self._database.live_bytes(work.connection, state.nbytes)
        if most is not None and live_bytes + log_bytes > most:
            oldest = _oldest_ns(work)
            if oldest is not None:
                return oldest + 1
        return 0 if age is None else max(0, time.time_ns() - int(age * 1e9))


def _oldest_ns(work: Work) -> int | None:
    """When the last came of those that go in one step; traces and events of one age go together."""
    traces = select(TraceModel.updated_ns).order_by(TraceModel.updated_ns).limit(_TRACES_A_STEP)
    events = select(EventModel.received_ns).order_by(EventModel.id).limit(_EVENTS_A_STEP)
    found = [work.connection.execute(some).scalars().all() for some in (traces, events)]
    return min((max(some) for some in found if some), default=None)


def _drop_oldest(work: Work, before_ns: int) -> int:
    """Some of the traces and events received before; how many."""
    traces = work.connection.execute(
        select(TraceModel.trace_id, TraceModel.arrival, TraceModel.spans, TraceModel.nbytes)
        .where(TraceModel.updated_ns < before_ns)
        .order_by(TraceModel.updated_ns)
        .limit(_TRACES_A_STEP)
    ).all()
    for some in in_groups([row.trace_id for row in traces]):
        for column in (
            ChunkModel.trace_id,
            LinkModel.trace_id,
            TraceModel.trace_id,
        ):
            work.connection.execute(delete(column.class_).where(column.in_(some)))
    for arrivals in in_groups([row.arrival for row in traces]):
        work.connection.execute(delete(SpanModel).where(SpanModel.trace.in_(arrivals)))
    work.state.traces -= len(traces)
    work.state.spans -= sum(row.spans for row in traces)
    work.state.nbytes -= sum(row.nbytes for row in traces)
    return len(traces) + _drop_events(work, before_ns)


def _drop_events(work: Work, before_ns: int) -> int:
    dropped: list[int] = []
    keys: dict[int, None] = {}
    for row in work.connection.execute(
        select(EventModel.id, EventModel.received_ns, EventModel.keys, EventModel.record)
        .order_by(EventModel.id)
        .limit(_EVENTS_A_STEP)
    ):
        named = unpack_keys(row.keys)
        if row.received_ns >= before_ns or (keys and len(keys) + len(named) > _SAMPLES_A_STEP):
            break
        dropped.append(row.id)
        keys.update(dict.fromkeys(named))
        work.state.nbytes -= len(row.record) + EVENT_BYTES + SAMPLE_BYTES * len(named)
    for those in in_groups(keys):
        # Ids grow, so these are all events up to the last of them.
        work.connection.execute(
            delete(EventSampleModel).where(
                EventSampleModel.sample_key.in_(those), EventSampleModel.event_id <= dropped[-1]
            )
        )
    for some in in_groups(dropped):
        work.connection.execute(delete(OpenWaitModel).where(OpenWaitModel.event_id.in_(some)))
        work.connection.execute(delete(EventModel).where(EventModel.id.in_(some)))
    for those in in_groups(keys):
        unnamed = ~exists().where(EventSampleModel.sample_key == SampleModel.key)
        done = work.connection.execute(
            delete(SampleModel).where(SampleModel.key.in_(those), unnamed)
        )
        work.state.samples -= done.rowcount
    work.state.events -= len(dropped)
    return len(dropped)


def _drop_rest(work: Work, before_ns: int) -> bool:
    """Series, and runs of which nothing is left."""
    done = work.connection.execute(delete(SeriesModel).where(SeriesModel.updated_ns < before_ns))
    runs = work.connection.execute(
        select(RunModel.run_id).where(RunModel.updated_ns < before_ns).limit(_RUNS_A_STEP)
    ).scalars()
    places = exists().where(EventModel.place_id == PlaceModel.id)
    for run_id in list(runs):
        work.connection.execute(delete(PlaceModel).where(PlaceModel.run_id == run_id, ~places))
        work.connection.execute(delete(RunModel).where(RunModel.run_id == run_id))
    return bool(done.rowcount)
