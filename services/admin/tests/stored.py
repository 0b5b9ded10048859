"""All bytes of a SQLite store, to search for what must not be in it.

Imports internals: stored text is compressed.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from dataplane_admin.store.compressed import expand


def stored_bytes(folder: Path) -> bytes:
    """Return the bytes of the files and of the spans, events and logs compressed in them."""
    files = [file.read_bytes() for file in folder.glob("admin.sqlite*")]
    with closing(sqlite3.connect(folder / "admin.sqlite")) as database:
        rows = database.execute(
            "SELECT blob FROM span_chunks UNION ALL SELECT record FROM events"
            " UNION ALL SELECT record FROM trace_logs"
        )
        return b"".join([*files, *(expand(row[0]) for row in rows)])
