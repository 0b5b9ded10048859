"""Storage of the control plane's records: in memory only, or in a SQLite file.

A call of the control plane returns only after its changes are stored, so its result survives a
SIGKILL of the server. One thread writes; changes that arrive while it commits go into the next
transaction together.
"""

from __future__ import annotations

import contextlib
import queue
import sqlite3
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from refit_mx.control.ledger import Changes, Record
from refit_mx.control.records import Lease, Shard, Version, Worker
from refit_mx.errors import RefitConfigError

APPLICATION_ID = 0x52464D58
SCHEMA_VERSION = 2
# A server that is being replaced may still hold the file open.
_BUSY_S = 2.0
_CLOSE_S = 10.0
KINDS: Mapping[str, type[Record]] = {
    "version": Version,
    "worker": Worker,
    "shard": Shard,
    "lease": Lease,
}
_Row = tuple[str, str, bytes | None]
# Identifiers are printable, so none contains it.
_SEPARATOR = "\x1f"
_decoders = {kind: msgspec.msgpack.Decoder(record) for kind, record in KINDS.items()}


class Store(Protocol):
    """Storage of records."""

    def load(self) -> list[Record]:
        """Return all stored records; called once, before the first `write`."""

    def write(self, changes: Changes) -> Future[None] | None:
        """Store changes; the order of calls is the order of changes.

        Returns:
            A future that is done once they are stored, or has an exception if they cannot be. None:
            they are stored already.
        """

    def close(self) -> None:
        """Finish pending writes. May be called again."""


class MemoryStore:
    """A store that keeps nothing: the state exists only in the process."""

    def load(self) -> list[Record]:
        """Return no records."""
        return []

    def write(self, changes: Changes) -> None:
        """Ignore the changes."""

    def close(self) -> None:
        """Do nothing."""


_DAMAGE = (sqlite3.Error, UnicodeDecodeError)
"""Errors of reading a damaged file; its schema may contain text that is not UTF-8."""


class SqliteStore:
    """Storage of records in a SQLite file, created if missing; one server at a time may use it.

    Raises:
        RefitConfigError: the file is in use, damaged, of another application or of another schema
            version, or it cannot be opened.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._queue: queue.SimpleQueue[tuple[list[_Row], Future[None]] | None] = queue.SimpleQueue()
        self._closed = False
        try:
            self._connection = sqlite3.connect(
                self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
            )
        except sqlite3.Error as error:
            raise RefitConfigError(f"state {str(path)!r}: {error}") from None
        try:
            self._open()
        except _DAMAGE as error:
            self._connection.close()
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise RefitConfigError(f"state {str(path)!r} is in use by another server") from None
            raise RefitConfigError(f"state {str(path)!r}: {error}") from None
        except RefitConfigError:
            self._connection.close()
            raise
        self._thread = threading.Thread(target=self._write, name="refit-store", daemon=True)
        self._thread.start()

    def load(self) -> list[Record]:
        """Return all records in the file.

        Raises:
            RefitConfigError: the file is damaged, or a record cannot be read.
        """
        try:
            (verdict,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
            rows = self._connection.execute(
                "SELECT kind, key, body, digest FROM records"
            ).fetchall()
        except _DAMAGE as error:
            raise self._damaged(str(error)) from None
        if verdict != "ok":
            raise self._damaged(str(verdict).replace("\n", " "))
        records: list[Record] = []
        for kind, key, body, digest in rows:
            # SQLite has no checksums, and a modified record may still decode. It checks no types.
            typed = isinstance(kind, str) and isinstance(key, str) and isinstance(body, bytes)
            if not typed or digest != _digest(kind, key, body):
                raise self._damaged(f"a record of kind {kind!r} differs from what was written")
            try:
                records.append(_decoders[kind].decode(body))
            except (KeyError, msgspec.DecodeError, msgspec.ValidationError) as error:
                raise RefitConfigError(
                    f"state {str(self._path)!r}: a record of kind {kind!r}: {error}"
                ) from None
        return records

    def _damaged(self, why: str) -> RefitConfigError:
        return RefitConfigError(
            f"state {str(self._path)!r} is damaged: {why}; restore the file from a copy, or move "
            "it away to start without it"
        )

    def write(self, changes: Changes) -> Future[None]:
        """Queue the changes for the writing thread."""
        stored: Future[None] = Future()
        rows = [
            (kind, _SEPARATOR.join(key), None if record is None else msgspec.msgpack.encode(record))
            for (kind, key), record in changes.items()
        ]
        self._queue.put((rows, stored))
        return stored

    def close(self) -> None:
        """Write all queued changes, and close the file."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(_CLOSE_S)
            if not self._thread.is_alive():  # otherwise the disk hangs, and closing would too
                self._connection.close()

    def _open(self) -> None:
        run = self._connection.execute
        run("PRAGMA locking_mode=EXCLUSIVE")
        run("BEGIN EXCLUSIVE")
        application = run("PRAGMA application_id").fetchone()[0]
        schema = run("PRAGMA user_version").fetchone()[0]
        empty = run("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
        if empty and not application:
            run(f"PRAGMA application_id={APPLICATION_ID}")
            run(f"PRAGMA user_version={SCHEMA_VERSION}")
            run(
                "CREATE TABLE records (kind TEXT NOT NULL, key TEXT NOT NULL, body BLOB NOT NULL, "
                "digest BLOB NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID"
            )
        elif application != APPLICATION_ID:
            raise RefitConfigError(f"state {str(self._path)!r} is not the state of a refit server")
        elif schema != SCHEMA_VERSION:
            raise RefitConfigError(
                f"state {str(self._path)!r} has schema version {schema}; this server reads "
                f"{SCHEMA_VERSION}"
            )
        run("COMMIT")
        run("PRAGMA journal_mode=WAL")
        # A lease that was granted must survive a power failure.
        run("PRAGMA synchronous=FULL")

    def _write(self) -> None:
        closing = False
        while not closing:
            batches = []
            batch = self._queue.get()
            while batch is not None:
                batches.append(batch)
                try:
                    batch = self._queue.get_nowait()
                except queue.Empty:
                    break
            else:
                closing = True
            error = self._commit([row for rows, _ in batches for row in rows])
            for _, stored in batches:
                if error is None:
                    stored.set_result(None)
                else:
                    stored.set_exception(error)

    def _commit(self, rows: list[_Row]) -> Exception | None:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            for kind, key, body in rows:
                if body is None:
                    self._connection.execute(
                        "DELETE FROM records WHERE kind = ? AND key = ?", (kind, key)
                    )
                else:
                    self._connection.execute(
                        "INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?)",
                        (kind, key, body, _digest(kind, key, body)),
                    )
            self._connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - callers wait for it
            with contextlib.suppress(sqlite3.Error):  # the first error has the cause
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
            return error
        return None


def _digest(kind: str, key: str, body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(_SEPARATOR.join((kind, key)).encode() + b"\0" + body)
