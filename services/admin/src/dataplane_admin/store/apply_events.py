"""Storage of lifecycle events, each once, with their samples and open waits.

Processes export independently, so events do not arrive in the order of their times. The state of a
sample follows from the reported times, not from the order of arrival.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any  # Any: values of rows

from sqlalchemy import bindparam, select, tuple_

from dataplane_admin.store.apply_curves import rewind_curves
from dataplane_admin.store.apply_runs import apply_run_changes, apply_runs
from dataplane_admin.store.batch import Batch, LifecycleEvent
from dataplane_admin.store.lives import EVENT_NAME, SampleLife, look_up_lives
from dataplane_admin.store.packed import pack_blocks, pack_keys, unpack_keys
from dataplane_admin.store.tables import (
    EventModel,
    EventSampleModel,
    OpenWaitModel,
    PlaceModel,
    SampleModel,
    SampleStemModel,
)
from dataplane_admin.store.texts import split_id, storable
from dataplane_admin.store.work import WANTED, Work, in_groups

ENDS = ("claimed", "claim_failed", "answered")
"""Events that end a wait."""

EVENT_BYTES = 250
"""Approximate bytes of an event without its record and keys."""

SAMPLE_BYTES = 110
"""Approximate bytes of a sample, without its events."""

# The database looks up each stem of a group of ids with each head of the group. In sorted groups,
# few stems differ.
_PAIRS_AT_ONCE = 250


@dataclass(slots=True)
class _Place:
    id: int
    cleared_ns: int
    clears_ns: list[int] = field(default_factory=list)
    """Times of the new events that clear the entire partition."""


_PlaceKey = tuple[str, str]
_SampleKey = tuple[int, bytes]

# Names that both a row of a sample and `SampleLife` have, in the order of `SampleLife`.
_STATE = tuple(each.name for each in fields(SampleLife) if hasattr(SampleModel, each.name))
_state_of = attrgetter(*_STATE)

_STORED = select(EventModel.digest).where(EventModel.digest.in_(WANTED))
_PLACES = select(PlaceModel.__table__).where(
    tuple_(PlaceModel.run_id, PlaceModel.partition).in_(WANTED)
)
_STEMS = select(SampleStemModel.__table__).where(SampleStemModel.stem.in_(WANTED))
_LIVES = select(
    SampleModel.__table__, SampleModel.first_ns, SampleModel.last_ns, SampleStemModel.stem
).join(SampleStemModel, SampleStemModel.id == SampleModel.stem_id)
# For pairs of stem and head, SQLite would scan the table.
_SAMPLES = _LIVES.where(
    SampleModel.stem_id.in_(bindparam("stems", expanding=True)),
    SampleModel.head.in_(bindparam("heads", expanding=True)),
)
_ENDED_WAITS = select(EventModel.wait).where(EventModel.wait.in_(WANTED), EventModel.name.in_(ENDS))


def apply_events(work: Work, batches: Sequence[Batch]) -> list[int]:
    """Store new events; return the number of new events of each batch."""
    events = [event for batch in batches for event in batch.events]
    if not events:
        return [0] * len(batches)
    seen = {row.digest for row in work.rows(_STORED, {event.digest for event in events})}
    new: list[LifecycleEvent] = []
    counts = []
    for batch in batches:
        before = len(new)
        for event in batch.events:
            if event.digest not in seen:
                seen.add(event.digest)
                new.append(event)
        counts.append(len(new) - before)
    if new:
        _store(work, new)
    return counts


def _store(work: Work, events: list[LifecycleEvent]) -> None:
    places = _places(work, events)
    placed = [(event, places[_place_key(event)]) for event in events]
    samples = _samples(work, placed)
    rows: list[dict[str, Any]] = []
    named: list[dict[str, int]] = []
    for event, place in placed:
        event_id = work.state.next_id()
        keys = []
        for sample_id in event.sample_ids:
            sample = samples[place.id, sample_id]
            sample.apply(event, place.cleared_ns)
            keys.append(sample.key)
        if event.name == "cleared" and not keys:
            place.clears_ns.append(event.time_ns)
        rows.append(_event_row(event, event_id, place.id, keys, work.now_ns))
        named += [
            {"block": block, "event_id": event_id, "members": members}
            for block, members in pack_blocks(keys).items()
        ]
        work.state.nbytes += len(event.record) + EVENT_BYTES + len(rows[-1]["keys"])
    work.add(EventModel, rows)
    work.add(EventSampleModel, named)
    work.state.events += len(rows)
    _clear_partitions(work, [place for place in places.values() if place.clears_ns], samples)
    look_up_lives(work, samples.values())
    _save_samples(work, samples)
    _track_waits(work, rows, events)
    apply_runs(work, ((storable(event.run_id), event.time_ns, event.time_ns) for event in events))
    for resumes in apply_run_changes(work, events):
        rewind_curves(work, resumes)


def _place_key(event: LifecycleEvent) -> _PlaceKey:
    return storable(event.run_id), storable(event.partition)


def _places(work: Work, events: Iterable[LifecycleEvent]) -> dict[_PlaceKey, _Place]:
    wanted = dict.fromkeys(_place_key(event) for event in events)
    places = {
        (row.run_id, row.partition): _Place(row.id, row.cleared_ns)
        for row in work.rows(_PLACES, wanted)
    }
    new: list[dict[str, Any]] = []
    for run_id, partition in wanted:
        if (run_id, partition) not in places:
            place = places[run_id, partition] = _Place(work.state.next_id(), 0)
            new.append({"id": place.id, "run_id": run_id, "partition": partition, "cleared_ns": 0})
    work.add(PlaceModel, new)
    return places


def _samples(
    work: Work, placed: Iterable[tuple[LifecycleEvent, _Place]]
) -> dict[_SampleKey, SampleLife]:
    """Return every named sample; new samples get a new key."""
    wanted: dict[_SampleKey, int] = {}
    for event, place in placed:
        for sample_id in event.sample_ids:
            wanted.setdefault((place.id, sample_id), event.time_ns)
    parts = {sample_id: split_id(sample_id) for _, sample_id in wanted}
    stems, known = _stems(work, dict.fromkeys(stem for stem, _, _ in parts.values()))
    samples: dict[_SampleKey, SampleLife] = {}
    stored = sorted(each for each in parts.values() if each[0] in known)
    for group in in_groups(stored, _PAIRS_AT_ONCE):
        stem_ids, heads = {stems[stem] for stem, _, _ in group}, {head for _, head, _ in group}
        for row in work.connection.execute(_SAMPLES, {"stems": stem_ids, "heads": heads}):
            place_and_id = row.place_id, row.stem + row.head + row.tail
            if place_and_id in wanted:
                samples[place_and_id] = SampleLife(*_state_of(row))
    for (place_id, sample_id), time_ns in wanted.items():
        if (place_id, sample_id) not in samples:
            key, stem_id = work.state.next_id(), stems[parts[sample_id][0]]
            samples[place_id, sample_id] = SampleLife(
                key, place_id, stem_id, None, 0, 0, 0, time_ns, time_ns, is_new=True
            )
    return samples


def _stems(work: Work, wanted: Iterable[bytes]) -> tuple[dict[bytes, int], Collection[bytes]]:
    """Return the id of each stem, and the stems that were stored before; add the others."""
    known = {row.stem: row.id for row in work.rows(_STEMS, wanted)}
    new = {stem: work.state.next_id() for stem in wanted if stem not in known}
    work.add(SampleStemModel, [{"id": id_, "stem": stem} for stem, id_ in new.items()])
    return known | new, known


def _clear_partitions(
    work: Work, places: Sequence[_Place], samples: dict[_SampleKey, SampleLife]
) -> None:
    """Apply clears of entire partitions, also to samples that were put both before and after."""
    for place in places:
        puts = select(EventModel.keys).where(
            EventModel.place_id == place.id,
            EventModel.time_ns > min(place.clears_ns),
            EVENT_NAME == "put",
        )
        keys_put = {key for packed in work.connection.scalars(puts) for key in unpack_keys(packed)}
        known = {sample.key for sample in samples.values()}
        before = _LIVES.where(SampleModel.put_ns.between(1, max(place.clears_ns)))
        for group in in_groups(keys_put - known):
            for row in work.connection.execute(before.where(SampleModel.key.in_(group))):
                samples[place.id, row.stem + row.head + row.tail] = SampleLife(*_state_of(row))
        for sample in samples.values():
            if sample.key in keys_put:
                sample.clear_partition(max(place.clears_ns))
    changed = [
        {"id": place.id, "cleared_ns": max(place.clears_ns)}
        for place in places
        if max(place.clears_ns) > place.cleared_ns
    ]
    work.change(PlaceModel, "id", changed)


def _save_samples(work: Work, samples: dict[_SampleKey, SampleLife]) -> None:
    new, changed = [], []
    for (_, sample_id), sample in samples.items():
        row: dict[str, Any] = dict(zip(_STATE, _state_of(sample), strict=True))
        row["before_ns"] = row["put_ns"] - row.pop("first_ns")
        row["after_ns"] = row.pop("last_ns") - row["gone_ns"]
        if sample.is_new:
            _, row["head"], row["tail"] = split_id(sample_id)
            new.append(row)
        else:
            del row["stem_id"]  # unchanged, and writing it would update the index
            changed.append(row)
    work.add(SampleModel, new)
    work.change(SampleModel, "key", changed)
    work.state.samples += len(new)
    work.state.nbytes += SAMPLE_BYTES * len(new)


def _event_row(
    event: LifecycleEvent, event_id: int, place_id: int, keys: list[int], now_ns: int
) -> dict[str, Any]:
    return {
        "id": event_id,
        "place_id": place_id,
        "name": storable(event.name),
        "step": event.step,
        "time_ns": event.time_ns,
        "received_ns": now_ns,
        "task": storable(event.task),
        "samples": event.samples,
        "weight_version": event.weight_version,
        "trace_id": event.trace_id,
        "span_id": event.span_id,
        "wait": event.wait,
        "digest": event.digest,
        "record": event.record,
        "keys": pack_keys(keys),
    }


def _track_waits(work: Work, rows: list[dict[str, Any]], events: Sequence[LifecycleEvent]) -> None:
    """Close finished waits, and store the newest report of each open wait."""
    ended = {row["wait"] for row in rows if row["wait"] and row["name"] in ENDS}
    newest = {
        # A wait without a name has no end event and is reported once.
        row["wait"] or row["digest"]: (row, event)
        for row, event in zip(rows, events, strict=True)
        if row["name"] == "waiting"
    }
    work.drop(OpenWaitModel.wait, ended | newest.keys())
    finished = {row.wait for row in work.rows(_ENDED_WAITS, newest)}
    work.add(
        OpenWaitModel,
        [
            {
                "event_id": row["id"],
                "wait": wait,
                "place_id": row["place_id"],
                "process": storable(event.process),
                "process_id": event.process_id,
                "is_periodic": event.is_periodic,
            }
            for wait, (row, event) in newest.items()
            if wait not in finished
        ],
    )
