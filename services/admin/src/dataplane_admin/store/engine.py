"""Databases: open, lock for writing, measure and shrink SQLite and PostgreSQL.

SQLite runs in WAL mode with ``synchronous=NORMAL``: a commit hands its pages to the operating
system, so it survives any end of the process, `kill -9` included. Pages are forced to the disk at
checkpoints only: a power loss may cost the commits since the last checkpoint, but never the file's
integrity. With FULL, every commit would wait for the disk.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import time
from contextlib import closing, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any  # Any: DBAPI connections

import structlog
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from dataplane_admin.store.errors import StoreError

_BUSY_S = 10.0
_READERS = 16
_CACHE_KIB = 64 << 10
_WAL_BYTES = 64 << 20
# Key of pg_advisory_xact_lock: any number unused in the database.
_LOCK = 0x6461_7461_706C_616E
_CONNECT_S = 10
_STATEMENT_MS = 30_000
# Field of a file's header: https://sqlite.org/fileformat2.html#application_id
_APPLICATION_ID = 0x6470_6164  # "dpad"
_APPLICATION_AT = 68
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_SHORT_READ = sqlite3.SQLITE_IOERR_SHORT_READ

logger = structlog.get_logger("dataplane_admin")


class Database:
    """One database with an engine for the writer and one for readers.

    Args:
        url: ``sqlite:///path`` or ``postgresql+psycopg://...``.

    Raises:
        ValueError: the URL is invalid.
    """

    def __init__(self, url: str) -> None:
        self.url = checked_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._damage: str | None = None
        self._is_own = False
        if self.is_sqlite:
            self._path = Path(str(self.url.database)).absolute()
            _make_private(self._path)
            self._identity = _identity(self._path)
            options: dict[str, Any] = {"connect_args": {"timeout": _BUSY_S}}
        else:
            options = {
                "connect_args": {
                    "connect_timeout": _CONNECT_S,
                    "options": f"-c statement_timeout={_STATEMENT_MS}",
                },
                "pool_pre_ping": True,
            }
        # One thread at a time uses the connection, so there is no need to wait for it.
        self.writer: Engine = create_engine(
            self.url, pool_size=1, max_overflow=0, pool_timeout=0, **options
        )
        self.readers: Engine = create_engine(
            self.url,
            pool_size=_READERS // 2,
            max_overflow=_READERS // 2,
            pool_timeout=10,
            **options,
        )
        if self.is_sqlite:
            _configure_sqlite(self.writer, "BEGIN IMMEDIATE", read_only=False)
            _configure_sqlite(self.readers, "BEGIN", read_only=True)
        else:
            from dataplane_admin.store.answer_deadline import connect  # needs psycopg

            for engine in (self.writer, self.readers):
                event.listen(engine, "do_connect", connect)
            # All reads of one answer see one snapshot.
            self.readers = self.readers.execution_options(isolation_level="REPEATABLE READ")

    def check_owner(self) -> None:
        """Refuse another program's SQLite file, without changing it.

        Raises:
            StoreError: the file belongs to another program.
            sqlite3.Error: the file cannot be read.
        """
        if not self.is_sqlite:
            return
        with self._path.open("rb") as file:
            header = file.read(100)
        application = int.from_bytes(header[_APPLICATION_AT : _APPLICATION_AT + 4], "big")
        tables: list[str] = []
        is_database = header.startswith(b"SQLite format 3\0")
        if is_database and application == 0:
            # The file is empty, another program's, or stamped in the write-ahead log only.
            with closing(sqlite3.connect(f"{self._path.as_uri()}?mode=ro", uri=True)) as connection:
                [application] = connection.execute("PRAGMA application_id").fetchone()
                rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
                tables = [str(name) for (name,) in rows]
        if is_database and application != _APPLICATION_ID and (application or tables):
            what = f"tables {', '.join(sorted(tables)[:3])}" if tables else f"id {application:#x}"
            raise StoreError(
                f"{self.url.render_as_string()}: another program's database, with {what}; expected "
                "a database of this service or a new file"
            )
        self._is_own = True

    def stamp(self, connection: Connection) -> None:
        """Mark a SQLite file as one of this service, in a transaction of the writer."""
        if self.is_sqlite and _pragma(connection, "application_id") != _APPLICATION_ID:
            connection.exec_driver_sql(f"PRAGMA application_id={_APPLICATION_ID}")

    def note_damage(self, error: BaseException | None) -> None:
        """Record an error of the driver if it means that the database is damaged."""
        code = getattr(error, "sqlite_errorcode", None) or 0
        if self._damage is None and (code & 0xFF in _DAMAGED or code == _SHORT_READ):
            self._damage = (
                f"{self.url.render_as_string()} is damaged: {error}; restore a backup, or move it "
                "away and restart"
            )
            logger.error("database_damaged", reason=str(error))

    def trouble(self) -> str | None:
        """Return why writes would be lost; None if no reason is known."""
        if self._damage is None and self.is_sqlite and _identity(self._path) != self._identity:
            return (
                f"{self.url.database} was removed or replaced while in use, or is not accessible; "
                "restart the service"
            )
        return self._damage

    def lock(self, connection: Connection) -> None:
        """Block other writers until the end of the writer's transaction."""
        if not self.is_sqlite:  # SQLite's BEGIN IMMEDIATE has locked
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})

    def live_bytes(self, connection: Connection, counted: int) -> int:
        """Return the bytes in use: SQLite's pages that are not free, or ``counted`` for PostgreSQL.

        PostgreSQL's tables do not shrink by deletions; their free space is reused.
        """
        if not self.is_sqlite:
            return counted
        pages = _pragma(connection, "page_count") - _pragma(connection, "freelist_count")
        return pages * _pragma(connection, "page_size")

    def disk_bytes(self, connection: Connection) -> int:
        """Return the bytes of the files or tables."""
        if self.is_sqlite:
            return self.file_bytes() + self.log_bytes()
        size = connection.execute(
            text(
                "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0) FROM pg_class c "
                "JOIN pg_namespace n ON n.oid = c.relnamespace "
                "WHERE n.nspname = current_schema() AND c.relkind = 'r'"
            )
        )
        return int(size.scalar_one())

    def file_bytes(self) -> int:
        """Return the bytes of SQLite's file without its log; 0 for PostgreSQL."""
        return self._size_of("")

    def log_bytes(self) -> int:
        """Return the bytes of SQLite's write-ahead log; 0 for PostgreSQL."""
        return self._size_of("-wal")

    def _size_of(self, suffix: str) -> int:
        if not self.is_sqlite:
            return 0
        try:
            return self._path.with_name(f"{self._path.name}{suffix}").stat().st_size
        except OSError:  # no log, or `trouble` reports that the file is not accessible
            return 0

    def empty_log(self) -> bool:
        """Write SQLite's log to its file and truncate it; return False while readers use it."""
        with closing(self.writer.raw_connection()) as raw:
            cursor = raw.cursor()
            cursor.execute("PRAGMA busy_timeout=0")
            try:
                row = cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                cursor.execute(f"PRAGMA busy_timeout={int(_BUSY_S * 1000)}")
            return row is not None and row[0] == 0

    def free_bytes(self) -> int | None:
        """Return the free bytes on the disk of SQLite's files; None for PostgreSQL.

        Raises OSError if the folder is not accessible.
        """
        if not self.is_sqlite:
            return None
        return shutil.disk_usage(self._path.parent).free

    def shrink(self, pages: int) -> bool:
        """Release up to ``pages`` free pages to the file system; return whether more are free."""
        if not self.is_sqlite:
            return False
        with closing(self.writer.raw_connection()) as raw:
            cursor = raw.cursor()
            [free] = cursor.execute("PRAGMA freelist_count").fetchone()
            if free:
                # The pragma frees one page per step, and only a script runs all steps.
                cursor.executescript(f"PRAGMA incremental_vacuum({pages:d})")
            cursor.close()
        return bool(free > pages)

    def close(self) -> None:
        """Close every connection."""
        self.readers.dispose()
        if self.is_sqlite and self._is_own:
            # This fails if there are readers, a transaction of the writer has not ended, or the
            # file is invalid. Then the log remains, and SQLite reads it at the next open.
            with suppress(sqlite3.Error, SQLAlchemyError):
                self.empty_log()
        self.writer.dispose()


