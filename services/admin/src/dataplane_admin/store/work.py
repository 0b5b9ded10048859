"""A transaction of the writer: the counts that it changes, and how it looks up and inserts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar  # Any: values of rows

from sqlalchemy import Connection, bindparam, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from dataplane_admin.store.models import StateRow

_AT_ONCE = 500

_T = TypeVar("_T")


@dataclass
class State:
    """The row of counts while a transaction changes it."""

    revision: int
    last_id: int
    traces: int
    spans: int
    events: int
    samples: int
    nbytes: int

    @classmethod
    def read(cls, connection: Connection) -> State:
        """Of the one row."""
        row = connection.execute(select(StateRow.__table__)).mappings().one()
        return cls(**{name: row[name] for name in cls.__dataclass_fields__})

    def save(self, connection: Connection, *, changed: bool) -> None:
        """With the next revision if anything that is read has ``changed``."""
        self.revision += changed
        connection.execute(update(StateRow).values(**self.__dict__))

    def next_id(self) -> int:
        """A key that was never used."""
        self.last_id += 1
        return self.last_id


@dataclass
class Work:
    """A transaction of the writer: its connection, counts and moment."""

    connection: Connection
    state: State
    now_ns: int
    is_sqlite: bool

    @classmethod
    def begin(cls, connection: Connection, *, is_sqlite: bool) -> Work:
        """Within the transaction, once other writers are locked out."""
        return cls(connection, State.read(connection), time.time_ns(), is_sqlite)

    def insert_new(self, model: type[Any], rows: list[dict[str, Any]]) -> None:
        """Insert rows; those whose key is there already are left out."""
        if rows:
            table = model.__table__
            made = sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)
            self.connection.execute(made.on_conflict_do_nothing(), rows)

    def put(self, model: type[Any], rows: list[tuple[int, ...]]) -> None:
        """Insert rows of numbers, in the place of those whose key is there already.

        Past SQLAlchemy, whose share of the time is the largest where there are many short rows.
        """
        if rows:
            table = model.__table__
            key = [column.name for column in table.primary_key]
            names = [column.name for column in table.columns]
            mark = "?" if self.is_sqlite else "%s"
            rest = ", ".join(f"{name} = excluded.{name}" for name in names if name not in key)
            self.connection.exec_driver_sql(
                f"INSERT INTO {table.name} ({', '.join(names)}) "  # noqa: S608  # names of ours
                f"VALUES ({', '.join([mark] * len(names))}) "
                f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET {rest}",
                rows,
            )

    def add(self, model: type[Any], rows: list[dict[str, Any]]) -> None:
        """Insert rows that are new."""
        if rows:
            self.connection.execute(insert(model.__table__), rows)

    def change(self, model: type[Any], key: str, rows: list[dict[str, Any]]) -> None:
        """Update rows by their key, all with the same columns."""
        if rows:
            table = model.__table__
            columns: dict[str, Any] = {
                name: bindparam(f"to_{name}") for name in rows[0] if name != key
            }
            self.connection.execute(
                update(table).where(table.c[key] == bindparam("of_key")).values(columns),
                [
                    {"of_key": row[key]}
                    | {f"to_{name}": value for name, value in row.items() if name != key}
                    for row in rows
                ],
            )

    def present(self, column: Any, wanted: Iterable[bytes]) -> set[bytes]:
        """Which of these a column holds."""
        return {
            row[0]
            for some in in_groups(wanted)
            for row in self.connection.execute(select(column).where(column.in_(some)))
        }


def in_groups(items: Iterable[_T], size: int = _AT_ONCE) -> Iterator[list[_T]]:
    """Lists of up to so many."""
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some
