"""Waits that have not ended, and what `observability.views.why` needs to know of their partitions.

Of a partition that is the newest declaration and what was done to the samples that are there now.
How much is read does not depend on how long the partition has been in use, but on how many samples
there are and how many were put and cleared by name since the declaration, until they are as many as
it declares.

Whether a process goes on is judged by when this service received what it told, since clocks of
hosts disagree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any  # Any: rows

from sqlalchemy import Connection, case, func, select

from dataplane_admin.store.lives import EVENT_NAME
from dataplane_admin.store.models import (
    EventModel,
    EventSampleModel,
    OpenWaitModel,
    PlaceModel,
    RunModel,
    SampleModel,
    SeriesModel,
)
from dataplane_admin.store.packed import unpack_keys
from dataplane_admin.store.reader import EVENT_COLUMNS, Reader
from dataplane_admin.store.rows import WaitRecords
from dataplane_admin.store.texts import id_of_bytes, storable
from dataplane_admin.store.work import in_groups
from observability.records import Event, decode_logs

_SHAPING = ("put", "claimed", "released", "acknowledged")
"""Events that say what there is of a sample, and who has claimed it."""

_MOST_OPEN = 10_000
_MOST_WAITS = 200
# Up to so many events since the oldest sample are read as they come; of more only those that name a
# sample that is there.
_FEW_EVENTS = 2_000
_SAMPLES = "dataplane.samples"
_WITHDRAWN = "dataplane.withdrawn"


def read_wait_records(reader: Reader, run_id: str | None, silent_after_s: float) -> WaitRecords:
    """Of `Store.wait_records`."""
    open_waits = (
        select(
            OpenWaitModel.event_id,
            OpenWaitModel.place_id,
            OpenWaitModel.process_id,
            OpenWaitModel.again,
            PlaceModel.run_id,
            EventModel.received_ns,
        )
        .join(PlaceModel, PlaceModel.id == OpenWaitModel.place_id)
        .join(EventModel, EventModel.id == OpenWaitModel.event_id)
        .order_by(OpenWaitModel.event_id.desc())
        .limit(_MOST_OPEN)
    )
    if run_id is not None:
        open_waits = open_waits.where(PlaceModel.run_id == storable(run_id))
    newest = select(EventModel.record).order_by(EventModel.id.desc()).limit(1)
    with reader.connect() as connection:
        waits = connection.execute(open_waits).all()
        if not waits:
            return WaitRecords()
        silent = _silent(connection, waits, int(silent_after_s * 1e9))
        chosen = sorted(waits, key=lambda row: (_who(row) in silent, -row.event_id))
        chosen = chosen[:_MOST_WAITS]
        chosen.sort(key=lambda row: row.event_id)
        events = _of_ids(reader, connection, [row.event_id for row in chosen])
        places = select(PlaceModel.id, PlaceModel.cleared_ns).where(
            PlaceModel.id.in_({row.place_id for row in chosen}), PlaceModel.partition != ""
        )
        for place in connection.execute(places).all():
            events += _shape(reader, connection, place.id, place.cleared_ns)
        [told_last] = decode_logs(connection.scalar(newest) or b"").events
    # Whose run it is says which run goes on; what it did is among the others if it matters here.
    last_ns = max(told_last.time_ns, *(event.time_ns for event in events))
    events.append(replace(told_last, name="", time_ns=last_ns))
    received_ns = [row.received_ns for row in chosen]
    return WaitRecords(events=events, silent=silent, received_ns=received_ns)


def _silent(
    connection: Connection, waits: Sequence[Any], after_ns: int
) -> dict[tuple[str, str], int]:
    """Of each process and run that wait and were not heard of for so long, when they last were.

    A process that sends metrics sends them as well while it waits, and one may have said that it
    tells of its wait again. Of one that does neither silence says nothing by itself: its run has
    ended if others were heard of that much later.
    """
    metrics = {
        row.process_id.hex(): row.heard_ns
        for some in in_groups({row.process_id for row in waits})
        for row in connection.execute(
            select(SeriesModel.process_id, func.max(SeriesModel.updated_ns).label("heard_ns"))
            .where(SeriesModel.process_id.in_(some))
            .group_by(SeriesModel.process_id)
        )
    }
    told = {
        row.run_id: row.updated_ns
        for row in connection.execute(select(RunModel.run_id, RunModel.updated_ns))
    }
    newest_ns = max(told.values(), default=0)
    heard: dict[tuple[str, str], int] = {}
    again: set[tuple[str, str]] = set()
    for row in waits:
        who = _who(row)
        heard[who] = max(row.received_ns, heard.get(who, 0))
        if row.again:
            again.add(who)
    silent = {}
    for (process, run_id), waited_ns in heard.items():
        if process in metrics or (process, run_id) in again:
            now_ns, last_ns = time.time_ns(), max(waited_ns, metrics.get(process, 0))
        else:
            now_ns, last_ns = newest_ns, max(waited_ns, told.get(run_id, 0))
        if now_ns - last_ns > after_ns:
            silent[process, run_id] = last_ns
    return silent


def _who(row: Any) -> tuple[str, str]:
    """Which process and run of `WaitRecords.silent` a wait is of."""
    return row.process_id.hex(), row.run_id


def _shape(reader: Reader, connection: Connection, place_id: int, cleared_ns: int) -> list[Event]:
    """The events that make a partition what it is now, but for waits."""
    there = select(
        SampleModel.key,
        SampleModel.head,
        SampleModel.tail,
        SampleModel.first_ns,
        SampleModel.gone_ns,
    ).where(SampleModel.place_id == place_id, SampleModel.live_ns > max(0, cleared_ns))
    ended: dict[str, int] = {}
    keys: list[int] = []
    since_ns = 1 << 62
    for row in connection.execute(there):
        ended_ns = max(row.gone_ns, cleared_ns)
        ended[id_of_bytes(row.head + row.tail)] = ended_ns
        keys.append(row.key)
        # Not since its put: a put is told when it returns, and who is quick has claimed it by then.
        since_ns = min(since_ns, max(ended_ns, row.first_ns))
    events = _declaration(reader, connection, place_id, cleared_ns)
    if keys:
        events += _about(_told_of(reader, connection, place_id, keys, since_ns), ended)
    return events


def _declaration(
    reader: Reader, connection: Connection, place_id: int, cleared_ns: int
) -> list[Event]:
    """The newest one. Its samples that were put and are gone are taken off what it declares, so
    that what is left to be put comes out right without their events."""
    newest = (
        select(*EVENT_COLUMNS, EventModel.time_ns)
        .where(
            EventModel.place_id == place_id,
            EventModel.name == "registered",
            EventModel.time_ns > cleared_ns,
        )
        .order_by(EventModel.time_ns.desc(), EventModel.id.desc())
        .limit(1)
    )
    found = reader.events(connection, newest)
    for event in found:
        declared = event.attributes.get(_SAMPLES)
        if isinstance(declared, int) and declared > 0:
            gone = _gone(connection, place_id, cleared_ns, event.time_ns, declared)
            left = {_SAMPLES: max(0, declared - gone)}
            return [replace(event, attributes={**event.attributes, **left})]
    return found


def _gone(connection: Connection, place_id: int, cleared_ns: int, since_ns: int, most: int) -> int:
    """How often a sample was cleared by name since a moment; counted until it is ``most``.

    Withdrawn ones are to be put again, under whatever ids; a clear of a sample that is not there
    changes nothing.

    Args:
        connection: to read by.
        place_id: the partition.
        cleared_ns: when the whole partition was cleared last, before that moment.
        since_ns: the moment, in nanoseconds since 1970.
        most: more need not be known.
    """
    record = case((EventModel.name == "cleared", EventModel.record), else_=None)
    told = (
        select(EventModel.name, EventModel.keys, record.label("record"))
        .where(
            EventModel.place_id == place_id,
            EventModel.time_ns > since_ns,
            EVENT_NAME.in_(("put", "cleared")),
        )
        # A clear ends what was put at the same time.
        .order_by(EventModel.time_ns, EventModel.name.desc(), EventModel.id)
        .execution_options(yield_per=100)
    )
    there: set[int] = set()
    cleared: set[int] = set()
    perhaps: set[int] = set()
    gone = 0
    with connection.execute(told) as rows:
        for row in rows:
            named = set(unpack_keys(row.keys))
            if row.name == "put":
                there |= named
                continue
            if not _is_withdrawal(row.record):
                gone += len(named & there)
                # Put before that moment, if ever.
                perhaps |= named - there - cleared
            there -= named
            cleared |= named
            if gone >= most:
                return gone
    return gone + _count_there(connection, perhaps, cleared_ns, since_ns)


def _count_there(connection: Connection, keys: set[int], cleared_ns: int, at_ns: int) -> int:
    """How many of these samples were there at a moment."""
    put_ns, ended_ns = (
        func.max(case((EventModel.name == name, EventModel.time_ns), else_=0))
        for name in ("put", "cleared")
    )
    there = (
        select(EventSampleModel.sample_key)
        .join(EventModel, EventModel.id == EventSampleModel.event_id)
        .where(EventModel.time_ns > cleared_ns, EventModel.time_ns <= at_ns)
        .group_by(EventSampleModel.sample_key)
        .having(put_ns > ended_ns)
    )
    return sum(
        len(connection.scalars(there.where(EventSampleModel.sample_key.in_(some))).all())
        for some in in_groups(keys)
    )


def _is_withdrawal(record: bytes) -> bool:
    if _WITHDRAWN.encode() not in record:
        return False  # most are not decoded
    [event] = decode_logs(record).events
    return event.attributes.get(_WITHDRAWN) is True


def _told_of(
    reader: Reader, connection: Connection, place_id: int, keys: Sequence[int], since_ns: int
) -> list[Event]:
    """The events that shape samples, and perhaps others of that time."""
    since = (EventModel.time_ns >= since_ns, EventModel.name.in_(_SHAPING))
    few = (
        select(EventModel.id).where(EventModel.place_id == place_id, *since).limit(_FEW_EVENTS + 1)
    )
    ids = list(connection.scalars(few))
    if len(ids) > _FEW_EVENTS:
        # A sample that has been there since long ago must not bring along all that came after it.
        named = (
            select(EventSampleModel.event_id)
            .join(EventModel, EventModel.id == EventSampleModel.event_id)
            .where(*since)
            .distinct()
        )
        ids = sorted(
            {
                event_id
                for some in in_groups(keys)
                for event_id in connection.scalars(
                    named.where(EventSampleModel.sample_key.in_(some))
                )
            }
        )
    return _of_ids(reader, connection, ids)


def _about(events: Iterable[Event], ended: Mapping[str, int]) -> list[Event]:
    """The events with only the samples that are there, each since its latest clear."""
    cut = []
    for event in events:
        never = event.time_ns
        ids = tuple([one for one in event.sample_ids if ended.get(one, never) < event.time_ns])
        if ids:
            cut.append(replace(event, sample_ids=ids))
    return cut


def _of_ids(reader: Reader, connection: Connection, ids: Iterable[int]) -> list[Event]:
    return [
        event
        for some in in_groups(sorted(ids))
        for event in reader.events(
            connection,
            select(*EVENT_COLUMNS).where(EventModel.id.in_(some)).order_by(EventModel.id),
        )
    ]
