"""Questions about samples and lifecycle events."""

from __future__ import annotations

from sqlalchemy import Connection, func, select, tuple_

from dataplane_admin.store.models import (
    EventModel,
    EventSampleModel,
    PlaceModel,
    SampleModel,
)
from dataplane_admin.store.reader import EVENT_COLUMNS, Reader
from dataplane_admin.store.rows import ClaimRow, EventRow, SampleCursor, SampleRow
from dataplane_admin.store.texts import (
    HEAD_BYTES,
    after_prefix,
    bytes_of_id,
    id_of_bytes,
    storable,
)
from dataplane_admin.store.work import in_groups
from observability.records import Event, Records, decode_logs

_MOST_EVENTS_OF_SAMPLE = 2000


def read_sample_records(reader: Reader, sample_id: str, partition: str | None) -> Records:
    """Of `Store.sample_records`."""
    wanted = bytes_of_id(sample_id)
    samples = (
        select(SampleModel.key, SampleModel.first_ns, PlaceModel.id, PlaceModel.cleared_ns)
        .join(PlaceModel, PlaceModel.id == SampleModel.place_id)
        .where(SampleModel.head == wanted[:HEAD_BYTES], SampleModel.tail == wanted[HEAD_BYTES:])
    )
    if partition is not None:
        samples = samples.where(PlaceModel.partition == storable(partition))
    columns = (*EVENT_COLUMNS, EventModel.trace_id, EventModel.id)
    with reader.connect() as connection:
        found = connection.execute(samples).all()
        if not found:
            return Records()
        named = (
            select(*columns)
            .join(EventSampleModel, EventSampleModel.event_id == EventModel.id)
            .where(EventSampleModel.sample_key.in_([row.key for row in found]))
            .order_by(EventModel.id)
            .limit(_MOST_EVENTS_OF_SAMPLE)
        )
        events = reader.events(connection, named, only=sample_id)
        # A clear of the whole partition names no sample.
        cleared = [row for row in found if row.cleared_ns >= row.first_ns]
        if cleared:
            whole = (
                select(*columns)
                .where(
                    EventModel.place_id.in_([row.id for row in cleared]),
                    EventModel.name == "cleared",
                    EventModel.keys == b"",
                    EventModel.time_ns >= min(row.first_ns for row in cleared),
                )
                .order_by(EventModel.id)
                .limit(_MOST_EVENTS_OF_SAMPLE)
            )
            events += reader.events(connection, whole, only=sample_id)
        traces = {bytes.fromhex(event.trace_id) for event in events if event.trace_id}
        return Records(reader.spans(connection, sorted(traces)), events)


def read_samples(
    reader: Reader, prefix: str, limit: int, after: SampleCursor | None
) -> list[SampleRow]:
    """Of `Store.find_samples`."""
    wanted = bytes_of_id(prefix)
    place = tuple_(SampleModel.head, SampleModel.tail, SampleModel.key)
    query = (
        select(
            SampleModel.key,
            SampleModel.head,
            SampleModel.tail,
            PlaceModel.partition,
            PlaceModel.run_id,
            SampleModel.weight_version,
            SampleModel.first_ns,
            SampleModel.last_ns,
        )
        .join(PlaceModel, PlaceModel.id == SampleModel.place_id)
        .order_by(SampleModel.head, SampleModel.tail, SampleModel.key)
        .limit(limit)
    )
    head, tail = wanted[:HEAD_BYTES], wanted[HEAD_BYTES:]
    if tail:
        query = query.where(SampleModel.head == head, SampleModel.tail >= tail)
        end = after_prefix(tail)
        if end is not None:
            query = query.where(SampleModel.tail < end)
    elif head:
        query = query.where(SampleModel.head >= head)
        end = after_prefix(head)
        if end is not None:
            query = query.where(SampleModel.head < end)
    if after is not None:
        last = bytes_of_id(after[0])
        query = query.where(
            SampleModel.head >= last[:HEAD_BYTES],
            place > (last[:HEAD_BYTES], last[HEAD_BYTES:], after[1]),
        )
    with reader.connect() as connection:
        return [
            SampleRow(row[0], id_of_bytes(row[1] + row[2]), *row[3:])
            for row in connection.execute(query)
        ]


def read_claimants(reader: Reader, partition: str) -> set[str]:
    """Of `Store.claimants`."""
    places = select(PlaceModel.id).where(PlaceModel.partition == storable(partition))
    tasks = select(EventModel.task).where(
        EventModel.place_id.in_(places), EventModel.name == "claimed"
    )
    with reader.connect() as connection:
        return set(connection.scalars(tasks.distinct()))


def read_newest_claims(
    reader: Reader, event_id: int, most: int
) -> tuple[list[ClaimRow], int, bool]:
    """Of `Store.newest_claims`."""
    with reader.connect() as connection:
        newest, too_old = _page(connection, event_id, most)
        claims = (
            select(EventModel.place_id, EventModel.task, EventModel.name, EventModel.id)
            .where(
                EventModel.id > too_old,
                EventModel.name.in_(("claimed", "waiting")),
                EventModel.task != "",
            )
            .order_by(EventModel.id)
            .limit(most)
        )
        # Grouped here: a database might read an index from end to end for it.
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
            for some in in_groups(sorted(ids.values()))
            for row in connection.execute(of_ids.where(EventModel.id.in_(some)))
        ]
    told = decode_logs(b"".join(row.record for row in rows)).events
    found = [
        ClaimRow(row.partition, row.task, (row.place_id, row.task) in claimed, _fields(event))
        for row, event in zip(rows, told, strict=True)
    ]
    return found, newest, too_old == event_id


def _fields(event: Event) -> tuple[str, ...] | None:
    fields = event.attributes.get("dataplane.fields")
    if not isinstance(fields, list):
        return None
    return tuple([one for one in fields if isinstance(one, str)])


def _page(connection: Connection, event_id: int, most: int) -> tuple[int, int]:
    """The newest event, and the one after which come the ``most`` newest of those after a given
    one."""
    newest = connection.scalar(select(func.max(EventModel.id))) or event_id
    newer = select(EventModel.id).where(EventModel.id > event_id).order_by(EventModel.id.desc())
    return newest, connection.scalar(newer.offset(most).limit(1)) or event_id


def read_events(reader: Reader, event_id: int, limit: int) -> list[EventRow]:
    """Of `Store.events_since`."""
    query = (
        select(
            EventModel.id,
            PlaceModel.run_id,
            EventModel.step,
            EventModel.name,
            PlaceModel.partition,
            EventModel.task,
            EventModel.time_ns,
            EventModel.trace_id,
            EventModel.span_id,
            EventModel.samples,
            EventModel.weight_version,
        )
        .join(PlaceModel, PlaceModel.id == EventModel.place_id)
        .where(EventModel.id > event_id)
        .order_by(EventModel.id.desc())
        .limit(limit)
    )
    with reader.connect() as connection:
        rows = connection.execute(query).all()
    return [
        EventRow(*row[:7], (row[7] or b"").hex(), (row[8] or b"").hex(), *row[9:])
        for row in reversed(rows)
    ]
