"""Retention: deletes the oldest records by age and size, in small steps.

Age counts from the receive time, since senders' clocks are not trusted. A trace or a curve is
deleted entirely once it has received nothing for that long. Log records are deleted with their
trace, or earlier if they are that old, since their trace may never arrive. A curve is as old as the
newest point of its run. Beyond the size limit, texts of samples are deleted first, as they are by
far the largest, except the newest ones, which are deleted with the facts. The age of load points
counts from their own time; ingest rejects times more than an hour ahead.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any  # Any: a model

from sqlalchemy import delete, exists, func, select
from sqlalchemy.orm import aliased

from dataplane_admin.store.apply_curves import drop_curves
from dataplane_admin.store.apply_events import EVENT_BYTES, SAMPLE_BYTES
from dataplane_admin.store.apply_load import drop_load
from dataplane_admin.store.apply_logs import drop_logs
from dataplane_admin.store.apply_samples import drop_samples, drop_texts
from dataplane_admin.store.engine import Database
from dataplane_admin.store.packed import names, pack_blocks, unpack_keys
from dataplane_admin.store.tables import (
    ChunkModel,
    CurveModel,
    EventModel,
    EventSampleModel,
    LinkModel,
    LoadSeriesModel,
    LogModel,
    OpenWaitModel,
    PlaceModel,
    RunModel,
    SampleFactModel,
    SampleModel,
    SampleStemModel,
    SampleTextModel,
    SeriesModel,
    SpanModel,
    TraceModel,
)
from dataplane_admin.store.work import State, Work, in_groups

_TRACES_A_STEP = 16
_EVENTS_A_STEP = 128
_SAMPLES_A_STEP = 8192
_FACTS_A_STEP = 512
_TEXTS_A_STEP = 64
# Texts that may displace other records, so that a store full of traces has some.
_MAX_STORED_TEXTS = 512
_LOGS_A_STEP = 512
_CURVES_A_STEP = 1
_LOAD_S_A_STEP = 600
_PAGES_A_STEP = 512
_RUNS_A_STEP = 16
# A write-ahead log below 1/64 of the limit is left to SQLite to truncate.
_LOG_SHARE = 64


@dataclass(frozen=True)
class Retention:
    """Limits of the stored telemetry.

    Attributes:
        max_age_s: maximum age in seconds since the receive time; None for no limit.
        max_bytes: maximum size, beyond which the oldest records are deleted; None for no limit. It
            counts the used part of the SQLite file and its write-ahead log; in PostgreSQL the
            written records without the overhead of tables.
        max_text_age_s: maximum age of turns and tokens of samples, as ``max_age_s``.
        max_load_age_s: maximum age of the load of engines and nodes, as ``max_age_s``.
        max_run_age_s: maximum age of runs and their curves, at least ``max_age_s``; None for the
            same. If it is set, ``max_bytes`` deletes curves only once nothing else is stored.
    """

    max_age_s: float | None = 7 * 86_400.0
    max_bytes: int | None = 2 << 30
    max_text_age_s: float | None = 86_400.0
    max_load_age_s: float | None = 2 * 86_400.0
    max_run_age_s: float | None = None

    def __post_init__(self) -> None:
        """Check the limits. Raises ValueError if a limit is not above 0."""
        for name in ("max_age_s", "max_bytes", "max_text_age_s", "max_load_age_s", "max_run_age_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value}: expected more than 0, or None for no limit")
        if self.max_run_age_s is not None and self.max_run_age_s < (self.max_age_s or math.inf):
            raise ValueError("runs must be retained at least as long as other telemetry")


class Sweeper:
    """Sweeper that deletes in small steps, each a transaction of some milliseconds."""

    def __init__(self, database: Database, retention: Retention) -> None:
        self._database = database
        self._retention = retention

    def step(self) -> bool:
        """Delete some records beyond the limits; return whether there may be more."""
        # If a reader prevents truncating the write-ahead log, its size must not cause deletions.
        log_bytes = self._log_bytes()
        with self._database.writer.begin() as connection:
            self._database.lock(connection)
            work = Work.begin(connection, is_sqlite=self._database.is_sqlite)
            is_full = self._is_full(work, log_bytes)
            gone = bool(_drop_texts(work, self._retention.max_text_age_s, is_full=is_full))
            before_ns, before_run_ns = self._too_old(work, is_full=is_full and not gone)
            gone |= drop_load(work, _before_s(before_ns, self._retention.max_load_age_s))
            gone |= bool(_drop_oldest(work, before_ns, before_run_ns)) or _drop_rest(
                work, before_ns, before_run_ns
            )
            if gone:
                work.state.save(connection, changed=True)
        return self._database.shrink(_PAGES_A_STEP) or gone

    def _log_bytes(self) -> int:
        """Return the bytes of the write-ahead log; truncate it if log and file exceed the limit."""
        maximum, log_bytes = self._retention.max_bytes, self._database.log_bytes()
        if maximum is None or self._database.file_bytes() + log_bytes <= maximum:
            return log_bytes
        if log_bytes < maximum // _LOG_SHARE:  # not worth forcing the file to the disk
            return log_bytes
        return self._database.log_bytes() if self._database.empty_log() else 0

    def _is_full(self, work: Work, log_bytes: int) -> bool:
        state: State = work.state
        maximum = self._retention.max_bytes
        live_bytes = self._database.live_bytes(work.connection, state.nbytes)
        return maximum is not None and live_bytes + log_bytes > maximum

    def _too_old(self, work: Work, *, is_full: bool) -> tuple[int, int]:
        """Return the receive times before which records, and runs with curves, are deleted.

        Both are nanoseconds since 1970.
        """
        run_age = self._retention.max_run_age_s
        before_ns = _before_ns(self._retention.max_age_s)
        before_run_ns = before_ns if run_age is None else _before_ns(run_age)
        if is_full:
            end_ns = _step_end_ns(work, with_curves=run_age is None)
            if end_ns is not None and run_age is not None:
                return end_ns + 1, before_run_ns
            end_ns = _step_end_ns(work, with_curves=True) if end_ns is None else end_ns
            if end_ns is not None:
                return end_ns + 1, end_ns + 1
        return before_ns, before_run_ns


def _before_ns(max_age_s: float | None) -> int:
    """Return the time, in nanoseconds since 1970, before which records are too old."""
    if max_age_s is None or max_age_s == math.inf:
        return 0
    return max(0, time.time_ns() - int(max_age_s * 1e9))


def _step_end_ns(work: Work, *, with_curves: bool) -> int | None:
    """Return the receive time up to which one step deletes records; None without records.

    Traces, events, logs, curves and facts of the same age are deleted together.
    """
    ends_ns = []
    for received_ns, order, limit in (
        (TraceModel.updated_ns, TraceModel.updated_ns, _TRACES_A_STEP),
        (EventModel.received_ns, EventModel.id, _EVENTS_A_STEP),
        (SampleFactModel.received_ns, SampleFactModel.id, _FACTS_A_STEP),
        (LogModel.received_ns, LogModel.id, _LOGS_A_STEP),
    ):
        query = select(received_ns).order_by(order).limit(limit)
        times = work.connection.scalars(query).all()
        ends_ns += [max(times)] if times else []
    if with_curves:
        newest = select(func.max(CurveModel.updated_ns).label("ns")).group_by(CurveModel.run_id)
        oldest_run_ns = work.connection.scalar(select(func.min(newest.subquery().c.ns)))
        ends_ns += [] if oldest_run_ns is None else [oldest_run_ns]
    oldest_load_s = work.connection.scalar(select(func.min(LoadSeriesModel.first_s)))
    if oldest_load_s is not None:
        ends_ns.append((oldest_load_s + _LOAD_S_A_STEP) * 10**9)
    return min(ends_ns, default=None)


def _before_s(before_ns: int, max_age_s: float | None) -> int:
    """Return the time, in seconds since 1970, before which points of load are deleted."""
    before_s = before_ns // 10**9
    return before_s if max_age_s is None else max(before_s, int(time.time_ns() / 1e9 - max_age_s))


def _drop_oldest(work: Work, before_ns: int, before_run_ns: int) -> int:
    """Delete some traces, events, logs, curves, facts received before a time; return how many."""
    traces = work.connection.execute(
        select(TraceModel.trace_id, TraceModel.arrival, TraceModel.spans, TraceModel.nbytes)
        .where(TraceModel.updated_ns < before_ns)
        .order_by(TraceModel.updated_ns)
        .limit(_TRACES_A_STEP)
    ).all()
    trace_ids = [row.trace_id for row in traces]
    for column in (ChunkModel.trace_id, LinkModel.trace_id, TraceModel.trace_id):
        work.drop(column, trace_ids)
    drop_logs(work, LogModel.trace_id.in_(trace_ids))
    work.drop(SpanModel.trace, [row.arrival for row in traces])
    work.state.traces -= len(traces)
    work.state.spans -= sum(row.spans for row in traces)
    work.state.nbytes -= sum(row.nbytes for row in traces)
    newer = aliased(CurveModel)
    is_live = exists().where(newer.run_id == CurveModel.run_id, newer.updated_ns >= before_run_ns)
    curves = work.connection.scalars(
        select(CurveModel.id)
        .where(CurveModel.updated_ns < before_run_ns, ~is_live)
        .order_by(CurveModel.updated_ns)
        .limit(_CURVES_A_STEP)
    ).all()
    drop_curves(work, curves)
    facts = _old(work, SampleFactModel, _FACTS_A_STEP, before_ns)
    drop_samples(work, facts)
    logs = drop_logs(work, LogModel.id.in_(_old(work, LogModel, _LOGS_A_STEP, before_ns)))
    return len(traces) + len(curves) + len(facts) + logs + _drop_events(work, before_ns)


def _old(work: Work, model: Any, limit: int, before_ns: int) -> list[int]:
    """Return the ids of those of the first ``limit`` records that were received before a time."""
    query = select(model.id, model.received_ns).order_by(model.id).limit(limit)
    return [row.id for row in work.connection.execute(query) if row.received_ns < before_ns]


def _drop_texts(work: Work, max_age_s: float | None, *, is_full: bool) -> int:
    """Delete some texts of samples that are too old, or the oldest of many; return how many."""
    received_ns = SampleTextModel.received_ns
    before_ns = 0 if max_age_s is None else time.time_ns() - int(max_age_s * 1e9)
    if is_full:
        newest = select(received_ns).order_by(received_ns.desc())
        surplus_ns = work.connection.scalar(newest.offset(_MAX_STORED_TEXTS).limit(1))
        before_ns = max(before_ns, 0 if surplus_ns is None else surplus_ns + 1)
    chosen = (
        select(SampleTextModel.id)
        .where(received_ns < before_ns)
        .order_by(received_ns)
        .limit(_TEXTS_A_STEP if is_full else _FACTS_A_STEP)
    )
    ids = work.connection.scalars(chosen).all()
    drop_texts(work, ids)
    return len(ids)


def _drop_events(work: Work, before_ns: int) -> int:
    dropped: list[int] = []
    place_ids: set[int] = set()
    keys: dict[int, None] = {}
    columns = (EventModel.id, EventModel.place_id, EventModel.received_ns)
    for row in work.connection.execute(
        select(*columns, EventModel.keys, EventModel.record)
        .order_by(EventModel.id)
        .limit(_EVENTS_A_STEP)
    ):
        named = unpack_keys(row.keys)
        if row.received_ns >= before_ns or (keys and len(keys) + len(named) > _SAMPLES_A_STEP):
            break
        dropped.append(row.id)
        place_ids.add(row.place_id)
        keys.update(dict.fromkeys(named))
        work.state.nbytes -= len(row.record) + EVENT_BYTES + len(row.keys)
    for blocks in in_groups(pack_blocks(keys)):
        # Ids grow, so this includes every deleted event.
        work.connection.execute(
            delete(EventSampleModel).where(
                EventSampleModel.block.in_(blocks), EventSampleModel.event_id <= dropped[-1]
            )
        )
    work.drop(OpenWaitModel.event_id, dropped)
    work.drop(EventModel.id, dropped)
    has_events = exists().where(EventModel.place_id == PlaceModel.id)
    work.connection.execute(delete(PlaceModel).where(PlaceModel.id.in_(place_ids), ~has_events))
    for group in in_groups(keys):
        stems = work.connection.scalars(
            select(SampleModel.stem_id).where(SampleModel.key.in_(group)).distinct()
        ).all()
        unnamed = ~exists().where(names(SampleModel.key))
        done = work.connection.execute(
            delete(SampleModel).where(SampleModel.key.in_(group), unnamed)
        )
        work.state.samples -= done.rowcount
        work.state.nbytes -= SAMPLE_BYTES * done.rowcount
        is_used = exists().where(SampleModel.stem_id == SampleStemModel.id)
        work.connection.execute(
            delete(SampleStemModel).where(SampleStemModel.id.in_(stems), ~is_used)
        )
    work.state.events -= len(dropped)
    return len(dropped)


def _drop_rest(work: Work, before_ns: int, before_run_ns: int) -> bool:
    """Delete old series, and some old runs; return whether there were any."""
    done = work.connection.execute(delete(SeriesModel).where(SeriesModel.updated_ns < before_ns))
    runs = work.connection.scalars(
        select(RunModel.run_id).where(RunModel.updated_ns < before_run_ns).limit(_RUNS_A_STEP)
    ).all()
    work.drop(RunModel.run_id, runs)
    return bool(done.rowcount or runs)
