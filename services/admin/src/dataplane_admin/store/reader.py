"""What every reading shares: a connection of its own, ids of traces, and events with their ids."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any  # Any: rows

from sqlalchemy import ColumnElement, Connection, Select, or_, select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from dataplane_admin.store.engine import Database
from dataplane_admin.store.errors import StoreUnavailable
from dataplane_admin.store.models import ChunkModel, EventModel, SampleModel
from dataplane_admin.store.packed import unpack_keys
from dataplane_admin.store.texts import id_of_bytes
from dataplane_admin.store.work import in_groups
from observability.records import Event, Span, decode_logs, decode_traces

_MOST_KNOWN_IDS = 400_000
# Keys between two that are wanted, up to which both are read in one go.
_GAP = 64
_RANGES = 100


class Reader:
    """Reads from a database; every method may be called from any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # Keys are never used again and ids never change, so what is here is always right.
        self._ids: dict[int, str] = {}

    @contextmanager
    def connect(self) -> Iterator[Connection]:
        """A connection that sees one moment of the database.

        Raises:
            StoreUnavailable: there is none to be had, or the database failed.
        """
        try:
            with self._database.readers.begin() as connection:
                yield connection
        except (DBAPIError, PoolTimeout) as error:
            reason = error.orig if isinstance(error, DBAPIError) else error
            self._database.note(reason)
            raise StoreUnavailable(f"the database cannot be read now: {reason}") from error

    def spans(self, connection: Connection, trace_ids: Iterable[bytes]) -> list[Span]:
        """The spans of traces, in the order of their arrival."""
        blobs = [
            row[0]
            for some in in_groups(trace_ids)
            for row in connection.execute(
                select(ChunkModel.blob).where(ChunkModel.trace_id.in_(some)).order_by(ChunkModel.id)
            )
        ]
        # Protobuf messages that stand one after the other are one message with all their parts.
        return decode_traces(b"".join(blobs)).spans

    def events(
        self, connection: Connection, chosen: Select[*tuple[Any, ...]], *, only: str | None = None
    ) -> list[Event]:
        """The events of a query of `EVENT_COLUMNS`.

        Args:
            connection: to read by.
            chosen: the query.
            only: each event's ids are cut to this one.
        """
        rows = connection.execute(chosen).all()
        told = decode_logs(b"".join(row.record for row in rows)).events
        if only is not None:
            return [
                replace(event, sample_ids=(only,)) if row.keys else event
                for event, row in zip(told, rows, strict=True)
            ]
        keys = [unpack_keys(row.keys) for row in rows]
        ids = self._ids_of(connection, keys)
        return [
            replace(event, sample_ids=tuple([ids[key] for key in named])) if named else event
            for event, named in zip(told, keys, strict=True)
        ]

    def _ids_of(self, connection: Connection, keys: Iterable[Sequence[int]]) -> Mapping[int, str]:
        known = self._ids
        wanted = {key for named in keys for key in named}
        missing = [key for key in wanted if key not in known]
        if not missing:
            return known
        if len(known) + len(missing) > _MOST_KNOWN_IDS:
            # Whoever uses the old one goes on with it.
            kept = wanted.intersection(known)
            known = self._ids = {key: known[key] for key in kept}
        columns = select(SampleModel.key, SampleModel.head, SampleModel.tail)
        for chosen in of_keys(missing):
            for key, head, tail in connection.execute(columns.where(chosen)):
                known[key] = id_of_bytes(head + tail)
        return known


def of_keys(keys: Collection[int]) -> Iterator[ColumnElement[bool]]:
    """Conditions that choose samples by key, some others among them.

    Samples that were told of together have keys one after the other, and a range of keys is read
    several times as fast as each by itself.
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
    for some in in_groups(ranges, _RANGES):
        yield or_(*(SampleModel.key.between(*one) for one in some))


EVENT_COLUMNS = (EventModel.record, EventModel.keys)
"""What `Reader.events` needs of a row."""


def trace_bytes(trace_id: str) -> bytes | None:
    """The id of a trace; None of text that is none, whatever stands in it."""
    if len(trace_id) != 32 or not trace_id.isascii() or not trace_id.isalnum():
        return None
    try:
        return bytes.fromhex(trace_id)
    except ValueError:
        return None
