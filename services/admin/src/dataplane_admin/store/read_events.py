"""Queries for samples and lifecycle events."""

from __future__ import annotations

from typing import Any  # Any: rows

from sqlalchemy import ColumnElement, Connection, Select, func, select, tuple_

from dataplane_admin.models import SampleHit
from dataplane_admin.store.compressed import expand_all
from dataplane_admin.store.packed import names_any
from dataplane_admin.store.reader import EVENT_COLUMNS, Reader
from dataplane_admin.store.rows import ClaimRow, SampleCursor
from dataplane_admin.store.tables import (
    EventModel,
    EventSampleModel,
    PlaceModel,
    SampleModel,
    SampleStemModel,
)
from dataplane_admin.store.texts import (
    after_prefix,
    bytes_of_id,
    id_of_bytes,
    split_id,
    storable,
)
from dataplane_admin.store.work import in_groups
from observability.records import Event, Records, decode_logs
from observability.views.arrivals import MAX_DELAY_NS

_MAX_EVENTS_OF_SAMPLE = 2000
_MAX_EVENTS_OF_GENERATORS = 1000
_BEYOND_IDS = b"\xff"
"""Bytes that follow every id: UTF-8 has no such byte."""
# Order by this term, not by the key: a database might scan all events in the key's order.
_ARRIVAL = EventModel.id + 0
_PARTS = (SampleStemModel.stem, SampleModel.head, SampleModel.tail)
_PLACE = (*_PARTS, SampleModel.key)
_HITS = (
    select(
        *_PLACE,
        PlaceModel.partition,
        PlaceModel.run_id,
        SampleModel.weight_version,
        SampleModel.first_ns,
        SampleModel.last_ns,
    )
    .join(PlaceModel, PlaceModel.id == SampleModel.place_id)
    .join(SampleStemModel, SampleStemModel.id == SampleModel.stem_id)
)


def read_runs_of_sample(
    reader: Reader, sample_id: str, partition: str | None = None
) -> dict[str, int]:
    """Return the time of a sample's last event by run id, which is empty without a run."""
    samples = _named(sample_id, partition, PlaceModel.run_id, SampleModel.last_ns)
    last_ns: dict[str, int] = {}
    for row in reader.rows(samples):
        last_ns[row.run_id] = max(row.last_ns, last_ns.get(row.run_id, row.last_ns))
    return last_ns


def read_sample_records(
    reader: Reader, sample_id: str, run: str, partition: str | None = None
) -> Records:
    """Return the events of a sample of a run, each with this id only, and their traces' spans."""
    samples = _named(sample_id, partition, SampleModel.key, PlaceModel.id, PlaceModel.cleared_ns)
    samples = samples.where(PlaceModel.run_id == storable(run))
    columns = (*EVENT_COLUMNS, EventModel.trace_id, EventModel.id)
    with reader.connect() as connection:
        rows = connection.execute(samples).all()
        if not rows:
            return Records()
        named = (
            select(*columns)
            .join(EventSampleModel, EventSampleModel.event_id == EventModel.id)
            .where(names_any(row.key for row in rows))
            .order_by(EventModel.id)
            .limit(_MAX_EVENTS_OF_SAMPLE)
        )
        events = reader.events(connection, named, only=sample_id)
        # A clear of the entire partition names no samples. Receive times, with a margin for the
        # export delay, decide whether it is older than the sample; senders' clocks may differ.
        cleared = [row.id for row in rows if row.cleared_ns]
        if cleared and events:
            since_ns = min(event.received_ns for event in events) - MAX_DELAY_NS
            clears = (
                select(*columns)
                .where(
                    EventModel.place_id.in_(cleared),
                    EventModel.name == "cleared",
                    EventModel.keys == b"",
                    EventModel.received_ns >= since_ns,
                )
                .order_by(EventModel.id)
                .limit(_MAX_EVENTS_OF_SAMPLE)
            )
            events += reader.events(connection, clears, only=sample_id)
        traces = {bytes.fromhex(event.trace_id) for event in events if event.trace_id}
        return Records(reader.spans(connection, sorted(traces)), events)


def _named(sample_id: str, partition: str | None, *columns: Any) -> Select[*tuple[Any, ...]]:
    """Return the query of the samples with an id, in all runs and one partition or all."""
    parts = split_id(bytes_of_id(sample_id))
    samples = (
        select(*columns)
        .select_from(SampleModel)
        .join(PlaceModel, PlaceModel.id == SampleModel.place_id)
        .join(SampleStemModel, SampleStemModel.id == SampleModel.stem_id)
        .where(*(column == part for column, part in zip(_PARTS, parts, strict=True)))
    )
    if partition is not None:
        samples = samples.where(PlaceModel.partition == storable(partition))
    return samples


def read_samples(
    reader: Reader,
    prefix: str,
    limit: int = 50,
    after: SampleCursor | None = None,
    partition: str | None = None,
) -> tuple[list[SampleHit], SampleCursor | None]:
    """Return a page of samples by id prefix, and the cursor of the next page.

    They are sorted by `texts.split_id`: first ids of up to 36 bytes, then longer ids, each by id.
    With ``partition``, only its samples are returned.
    """
    hits = _HITS if partition is None else _HITS.where(PlaceModel.partition == storable(partition))
    stem, head, tail = split_id(bytes_of_id(prefix))
    beyond = None if after is None else (*split_id(bytes_of_id(after[0])), after[1])
    queries = []
    if beyond is None or beyond[0] <= stem:
        of_stem = select(SampleStemModel.id).where(SampleStemModel.stem == stem)
        query = hits.where(SampleModel.stem_id == of_stem.scalar_subquery())
        if tail:
            query = query.where(SampleModel.head == head, *_begins(SampleModel.tail, tail))
        else:
            query = query.where(*_begins(SampleModel.head, head))
        if beyond is not None and beyond[0] == stem:
            query = query.where(SampleModel.head >= beyond[1], tuple_(*_PLACE[1:]) > beyond[1:])
        queries.append(query.order_by(*_PLACE[1:]))
    if not stem:
        query = hits.where(SampleStemModel.stem > b"", *_begins(SampleStemModel.stem, head))
        if beyond is not None and beyond[0]:
            query = query.where(SampleStemModel.stem >= beyond[0], tuple_(*_PLACE) > beyond)
        queries.append(query.order_by(*_PLACE))
    rows: list[Any] = []
    for query in queries:
        rows += reader.rows(query.limit(limit + 1 - len(rows)))
    page = [SampleHit.of(row, sample_id=_id_of(row), live=False) for row in rows[:limit]]
    return page, (_id_of(rows[limit - 1]), rows[limit - 1].key) if len(rows) > limit else None


