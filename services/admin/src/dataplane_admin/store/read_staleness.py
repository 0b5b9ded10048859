"""How old the weights were that samples were generated with when they were trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sqlalchemy import Connection, func, select

from dataplane_admin.store.apply_events import unpack_keys
from dataplane_admin.store.models import EventModel, PlaceModel, SampleModel
from dataplane_admin.store.reader import Reader, of_keys, trace_bytes
from dataplane_admin.store.rows import StalenessRow
from dataplane_admin.store.texts import storable

# Steps that are read at a time, and samples after which no more are.
_STEPS = 20
_MOST_SAMPLES = 250_000

_Trained = tuple[int | None, int, int | None]
"""A step, the key of a sample and the version after training on it."""


def read_staleness(reader: Reader, run_id: str, steps: int) -> StalenessRow:
    """Of `Store.staleness`."""
    places = select(PlaceModel.id).where(PlaceModel.run_id == storable(run_id))
    of_run = (EventModel.place_id.in_(places), EventModel.name == "trained")
    columns = select(EventModel.step, EventModel.weight_version, EventModel.keys).where(*of_run)
    counts: Counter[int] = Counter()
    unknown = left_out = 0
    with reader.connect() as connection:
        newest = connection.scalar(select(func.max(EventModel.step)).where(*of_run))
        if newest is None:
            trained = _distinct(connection.execute(columns.where(EventModel.step.is_(None))))
            counts, unknown = _count(connection, trained)
            return StalenessRow(counts, unknown)
        recent = EventModel.step > newest - steps
        oldest = connection.scalar(select(func.min(EventModel.step)).where(*of_run, recent))
        high = newest
        while oldest is not None and high >= oldest:
            low = max(oldest, high - _STEPS + 1)
            some = columns.where(EventModel.step.between(low, high))
            found, not_known = _count(connection, _distinct(connection.execute(some)))
            counts += found
            unknown += not_known
            high = low - 1
            if counts.total() + unknown >= _MOST_SAMPLES:
                left_out = high - oldest + 1
                break
    return StalenessRow(counts, unknown, left_out)


def read_trace_staleness(reader: Reader, trace_id: str) -> StalenessRow:
    """Of `Store.trace_staleness`."""
    wanted = trace_bytes(trace_id)
    if wanted is None:
        return StalenessRow({}, 0)
    columns = select(EventModel.step, EventModel.weight_version, EventModel.keys).where(
        EventModel.trace_id == wanted, EventModel.name == "trained"
    )
    with reader.connect() as connection:
        return StalenessRow(*_count(connection, _distinct(connection.execute(columns))))


def _distinct(rows: Iterable[tuple[int | None, int | None, bytes]]) -> set[_Trained]:
    """Every policy worker of a sharded model may tell of the same sample; it counts once."""
    return {(step, key, version) for step, version, packed in rows for key in unpack_keys(packed)}


def _count(connection: Connection, trained: set[_Trained]) -> tuple[Counter[int], int]:
    """Versions to samples, and how many of which a version is not known."""
    born: dict[int, int | None] = {}
    versions = select(SampleModel.key, SampleModel.weight_version)
    for chosen in of_keys({key for _, key, _ in trained}):
        for key, version in connection.execute(versions.where(chosen)):
            born[key] = version
    counts: Counter[int] = Counter()
    unknown = 0
    for _, key, version in trained:
        first = born.get(key)
        if version is None or first is None:
            unknown += 1
        else:
            counts[version - first] += 1
    return counts, unknown
