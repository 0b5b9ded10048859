"""The two databases: how each is opened, locked for writing, measured and shrunk.

SQLite runs in WAL mode with ``synchronous=NORMAL``: a commit has handed its pages to the operating
system, so it outlives the process however that ends, `kill -9` included (a test does it). It does
not force them to the disk, which happens at a checkpoint: a loss of power may cost the commits
since then, and never the file's integrity. FULL forces every commit to the disk and would keep
them too; measured on one disk, a request of 100 spans took 1.6 ms in place of 1.3; on a slow or
shared disk that is the time of a flush.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from contextlib import suppress
from pathlib import Path
from typing import Any  # Any: DBAPI connections

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

_BUSY_S = 10.0
_READERS = 16
_CACHE_KIB = 64 << 10
_WAL_BYTES = 64 << 20
# Of pg_advisory_xact_lock: any number that nothing else in the database uses.
_LOCK = 0x6461_7461_706C_616E
_CONNECT_S = 10
_STATEMENT_MS = 30_000


class Database:
    """One database with an engine for the writer and one for readers.

    Args:
        url: ``sqlite:///path`` or ``postgresql+psycopg://...``.

    Raises:
        ValueError: it is no such URL.
    """

    def __init__(self, url: str) -> None:
        self.url = _checked(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        if self.is_sqlite:
            _make_private(str(self.url.database))
            options: dict[str, Any] = {"connect_args": {"timeout": _BUSY_S}}
        else:
            options = {
                "connect_args": {
                    "connect_timeout": _CONNECT_S,
                    "options": f"-c statement_timeout={_STATEMENT_MS}",
                },
                "pool_pre_ping": True,
            }
        self.writer: Engine = create_engine(self.url, pool_size=1, max_overflow=0, **options)
        self.readers: Engine = create_engine(
            self.url,
            pool_size=_READERS // 2,
            max_overflow=_READERS // 2,
            pool_timeout=10,
            **options,
        )
        if self.is_sqlite:
            _as_sqlite(self.writer, "BEGIN IMMEDIATE", read_only=False)
            _as_sqlite(self.readers, "BEGIN", read_only=True)
        else:
            # What one answer is made of is read as of one moment.
            self.readers = self.readers.execution_options(isolation_level="REPEATABLE READ")

    def lock(self, connection: Connection) -> None:
        """In a transaction of the writer: keep other writers out until it ends."""
        if not self.is_sqlite:  # there BEGIN IMMEDIATE has done it
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})

    def live_bytes(self, connection: Connection, counted: int) -> int:
        """What is in use: pages of SQLite that are not free; in PostgreSQL what was counted.

        There a table does not shrink by what is deleted; what is free in it is used again.
        """
        if not self.is_sqlite:
            return counted
        pages = _pragma(connection, "page_count") - _pragma(connection, "freelist_count")
        return pages * _pragma(connection, "page_size")

    def disk_bytes(self, connection: Connection) -> int:
        """What the files or tables take."""
        if self.is_sqlite:
            path = Path(str(self.url.database))
            return sum(
                one.stat().st_size
                for one in (path, path.with_name(f"{path.name}-wal"))
                if one.exists()
            )
        found = connection.execute(
            text(
                "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0) FROM pg_class c "
                "JOIN pg_namespace n ON n.oid = c.relnamespace "
                "WHERE n.nspname = current_schema() AND c.relkind = 'r'"
            )
        )
        return int(found.scalar_one())

    def room_bytes(self) -> int | None:
        """What is left where the files of SQLite are; None for PostgreSQL."""
        if not self.is_sqlite:
            return None
        return shutil.disk_usage(Path(str(self.url.database)).absolute().parent).free

    def shrink(self, pages: int) -> bool:
        """Give up to so many free pages back to the file system; whether there may be more."""
        if not self.is_sqlite:
            return False
        raw = self.writer.raw_connection()
        try:
            cursor = raw.cursor()
            cursor.execute("PRAGMA freelist_count")
            free = int((cursor.fetchone() or (0,))[0])
            if free:
                # It gives up one page a step; only a script is stepped through to its end.
                cursor.executescript(f"PRAGMA incremental_vacuum({pages:d})")
            cursor.close()
        finally:
            raw.close()
        return free > pages

    def close(self) -> None:
        """Close every connection."""
        self.readers.dispose()
        if self.is_sqlite:
            # Somebody may read it, or it is no database at all; who opens it next does it.
            with suppress(sqlite3.Error, SQLAlchemyError):
                raw = self.writer.raw_connection()
                try:
                    raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
                finally:
                    raw.close()
        self.writer.dispose()


def _checked(given: str) -> URL:
    expected = "expected sqlite:///path or postgresql+psycopg://user@host/database"
    try:
        url = make_url(given)
    except ArgumentError as error:
        raise ValueError(f"the database's URL cannot be read: {expected}") from error
    if url.drivername in ("sqlite", "sqlite+pysqlite"):
        if url.database in (None, "", ":memory:") or str(url.database).startswith("file:"):
            raise ValueError(f"{url.render_as_string()}: a file is needed, {expected}")
        folder = Path(str(url.database)).parent
        if not folder.is_dir():
            raise ValueError(f"{url.render_as_string()}: there is no folder {folder}")
        return url
    if url.drivername in ("postgresql", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    raise ValueError(f"{url.drivername}: {expected}")


def _make_private(path: str) -> None:
    """Let nobody else read what a run told; a file that is there keeps its rights."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _as_sqlite(engine: Engine, begin: str, *, read_only: bool) -> None:
    @event.listens_for(engine, "connect")
    def connected(raw: Any, _record: object) -> None:
        # SQLAlchemy is to say when a transaction begins, not the driver.
        raw.isolation_level = None
        cursor = raw.cursor()
        if not read_only:
            # Before anything is in the file: afterwards it would take rewriting it as a whole.
            _when_free(cursor, "PRAGMA auto_vacuum=INCREMENTAL")
            _when_free(cursor, "PRAGMA journal_mode=WAL")
            cursor.execute(f"PRAGMA journal_size_limit={_WAL_BYTES}")
        cursor.execute("PRAGMA synchronous=NORMAL")
        cursor.execute(f"PRAGMA cache_size=-{_CACHE_KIB if not read_only else _CACHE_KIB // 8}")
        cursor.execute("PRAGMA temp_store=MEMORY")
        if read_only:
            cursor.execute("PRAGMA query_only=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def begun(connection: Connection) -> None:
        connection.exec_driver_sql(begin)


def _when_free(cursor: Any, statement: str) -> None:
    """Changing the journal's mode is refused at once while somebody else does it."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            cursor.execute(statement).fetchall()
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _pragma(connection: Connection, name: str) -> int:
    return int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
