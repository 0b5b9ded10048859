"""Where the control plane's records are kept: in memory alone, or in a SQLite file.

A call is answered only after its changes are in the store, so what a client was told survives a
SIGKILL of the server. One thread writes; changes that arrive while it commits go into the next
transaction together.
"""

from __future__ import annotations

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
# A server that is being replaced may still be closing the file.
_BUSY_S = 2.0
_CLOSE_S = 10.0
KINDS: Mapping[str, type[Record]] = {
    "version": Version,
    "worker": Worker,
    "shard": Shard,
    "lease": Lease,
}
_Row = tuple[str, str, bytes | None]
# No identifier has it: they are printable.
_SEPARATOR = "\x1f"
_decoders = {kind: msgspec.msgpack.Decoder(record) for kind, record in KINDS.items()}


class Store(Protocol):
    """Keeps records."""

    def load(self) -> list[Record]:
        """All records that were kept; called once, before anything is kept."""

    def keep(self, changes: Changes) -> Future[None] | None:
        """Take changes in; the order of calls is the order of changes.

        Returns:
            Done when they are safe, with an exception if they cannot be kept. None: they are.
        """

    def close(self) -> None:
        """Finish what was taken in. May be called again."""


class MemoryStore:
    """Keeps nothing: the state is in the process alone."""

    def load(self) -> list[Record]:
        """Nothing."""
        return []

    def keep(self, changes: Changes) -> None:
        """Forget the changes."""

    def close(self) -> None:
        """Nothing to do."""


class SqliteStore:
    """Keeps records in a SQLite file, which one server at a time may use.

    Args:
        path: of the file; made if it is not there.

    Raises:
        RefitConfigError: the file is in use, damaged, no such file, or of another schema version.
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
        except sqlite3.Error as error:
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
        """All records of the file.

        Raises:
            RefitConfigError: the file is damaged, or a record cannot be read.
        """
        try:
            (found,) = self._connection.execute("PRAGMA quick_check(1)").fetchone()
            rows = self._connection.execute(
                "SELECT kind, key, body, digest FROM records"
            ).fetchall()
        except sqlite3.Error as error:
            raise self._damaged(str(error)) from None
        if found != "ok":
            raise self._damaged(str(found).replace("\n", " "))
        records: list[Record] = []
        for kind, key, body, digest in rows:
            # SQLite has no checksums, and a record that was changed may still be one.
            if digest != _digest(kind, key, body):
                raise self._damaged(f"a record of kind {kind!r} is not as it was written")
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

    def keep(self, changes: Changes) -> Future[None]:
        """Hand the changes to the writing thread."""
        kept: Future[None] = Future()
        rows = [
            (kind, _SEPARATOR.join(key), None if record is None else msgspec.msgpack.encode(record))
            for (kind, key), record in changes.items()
        ]
        self._queue.put((rows, kept))
        return kept

    def close(self) -> None:
        """Write what was taken in, and let the file go."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join(_CLOSE_S)
            if not self._thread.is_alive():  # else the disk hangs, and closing would too
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
        # A lease that was granted must not be forgotten when the machine loses power.
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
            for _, kept in batches:
                if error is None:
                    kept.set_result(None)
                else:
                    kept.set_exception(error)

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
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            return error
        return None


def _digest(kind: str, key: str, body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(_SEPARATOR.join((kind, key)).encode() + b"\0" + body)
