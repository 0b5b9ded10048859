"""Open waits, and the events that `observability.views.why` needs about their partitions.

For a partition these are the newest declaration and the events of its present samples. The cost
does not depend on the partition's age. It depends on the number of present samples, plus the number
of samples put and cleared by id since the declaration, up to the declared number.

Receive times decide whether a process is silent, since clocks of hosts disagree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any  # Any: rows

from sqlalchemy import Connection, case, func, select

from dataplane_admin.store.apply_runs import ENDED
from dataplane_admin.store.compressed import expand
from dataplane_admin.store.lives import EVENT_NAME
from dataplane_admin.store.packed import names_any, pack_blocks, unpack_block, unpack_keys
from dataplane_admin.store.reader import EVENT_COLUMNS, Reader
from dataplane_admin.store.rows import NO_DOWNTIME, Downtime, WaitRecords
from dataplane_admin.store.tables import (
    IS_LIVE,
    EventModel,
    EventSampleModel,
    OpenWaitModel,
    PlaceModel,
    RunModel,
    SampleModel,
    SampleStemModel,
    SeriesModel,
)
from dataplane_admin.store.texts import id_of_bytes, storable
from dataplane_admin.store.work import in_groups
from observability.records import Event, decode_logs

_SHAPING = ("put", "claimed", "released", "acknowledged")
"""Events that determine the fields of a sample and who has claimed it."""

_MAX_OPEN = 10_000
_MAX_WAITS = 200
# Up to this number, all events since the oldest sample are read; above, only those that name a
# present sample.
_FEW_EVENTS = 2_000
_SAMPLES = "dataplane.samples"
_WITHDRAWN = "dataplane.withdrawn"
_ENDS = ("run_finished", "run_stopped", "run_failed")


def read_wait_records(
    reader: Reader,
    *,
    run_id: str | None = None,
    silent_after_s: float = 300.0,
    downtime: Downtime = NO_DOWNTIME,
) -> WaitRecords:
    """Return what `observability.views.why` needs: open waits and events of their partitions.

    Of more than 200 waits, those of live processes are preferred, then the newest. A process counts
    as silent after ``silent_after_s`` seconds without telemetry in which a service ran. A wait that
    its live process no longer repeats is finished: the event of its end was lost. So are the waits
    of an ended run, and those last reported before the end of a run that was resumed.
    """
    open_waits = (
        select(
            OpenWaitModel.event_id,
            OpenWaitModel.place_id,
            OpenWaitModel.process_id,
            OpenWaitModel.is_periodic,
            PlaceModel.run_id,
            EventModel.received_ns,
        )
        .join(PlaceModel, PlaceModel.id == OpenWaitModel.place_id)
        .join(EventModel, EventModel.id == OpenWaitModel.event_id)
        .order_by(OpenWaitModel.event_id.desc())
        .limit(_MAX_OPEN)
    )
    if run_id is not None:
        open_waits = open_waits.where(PlaceModel.run_id == storable(run_id))
    newest = select(EventModel.record).order_by(EventModel.id.desc()).limit(1)
    with reader.connect() as connection:
        waits = _without_ended(connection, connection.execute(open_waits).all())
        after_ns = int(silent_after_s * 1e9)
        silent = _silent(connection, waits, after_ns, downtime)
        now_ns = time.time_ns()
        waits = [
            row
            for row in waits
            if not row.is_periodic
            or _source(row) in silent
            or downtime.silence_ns(row.received_ns, now_ns) <= after_ns
        ]
        if not waits:
            return WaitRecords()
        chosen = sorted(waits, key=lambda row: (_source(row) in silent, -row.event_id))
        chosen = chosen[:_MAX_WAITS]
        chosen.sort(key=lambda row: row.event_id)
        events = _of_ids(reader, connection, [row.event_id for row in chosen])
        places = select(PlaceModel.id, PlaceModel.cleared_ns).where(
            PlaceModel.id.in_({row.place_id for row in chosen}), PlaceModel.partition != ""
        )
        for place in connection.execute(places).all():
            events += _shape(reader, connection, place.id, place.cleared_ns)
        [newest_event] = decode_logs(expand(connection.scalars(newest).one())).events
    # The last event shows which run is active; without name and ids it has no other effect.
    last_ns = max(newest_event.time_ns, *(event.time_ns for event in events))
    events.append(replace(newest_event, name="", time_ns=last_ns))
    return WaitRecords(events=events, silent=silent)


def _without_ended(connection: Connection, waits: Sequence[Any]) -> list[Any]:
    """Return the waits that no end of their run finished.

    Ends and waits are ordered by event id, that is by arrival, because clocks of hosts disagree.
    """
    ended: set[str] = set()
    last_end: dict[str, int] = {}
    ends = (
        select(PlaceModel.run_id, func.max(EventModel.id).label("event_id"))
        .join(EventModel, EventModel.place_id == PlaceModel.id)
        .where(PlaceModel.partition == "", EventModel.name.in_(_ENDS))
        .group_by(PlaceModel.run_id)
    )
    for group in in_groups({row.run_id for row in waits}):
        of_group = select(RunModel.run_id).where(RunModel.run_id.in_(group))
        ended.update(connection.scalars(of_group.where(RunModel.state.in_(ENDED))))
        for row in connection.execute(ends.where(PlaceModel.run_id.in_(group))):
            last_end[row.run_id] = row.event_id
    return [
        row
        for row in waits
        if row.run_id not in ended and row.event_id > last_end.get(row.run_id, 0)
    ]


def _silent(
    connection: Connection, waits: Sequence[Any], after_ns: int, downtime: Downtime
) -> dict[tuple[str, str], int]:
    """Return when each silent process with an open wait was last seen, by process and run.

    A process that sends metrics, or repeats its waits, also does so while blocked. Other processes
    count as silent if another run was seen ``after_ns`` later.
    """
    metrics = {
        row.process_id.hex(): row.last_seen_ns
        for group in in_groups({row.process_id for row in waits})
        for row in connection.execute(
            select(SeriesModel.process_id, func.max(SeriesModel.updated_ns).label("last_seen_ns"))
            .where(SeriesModel.process_id.in_(group))
            .group_by(SeriesModel.process_id)
        )
    }
    reported = {
        row.run_id: row.updated_ns
        for row in connection.execute(select(RunModel.run_id, RunModel.updated_ns))
    }
    newest_ns = max(reported.values(), default=0)
    last_seen: dict[tuple[str, str], int] = {}
    repeating: set[tuple[str, str]] = set()
    for row in waits:
        source = _source(row)
        last_seen[source] = max(row.received_ns, last_seen.get(source, 0))
        if row.is_periodic:
            repeating.add(source)
    silent = {}
    for (process, run_id), waited_ns in last_seen.items():
        if process in metrics or (process, run_id) in repeating:
            now_ns, last_ns = time.time_ns(), max(waited_ns, metrics.get(process, 0))
        else:
            now_ns, last_ns = newest_ns, max(waited_ns, reported.get(run_id, 0))
        if downtime.silence_ns(last_ns, now_ns) > after_ns:
            silent[process, run_id] = last_ns
    return silent


def _source(row: Any) -> tuple[str, str]:
    """Return process and run of a wait, a key of `WaitRecords.silent`."""
    return row.process_id.hex(), row.run_id


def _shape(reader: Reader, connection: Connection, place_id: int, cleared_ns: int) -> list[Event]:
    """Return the events that determine the present state of a partition, except waits."""
    present = (
        select(
            SampleModel.key,
            SampleStemModel.stem,
            SampleModel.head,
            SampleModel.tail,
            SampleModel.first_ns,
            SampleModel.gone_ns,
        )
        .join(SampleStemModel, SampleStemModel.id == SampleModel.stem_id)
        .where(SampleModel.place_id == place_id, IS_LIVE, SampleModel.live_ns > cleared_ns)
    )
    ended_ns_of: dict[str, int] = {}
    keys: list[int] = []
    since_ns = 1 << 62
    for row in connection.execute(present):
        ended_ns = max(row.gone_ns, cleared_ns)
        ended_ns_of[id_of_bytes(row.stem + row.head + row.tail)] = ended_ns
        keys.append(row.key)
        # The time of the put would be too late: it is reported when the put returns, and a claim
        # may be earlier.
        since_ns = min(since_ns, max(ended_ns, row.first_ns))
    events = _declaration(reader, connection, place_id, cleared_ns)
    if keys:
        events += _of_present(
            _shaping_events(reader, connection, place_id, keys, since_ns), ended_ns_of
        )
    return events


def _declaration(
    reader: Reader, connection: Connection, place_id: int, cleared_ns: int
) -> list[Event]:
    """Return the newest declaration of a partition.

    Samples that were put and cleared are subtracted from the declared number. So the number of
    samples not put yet is right without the events of cleared samples.
    """
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
    declarations = reader.events(connection, newest)
    for event in declarations:
        declared = event.attributes.get(_SAMPLES)
        if isinstance(declared, int) and declared > 0:
            gone = _gone(connection, place_id, cleared_ns, event.time_ns, declared)
            remaining = {_SAMPLES: max(0, declared - gone)}
            return [replace(event, attributes={**event.attributes, **remaining})]
    return declarations


def _gone(
    connection: Connection, place_id: int, cleared_ns: int, since_ns: int, maximum: int
) -> int:
    """Return the number of samples cleared by id since a time, up to ``maximum``.

    Withdrawn samples do not count, since they are put again under other ids. Neither do clears of
    absent samples.

    Args:
        cleared_ns: last clear of the entire partition before that time.
        since_ns: the time, in nanoseconds since 1970.
    """
    record = case((EventModel.name == "cleared", EventModel.record), else_=None)
    events = (
        select(EventModel.name, EventModel.keys, record.label("record"))
        .where(
            EventModel.place_id == place_id,
            EventModel.time_ns > since_ns,
            EVENT_NAME.in_(("put", "cleared")),
        )
        # A clear applies to puts of the same time.
        .order_by(EventModel.time_ns, EventModel.name.desc(), EventModel.id)
        .execution_options(yield_per=100)
    )
    present: set[int] = set()
    cleared: set[int] = set()
    earlier: set[int] = set()
    gone = 0
    with connection.execute(events) as rows:
        for row in rows:
            named = set(unpack_keys(row.keys))
            if row.name == "put":
                present |= named
                continue
            if not _is_withdrawal(expand(row.record)):
                gone += len(named & present)
                # Possibly put before that time.
                earlier |= named - present - cleared
            present -= named
            cleared |= named
            if gone >= maximum:
                return gone
    return gone + _count_present(connection, earlier, cleared_ns, since_ns)


def _count_present(connection: Connection, keys: set[int], cleared_ns: int, at_ns: int) -> int:
    """Return how many of these samples were present at a time."""
    newest: dict[str, dict[int, int]] = {"put": {}, "cleared": {}}
    events = (
        select(
            EventSampleModel.block, EventSampleModel.members, EventModel.name, EventModel.time_ns
        )
        .join(EventModel, EventModel.id == EventSampleModel.event_id)
        .where(
            EventModel.time_ns > cleared_ns, EventModel.time_ns <= at_ns, EVENT_NAME.in_([*newest])
        )
    )
    for blocks in in_groups(pack_blocks(keys)):
        for row in connection.execute(events.where(EventSampleModel.block.in_(blocks))):
            times = newest[row.name]
            for key in keys.intersection(unpack_block(row.block, row.members)):
                times[key] = max(row.time_ns, times.get(key, 0))
    ended_ns = newest["cleared"]
    return sum(put_ns > ended_ns.get(key, 0) for key, put_ns in newest["put"].items())


def _is_withdrawal(record: bytes) -> bool:
    if _WITHDRAWN.encode() not in record:
        return False  # avoid decoding most records
    [event] = decode_logs(record).events
    return event.attributes.get(_WITHDRAWN) is True


def _shaping_events(
    reader: Reader, connection: Connection, place_id: int, keys: Sequence[int], since_ns: int
) -> list[Event]:
    """Return the events that determine the state of these samples, possibly with other events."""
    since = (EventModel.time_ns >= since_ns, EventModel.name.in_(_SHAPING))
    few = (
        select(EventModel.id).where(EventModel.place_id == place_id, *since).limit(_FEW_EVENTS + 1)
    )
    ids = list(connection.scalars(few))
    if len(ids) > _FEW_EVENTS:
        # An old sample must not cause all later events to be read.
        named = (
            select(EventSampleModel.event_id)
            .join(EventModel, EventModel.id == EventSampleModel.event_id)
            .where(*since)
            .distinct()
        )
        ids = sorted(
            {
                event_id
                for group in in_groups(sorted(keys))
                for event_id in connection.scalars(named.where(names_any(group)))
            }
        )
    return _of_ids(reader, connection, ids)


def _of_present(events: Iterable[Event], ended: Mapping[str, int]) -> list[Event]:
    """Return the events reduced to present samples, each since its latest clear."""
    reduced = []
    for event in events:
        ids = tuple(
            [
                sample_id
                for sample_id in event.sample_ids
                if sample_id in ended and ended[sample_id] < event.time_ns
            ]
        )
        if ids:
            reduced.append(replace(event, sample_ids=ids))
    return reduced


def _of_ids(reader: Reader, connection: Connection, ids: Iterable[int]) -> list[Event]:
    return [
        event
        for group in in_groups(sorted(ids))
        for event in reader.events(
            connection,
            select(*EVENT_COLUMNS).where(EventModel.id.in_(group)).order_by(EventModel.id),
        )
    ]
