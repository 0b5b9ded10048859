"""`Reader`: connections, spans of traces, and events with their sample ids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar  # Any: rows

from sqlalchemy import ColumnElement, Connection, Select, or_, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from dataplane_admin.store.compressed import expand_all
from dataplane_admin.store.engine import Database
from dataplane_admin.store.errors import StoreUnavailable
from dataplane_admin.store.packed import unpack_keys
from dataplane_admin.store.tables import ChunkModel, EventModel, SampleModel, SampleStemModel
from dataplane_admin.store.texts import id_of_bytes
from dataplane_admin.store.work import in_groups
from observability.records import Event, Span, decode_logs, decode_traces

_Place = TypeVar("_Place")

_MAX_KNOWN_IDS = 400_000
# Maximum distance of two wanted keys that are read as one range.
_GAP = 64
_RANGES = 100


class Reader:
    """Reader of a database. Thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # Keys are never reused and ids never change, so this cache is never stale.
        self._ids: dict[int, str] = {}

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """Open a connection that sees one snapshot of the database.

        Raises StoreUnavailable if no connection is available, or the database failed.
        """
        try:
            with self._database.readers.begin() as connection:
                yield connection
        except (DBAPIError, PoolTimeout) as error:
            reason = error.orig if isinstance(error, DBAPIError) else error
            self._database.note_damage(reason)
            raise StoreUnavailable(f"cannot read the database: {reason}") from error

    def rows(self, query: Select[*tuple[Any, ...]]) -> Sequence[Any]:
        """Return the rows of a single query. Raises as `connect`."""
        with self.connect() as connection:
            return connection.execute(query).all()

    def page(
        self, query: Select[*tuple[Any, ...]], limit: int, place_of: Callable[[Any], _Place]
    ) -> tuple[Sequence[Any], _Place | None]:
        """Return the first ``limit`` rows, and the place of the last one if there are more."""
        rows = self.rows(query.limit(limit + 1))
        return rows[:limit], place_of(rows[limit - 1]) if len(rows) > limit else None

    def spans(self, connection: Connection, trace_ids: Iterable[bytes]) -> list[Span]:
        """Return the spans of traces in order of arrival."""
        blobs = [
            row[0]
            for group in in_groups(trace_ids)
            for row in connection.execute(
                select(ChunkModel.blob)
                .where(ChunkModel.trace_id.in_(group))
                .order_by(ChunkModel.id)
            )
        ]
        return decode_traces(expand_all(blobs)).spans

    def events(
        self, connection: Connection, chosen: Select[*tuple[Any, ...]], *, only: str | None = None
    ) -> list[Event]:
        """Return the events of a query of `EVENT_COLUMNS`.

        Args:
            only: the only sample id to return with each event; None for all.
        """
        rows = connection.execute(chosen).all()
        events = decode_logs(expand_all(row.record for row in rows)).events
        if only is not None:
            ids_of_rows: list[tuple[str, ...]] = [(only,) if row.keys else () for row in rows]
        else:
            keys = [unpack_keys(row.keys) for row in rows]
            ids = self._ids_of(connection, keys)
            ids_of_rows = [tuple([ids[key] for key in each]) for each in keys]
        return [
            # `dataclasses.replace` takes several times as long.
            Event(
                event.name,
                event.time_ns,
                event.attributes,
                sample_ids or event.sample_ids,
                event.process,
                event.trace_id,
                event.span_id,
                row.received_ns,
            )
            for event, row, sample_ids in zip(events, rows, ids_of_rows, strict=True)
        ]

    def _ids_of(self, connection: Connection, keys: Iterable[Sequence[int]]) -> Mapping[int, str]:
        known = self._ids
        wanted = {key for named in keys for key in named}
        missing = [key for key in wanted if key not in known]
        if not missing:
            return known
        if len(known) + len(missing) > _MAX_KNOWN_IDS:
            # Other threads continue with the old dict.
            reused = wanted.intersection(known)
            known = self._ids = {key: known[key] for key in reused}
        columns = select(
            SampleModel.key, SampleStemModel.stem, SampleModel.head, SampleModel.tail
        ).join(SampleStemModel, SampleStemModel.id == SampleModel.stem_id)
        for chosen in of_keys(missing):
            for key, *parts in connection.execute(columns.where(chosen)):
                known[key] = id_of_bytes(b"".join(parts))
        return known


def of_keys(keys: Collection[int]) -> Iterator[ColumnElement[bool]]:
    """Yield conditions that select at least the samples with these keys, and possibly others.

    Samples that were reported together have consecutive keys, and reading a range of keys is
    several times faster than reading single keys.
    """
    ordered = sorted(keys)
    if not ordered:
        return
    ranges: list[tuple[int, int]] = []
    first = last = ordered[0]
    for key in ordered:
        if key > last + _GAP:
            ranges.append((first, last))
            first = key
        last = key
    ranges.append((first, last))
    for group in in_groups(ranges, _RANGES):
        yield or_(*(SampleModel.key.between(*limits) for limits in group))


EVENT_COLUMNS = (EventModel.record, EventModel.keys, EventModel.received_ns)
"""Columns that `Reader.events` needs."""


def trace_bytes(trace_id: str) -> bytes | None:
    """Return the bytes of a trace id, None for an invalid one."""
    if len(trace_id) != 32 or not trace_id.isascii() or not trace_id.isalnum():
        return None
    try:
        return bytes.fromhex(trace_id)
    except ValueError:
        return None