def _begins(column: Any, prefix: bytes) -> list[ColumnElement[bool]]:
    """Return the conditions that a value begins with a prefix.

    Every value begins with the empty prefix. It has conditions as well, because SQLite then reads
    the index in order.
    """
    return [column >= prefix, column < (after_prefix(prefix) or _BEYOND_IDS)]


def _id_of(row: Any) -> str:
    return id_of_bytes(row.stem + row.head + row.tail)


def read_generator_events(reader: Reader, partition: str) -> list[Event]:
    """Return the events of generators that joined or left since a run last registered a partition.

    The driver of a run records both, so their times are of one clock.
    """
    with reader.connect() as connection:
        newest = connection.execute(_last_registered(partition)).first()
        if newest is None:
            return []
        changes = (
            select(*EVENT_COLUMNS)
            .where(
                EventModel.place_id == newest.place_id,
                EventModel.name.in_(("generator_joined", "generator_left")),
                EventModel.time_ns >= newest.time_ns,
            )
            .order_by(_ARRIVAL.desc())
            .limit(_MAX_EVENTS_OF_GENERATORS)
        )
        return sorted(reader.events(connection, changes), key=lambda event: event.time_ns)


def read_run_of_partition(reader: Reader, partition: str) -> str | None:
    """Return the run that last registered a partition; None if none reported it."""
    return next((row.run_id for row in reader.rows(_last_registered(partition))), None)


def _last_registered(partition: str) -> Select[*tuple[Any, ...]]:
    # Without a join, SQLite reads the index of places and names; with one, it scans all events.
    places = select(PlaceModel.id).where(PlaceModel.partition == storable(partition))
    run_id = select(PlaceModel.run_id).where(PlaceModel.id == EventModel.place_id)
    return (
        select(EventModel.place_id, EventModel.time_ns, run_id.scalar_subquery().label("run_id"))
        .where(EventModel.place_id.in_(places), EventModel.name == "registered")
        .order_by(_ARRIVAL.desc())
        .limit(1)
    )


def read_claimants(reader: Reader, partition: str) -> set[str]:
    """Return the tasks that have claimed in a partition, in any run."""
    places = select(PlaceModel.id).where(PlaceModel.partition == storable(partition))
    tasks = select(EventModel.task).where(
        EventModel.place_id.in_(places), EventModel.name == "claimed"
    )
    return {row.task for row in reader.rows(tasks.distinct())}


def read_newest_claims(
    reader: Reader, event_id: int, maximum: int
) -> tuple[list[ClaimRow], int, bool]:
    """Return the newest claim or wait of each task, partition and run.

    Args:
        event_id: event after which to read.
        maximum: maximum number of events to read, the newest ones.

    Returns:
        The claims in order of arrival; the event id to continue from; whether no event was skipped.
    """
    with reader.connect() as connection:
        newest, too_old = _page(connection, event_id, maximum)
        claims = (
            select(EventModel.place_id, EventModel.task, EventModel.name, EventModel.id)
            .where(
                EventModel.id > too_old,
                EventModel.name.in_(("claimed", "waiting")),
                EventModel.task != "",
            )
            .order_by(EventModel.id)
            .limit(maximum)
        )
        # Grouped in Python: a database might scan an entire index for it.
        ids: dict[tuple[int, str], int] = {}
        claimed = set()
        for row in connection.execute(claims):
            ids[row.place_id, row.task] = row.id
            if row.name == "claimed":
                claimed.add((row.place_id, row.task))
        of_ids = (
            select(EventModel.place_id, PlaceModel.partition, EventModel.task, EventModel.record)
            .join(PlaceModel, PlaceModel.id == EventModel.place_id)
            .order_by(EventModel.id)
        )
        rows = [
            row
            for group in in_groups(sorted(ids.values()))
            for row in connection.execute(of_ids.where(EventModel.id.in_(group)))
        ]
    events = decode_logs(expand_all(row.record for row in rows)).events
    newest_claims = [
        ClaimRow(row.partition, row.task, (row.place_id, row.task) in claimed, _fields(event))
        for row, event in zip(rows, events, strict=True)
    ]
    return newest_claims, newest, too_old == event_id


def _fields(event: Event) -> tuple[str, ...] | None:
    fields = event.attributes.get("dataplane.fields")
    if not isinstance(fields, list):
        return None
    return tuple([name for name in fields if isinstance(name, str)])


def _page(connection: Connection, event_id: int, maximum: int) -> tuple[int, int]:
    """Return the id of the newest event, and the id before the ``maximum`` newest events."""
    newest = connection.scalar(select(func.max(EventModel.id))) or event_id
    newer = select(EventModel.id).where(EventModel.id > event_id).order_by(EventModel.id.desc())
    return newest, connection.scalar(newer.offset(maximum).limit(1)) or event_id
