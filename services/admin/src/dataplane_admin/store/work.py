"""Transaction of the writer: its counters, lookups and inserts."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, TypeVar, cast  # Any: values of rows

from sqlalchemy import (
    BindParameter,
    Connection,
    Select,
    Table,
    Update,
    bindparam,
    delete,
    insert,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from dataplane_admin.store.tables import StateRow

_AT_ONCE = 500

WANTED: BindParameter[Any] = bindparam("wanted", expanding=True)
"""The list of a lookup: ``select(...).where(column.in_(WANTED))``.

SQLite finds the values of one column by index; for pairs of values it would read the entire table.

For a small request most time goes to SQLAlchemy, half of it to building statements and cache keys.
So the writer's lookups are constants.
"""

_READ_STATE = select(StateRow.__table__)
_SAVE_STATE = update(cast("Table", StateRow.__table__))

_T = TypeVar("_T")


@dataclass
class State:
    """The row of counters while a transaction changes it."""

    revision: int
    last_id: int
    traces: int
    spans: int
    events: int
    samples: int
    nbytes: int

    @classmethod
    def read(cls, connection: Connection) -> State:
        """Read the row."""
        row = connection.execute(_READ_STATE).mappings().one()
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})

    def save(self, connection: Connection, *, changed: bool) -> None:
        """Save the row, with the next revision if anything has ``changed``."""
        self.revision += changed
        connection.execute(_SAVE_STATE, self.__dict__)

    def next_id(self) -> int:
        """Return a new key."""
        self.last_id += 1
        return self.last_id


@dataclass
class Work:
    """A transaction of the writer: its connection, counters and time."""

    connection: Connection
    state: State
    now_ns: int
    is_sqlite: bool

    @classmethod
    def begin(cls, connection: Connection, *, is_sqlite: bool) -> Work:
        """Start work in a transaction that has locked out other writers."""
        return cls(connection, State.read(connection), time.time_ns(), is_sqlite)

    @property
    def mark(self) -> str:
        """Placeholder of a value in the driver's SQL."""
        return "?" if self.is_sqlite else "%s"

    def insert_new(self, model: type[Any], rows: list[dict[str, Any]]) -> None:
        """Insert rows; skip those with an existing key."""
        if rows:
            table = model.__table__
            statement = sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)
            self.connection.execute(statement.on_conflict_do_nothing(), rows)

    def put(self, model: type[Any], rows: list[tuple[float | None, ...]]) -> None:
        """Insert rows of numbers, or replace those with the same key.

        This bypasses SQLAlchemy, which dominates the time for many short rows.
        """
        if rows:
            table = model.__table__
            key = [column.name for column in table.primary_key]
            names = [column.name for column in table.columns]
            rest = ", ".join(f"{name} = excluded.{name}" for name in names if name not in key)
            self.connection.exec_driver_sql(
                f"INSERT INTO {table.name} ({', '.join(names)}) "  # noqa: S608  # names of tables and columns
                f"VALUES ({', '.join([self.mark] * len(names))}) "
                f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET {rest}",
                rows,
            )

    def add(self, model: type[Any], rows: list[dict[str, Any]]) -> None:
        """Insert new rows."""
        if rows:
            self.connection.execute(insert(model.__table__), rows)

    def change(self, model: type[Any], key: str, rows: list[dict[str, Any]]) -> None:
        """Update rows by their key, all with the same columns."""
        if rows:
            self.connection.execute(
                _update(model.__table__, key, tuple(rows[0])),
                [
                    {"of_key": row[key]}
                    | {f"to_{name}": value for name, value in row.items() if name != key}
                    for row in rows
                ],
            )

    def save(
        self, model: type[Any], key: str, rows: list[dict[str, Any]], stored: Container[Any]
    ) -> None:
        """Update the rows whose key is stored, and insert the others."""
        self.change(model, key, [row for row in rows if row[key] in stored])
        self.add(model, [row for row in rows if row[key] not in stored])

    def rows(
        self, lookup: Select[*tuple[Any, ...]], wanted: Iterable[Any], **values: Any
    ) -> Iterator[Any]:
        """Yield the rows of a lookup with `WANTED`; ``values`` are its other parameters."""
        for group in in_groups(wanted):
            yield from self.connection.execute(lookup, {"wanted": group, **values})

    def beyond(self, key: Any, updated_ns: Any, maximum: int) -> Sequence[Any]:
        """Return the keys of the rows beyond a maximum number, those updated longest ago."""
        newest = select(key).order_by(updated_ns.desc(), key)
        return self.connection.scalars(newest.offset(maximum)).all()

    def drop(self, column: Any, values: Iterable[Any]) -> int:
        """Delete the rows that have one of these values in a column; return how many."""
        rows = delete(column.class_)
        return sum(
            self.connection.execute(rows.where(column.in_(group))).rowcount
            for group in in_groups(values)
        )


@cache
def _update(table: Table, key: str, names: tuple[str, ...]) -> Update:
    columns: dict[str, Any] = {name: bindparam(f"to_{name}") for name in names if name != key}
    return update(table).where(table.c[key] == bindparam("of_key")).values(columns)


def in_groups(items: Iterable[_T], size: int = _AT_ONCE) -> Iterator[list[_T]]:
    """Yield the items in lists of up to ``size``."""
    rest = iter(items)
    while group := list(islice(rest, size)):
        yield group