def checked_url(given: str) -> URL:
    """Return the URL of a database of this service.

    Raises ValueError if it is invalid, its folder does not exist, or its driver is not installed.
    """
    expected = "expected sqlite:///path or postgresql+psycopg://user@host/database"
    try:
        url = make_url(given)
    except ArgumentError as error:
        raise ValueError(f"the database's URL is invalid: {expected}") from error
    if url.drivername in ("sqlite", "sqlite+pysqlite"):
        if url.database in (None, "", ":memory:") or str(url.database).startswith("file:"):
            raise ValueError(f"{url.render_as_string()}: found no file; {expected}")
        folder = Path(str(url.database)).parent
        if not folder.is_dir():
            raise ValueError(f"{url.render_as_string()}: folder {folder} does not exist")
        if Path(str(url.database)).is_dir():
            raise ValueError(f"{url.render_as_string()}: found a folder; expected a file")
        return url
    if url.drivername in ("postgresql", "postgresql+psycopg"):
        if find_spec("psycopg") is None:
            raise ValueError(
                "PostgreSQL needs psycopg, which is missing; install dataplane-admin[postgres]"
            )
        return url.set(drivername="postgresql+psycopg")
    raise ValueError(f"{url.drivername}: {expected}")


def _identity(path: Path) -> tuple[int, int] | None:
    """Return what identifies a file beyond its name; None if it is not accessible."""
    try:
        status = path.stat()
    except OSError:  # for example no file, a stale file handle of NFS, or no permission
        return None
    return status.st_dev, status.st_ino


def _make_private(path: Path) -> None:
    """Create the file readable for its owner only; an existing file keeps its mode."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))


def _configure_sqlite(engine: Engine, begin: str, *, read_only: bool) -> None:
    @event.listens_for(engine, "connect")
    def connected(raw: Any, _record: object) -> None:
        # SQLAlchemy begins transactions, not the driver.
        raw.isolation_level = None
        cursor = raw.cursor()
        if not read_only:
            # Only possible while the file is empty; later, the file would have to be rewritten.
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
    """Run a statement; retry while another process changes the journal mode."""
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
