"""Staleness: weight versions between the generation of samples and their training."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any  # Any: rows

from sqlalchemy import ColumnElement, Connection, func, select

from dataplane_admin.models import Staleness, TraceStaleness
from dataplane_admin.store.lives import life_at, read_lives
from dataplane_admin.store.packed import pack_blocks, unpack_block, unpack_keys
from dataplane_admin.store.reader import Reader, of_keys, trace_bytes
from dataplane_admin.store.tables import EventModel, EventSampleModel, PlaceModel, SampleModel
from dataplane_admin.store.texts import storable
from dataplane_admin.store.work import in_groups

# Steps per query, and samples after which no more steps are read.
_STEPS = 20
_MAX_SAMPLES = 250_000
# Maximum number of events per query, for events without a step.
_EVENTS = 20

_Trained = dict[tuple[int | None, int, int | None], int]
"""Step, sample key and weight version at training, to the time of the first report."""

_COLUMNS = (EventModel.step, EventModel.weight_version, EventModel.keys, EventModel.time_ns)


def read_staleness(reader: Reader, run_id: str, steps: int = 20) -> Staleness:
    """Return the staleness of the samples that the newest ``steps`` of a run trained on.

    Newest steps are read first, up to 250,000 samples. Of a run without steps, the newest events
    count.
    """
    places = select(PlaceModel.id).where(PlaceModel.run_id == storable(run_id))
    of_run = EventModel.place_id.in_(places) & (EventModel.name == "trained")
    steps_omitted = 0
    with reader.connect() as connection:
        newest = connection.scalar(select(func.max(EventModel.step)).where(of_run))
        if newest is None:
            trained = _of_events(connection, of_run & EventModel.step.is_(None))
        else:
            trained = {}
            recent = of_run & (EventModel.step > newest - steps)
            oldest = connection.scalar(select(func.min(EventModel.step)).where(recent))
            oldest = newest if oldest is None else oldest
            for step, rows in _by_step(connection, of_run, newest, oldest):
                _add(trained, rows)
                if len(trained) >= _MAX_SAMPLES:
                    steps_omitted = step - oldest
                    break
        counts, unknown = _count(connection, trained)
    return Staleness(
        run_id=run_id,
        steps=steps,
        steps_omitted=steps_omitted,
        counts=dict(counts),
        mean=_mean(counts),
        unknown=unknown,
    )


def read_trace_staleness(reader: Reader, trace_id: str) -> TraceStaleness | None:
    """Return the staleness of the samples that a trace trained on; None if it trained on none.

    Of more than 250,000 samples, the ones reported last count.
    """
    wanted = trace_bytes(trace_id)
    if wanted is None:
        return None
    of_trace = (EventModel.trace_id == wanted) & (EventModel.name == "trained")
    with reader.connect() as connection:
        counts, unknown = _count(connection, _of_events(connection, of_trace))
    if not counts and not unknown:
        return None
    return TraceStaleness(
        minimum=min(counts, default=None),
        mean=_mean(counts),
        maximum=max(counts, default=None),
        samples=sum(counts.values()),
        unknown=unknown,
    )


def _mean(counts: Mapping[int, int]) -> float | None:
    samples = sum(counts.values())
    return sum(age * count for age, count in counts.items()) / samples if samples else None


def _by_step(
    connection: Connection, chosen: ColumnElement[bool], newest: int, oldest: int
) -> Iterator[tuple[int, Iterable[Any]]]:
    """Yield the events by step, newest step first."""
    columns = select(*_COLUMNS).where(chosen).order_by(EventModel.step.desc())
    for high in range(newest, oldest - 1, -_STEPS):
        low = max(oldest, high - _STEPS + 1)
        rows = connection.execute(columns.where(EventModel.step.between(low, high)))
        yield from groupby(rows, key=lambda row: row.step)


def _of_events(connection: Connection, chosen: ColumnElement[bool]) -> _Trained:
    """Return the trained samples of events, newest first, up to `_MAX_SAMPLES`."""
    # Not ordered by the key alone: a database might scan all events in the key's order.
    newest = select(EventModel.id).where(chosen).order_by((EventModel.id + 0).desc())
    trained: _Trained = {}
    for group in in_groups(connection.scalars(newest.limit(_MAX_SAMPLES)).all(), _EVENTS):
        _add(trained, connection.execute(select(*_COLUMNS).where(EventModel.id.in_(group))))
        if len(trained) >= _MAX_SAMPLES:
            break
    return trained


def _add(trained: _Trained, rows: Iterable[Any]) -> None:
    """Add samples; each counts once, though every worker of a sharded model may report it."""
    for row in rows:
        for key in unpack_keys(row.keys):
            sample = row.step, key, row.weight_version
            trained[sample] = min(row.time_ns, trained.get(sample, row.time_ns))


def _count(connection: Connection, trained: _Trained) -> tuple[Mapping[int, int], int]:
    """Return the number of samples by staleness, and the number with unknown staleness."""
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
    generated_by: dict[tuple[int, int], int | None] = {}
    earlier: dict[int, list[tuple[Any, int]]] = defaultdict(list)
    for (_, key, _), time_ns in trained.items():
        sample = samples.get(key)
        if sample is not None and time_ns >= sample.put_ns:
            generated_by[key, time_ns] = sample.weight_version
        elif sample is not None:
            earlier[sample.place_id].append((sample, time_ns))
    for place_id, moments in earlier.items():
        generated_by |= _versions_of_earlier_lives(connection, place_id, moments)
    counts: Counter[int] = Counter()
    unknown = 0
    for (_, key, version), time_ns in trained.items():
        generated = generated_by.get((key, time_ns))
        if version is None or generated is None:
            unknown += 1
        else:
            counts[version - generated] += 1
    return counts, unknown


def _versions_of_earlier_lives(
    connection: Connection, place_id: int, moments: Iterable[tuple[Any, int]]
) -> dict[tuple[int, int], int | None]:
    """Return the generation version, by (key, time), of samples trained before their newest life.

    If the sample was cleared before it was reported as trained, the cleared life counts. If no put
    was reported before, the first life counts, since a put is reported only when it returns.
    """
    wanted: dict[int, tuple[int, int]] = {}
    until_ns = 0
    for sample, time_ns in moments:
        first_ns, oldest_ns = wanted.get(sample.key, (sample.first_ns, time_ns))
        wanted[sample.key] = first_ns, min(oldest_ns, time_ns)
        until_ns = max(until_ns, time_ns)
    lives = read_lives(connection, place_id, wanted, until_ns=until_ns)
    generated_by: dict[tuple[int, int], int | None] = {}
    before_first: dict[int, list[int]] = defaultdict(list)
    for sample, time_ns in moments:
        life = life_at(lives[sample.key], time_ns)
        if life is None:
            before_first[sample.key].append(time_ns)
        else:
            generated_by[sample.key, time_ns] = life.weight_version
    puts = (
        select(EventSampleModel.block, EventSampleModel.members, EventModel.weight_version)
        .join(EventModel, EventModel.id == EventSampleModel.event_id)
        .where(EventModel.name == "put", EventModel.weight_version.is_not(None))
        .order_by(EventModel.time_ns.desc(), EventModel.id.desc())
    )
    first: dict[int, int] = {}
    for blocks in in_groups(pack_blocks(before_first)):
        for row in connection.execute(puts.where(EventSampleModel.block.in_(blocks))):
            for key in unpack_block(row.block, row.members):
                first[key] = row.weight_version
    for key, times in before_first.items():
        generated_by |= {(key, at): first.get(key) for at in times}
    return generated_by
