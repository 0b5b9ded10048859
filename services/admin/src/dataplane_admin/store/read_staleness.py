"""How old the weights were that samples were generated with when they were trained on."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any  # Any: rows

from sqlalchemy import ColumnElement, Connection, func, select

from dataplane_admin.store.lives import life_at, read_lives
from dataplane_admin.store.models import EventModel, EventSampleModel, PlaceModel, SampleModel
from dataplane_admin.store.packed import unpack_keys
from dataplane_admin.store.reader import Reader, of_keys, trace_bytes
from dataplane_admin.store.rows import StalenessRow
from dataplane_admin.store.texts import storable
from dataplane_admin.store.work import in_groups

# Steps that are asked for at a time, and samples after which no more are looked at.
_STEPS = 20
_MOST_SAMPLES = 250_000
# Events that tell no step are read so many at a time.
_EVENTS = 20

_Trained = dict[tuple[int | None, int, int | None], int]
"""A step, the key of a sample and the version after training on it, to when it was told first."""

_COLUMNS = (EventModel.step, EventModel.weight_version, EventModel.keys, EventModel.time_ns)


def read_staleness(reader: Reader, run_id: str, steps: int) -> StalenessRow:
    """Of `Store.staleness`."""
    places = select(PlaceModel.id).where(PlaceModel.run_id == storable(run_id))
    of_run = EventModel.place_id.in_(places) & (EventModel.name == "trained")
    with reader.connect() as connection:
        newest = connection.scalar(select(func.max(EventModel.step)).where(of_run))
        if newest is None:
            return _of_events(connection, of_run & EventModel.step.is_(None))
        recent = of_run & (EventModel.step > newest - steps)
        oldest = connection.scalar(select(func.min(EventModel.step)).where(recent))
        oldest = newest if oldest is None else oldest
        trained: _Trained = {}
        left_out = 0
        for step, rows in _by_step(connection, of_run, newest, oldest):
            _add(trained, rows)
            if len(trained) >= _MOST_SAMPLES:
                left_out = step - oldest
                break
        return _count(connection, trained, left_out)


def read_trace_staleness(reader: Reader, trace_id: str) -> StalenessRow:
    """Of `Store.trace_staleness`."""
    wanted = trace_bytes(trace_id)
    if wanted is None:
        return StalenessRow({}, 0)
    of_trace = (EventModel.trace_id == wanted) & (EventModel.name == "trained")
    with reader.connect() as connection:
        return _of_events(connection, of_trace)


def _by_step(
    connection: Connection, chosen: ColumnElement[bool], newest: int, oldest: int
) -> Iterator[tuple[int, Iterable[Any]]]:
    """Events by step, the newest step first."""
    columns = select(*_COLUMNS).where(chosen).order_by(EventModel.step.desc())
    for high in range(newest, oldest - 1, -_STEPS):
        low = max(oldest, high - _STEPS + 1)
        some = connection.execute(columns.where(EventModel.step.between(low, high)))
        yield from groupby(some, key=lambda row: row.step)


def _of_events(connection: Connection, chosen: ColumnElement[bool]) -> StalenessRow:
    """Of events, the newest first, until they are too many samples."""
    newest = select(EventModel.id).where(chosen).order_by(EventModel.id.desc())
    trained: _Trained = {}
    for some in in_groups(connection.scalars(newest.limit(_MOST_SAMPLES)).all(), _EVENTS):
        _add(trained, connection.execute(select(*_COLUMNS).where(EventModel.id.in_(some))))
        if len(trained) >= _MOST_SAMPLES:
            break
    return _count(connection, trained)


def _add(trained: _Trained, rows: Iterable[Any]) -> None:
    """Every policy worker of a sharded model may tell of the same sample; it counts once."""
    for row in rows:
        for key in unpack_keys(row.keys):
            one = row.step, key, row.weight_version
            trained[one] = min(row.time_ns, trained.get(one, row.time_ns))


def _count(connection: Connection, trained: _Trained, left_out: int = 0) -> StalenessRow:
    columns = select(
        SampleModel.key,
        SampleModel.place_id,
        SampleModel.weight_version,
        SampleModel.put_ns,
        SampleModel.first_ns,
    )
    samples = {
        row.key: row
        for chosen in of_keys({key for _, key, _ in trained})
        for row in connection.execute(columns.where(chosen))
    }
    born: dict[tuple[int, int], int | None] = {}
    earlier: dict[int, list[tuple[Any, int]]] = defaultdict(list)
    for (_, key, _), time_ns in trained.items():
        sample = samples.get(key)
        if sample is not None and time_ns >= sample.put_ns:
            born[key, time_ns] = sample.weight_version
        elif sample is not None:
            earlier[sample.place_id].append((sample, time_ns))
    for place_id, moments in earlier.items():
        born |= _born_before(connection, place_id, moments)
    counts: Counter[int] = Counter()
    unknown = 0
    for (_, key, version), time_ns in trained.items():
        generated = born.get((key, time_ns))
        if version is None or generated is None:
            unknown += 1
        else:
            counts[version - generated] += 1
    return StalenessRow(counts, unknown, left_out)


def _born_before(
    connection: Connection, place_id: int, moments: Iterable[tuple[Any, int]]
) -> dict[tuple[int, int], int | None]:
    """Of samples that were trained before their newest life, (key, moment) to the version of the
    life of that moment.

    A sample that was cleared before it is told as trained is the one that was cleared. One that
    was never put before is the next one: a put is told when it returns.
    """
    wanted: dict[int, tuple[int, int]] = {}
    until_ns = 0
    for sample, time_ns in moments:
        first_ns, oldest_ns = wanted.get(sample.key, (sample.first_ns, time_ns))
        wanted[sample.key] = first_ns, min(oldest_ns, time_ns)
        until_ns = max(until_ns, time_ns)
    lives = read_lives(connection, place_id, wanted, until_ns=until_ns)
    born: dict[tuple[int, int], int | None] = {}
    early: dict[int, list[int]] = defaultdict(list)
    for sample, time_ns in moments:
        life = life_at(lives[sample.key], time_ns)
        if life is None:
            early[sample.key].append(time_ns)
        else:
            born[sample.key, time_ns] = life.weight_version
    puts = (
        select(EventSampleModel.sample_key, EventModel.weight_version)
        .join(EventModel, EventModel.id == EventSampleModel.event_id)
        .where(EventModel.name == "put")
        .order_by(EventModel.time_ns.desc(), EventModel.id.desc())
    )
    for some in in_groups(early):
        rows = connection.execute(puts.where(EventSampleModel.sample_key.in_(some)))
        first = {row.sample_key: row.weight_version for row in rows}
        born |= {(key, at): first.get(key) for key in some for at in early[key]}
    return born
