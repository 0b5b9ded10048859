"""Compressed spans and events, and blocks of the samples that events name.

The counted bytes of stored spans stay as they are until their traces are deleted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any  # Any: rows

import sqlalchemy as sa
from alembic import op

from dataplane_admin.store.compressed import compress
from dataplane_admin.store.packed import pack_blocks, pack_keys

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_PAGE = 500
_OLD_SAMPLE_BYTES, _SAMPLE_BYTES = 30, 110


def upgrade() -> None:
    """Upgrade the tables to this version."""
    op.drop_table("event_samples")
    op.create_table(
        "event_samples",
        *(
            sa.Column(name, sa.BigInteger(), autoincrement=False, nullable=False)
            for name in ("block", "event_id")
        ),
        sa.Column("members", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("block", "event_id", name=op.f("pk_event_samples")),
        sqlite_with_rowid=False,
    )
    connection = op.get_bind()
    for rows in _pages(connection, "span_chunks", "id, blob"):
        connection.execute(
            sa.text("UPDATE span_chunks SET blob = :blob WHERE id = :id"),
            [{"id": row.id, "blob": compress(bytes(row.blob))} for row in rows],
        )
    samples = connection.scalar(sa.text("SELECT count(*) FROM samples")) or 0
    added = samples * _SAMPLE_BYTES
    for rows in _pages(connection, "events", "id, record, keys"):
        changed = []
        blocks = []
        for row in rows:
            keys = struct.unpack(f"<{len(row.keys) // 8}q", row.keys)
            packed = {"record": compress(bytes(row.record)), "keys": pack_keys(keys)}
            added += len(packed["record"]) + len(packed["keys"])
            added -= len(row.record) + _OLD_SAMPLE_BYTES * len(keys)
            changed.append({"id": row.id, **packed})
            blocks += [
                {"block": block, "event_id": row.id, "members": members}
                for block, members in pack_blocks(keys).items()
            ]
        connection.execute(
            sa.text("UPDATE events SET record = :record, keys = :keys WHERE id = :id"), changed
        )
        if blocks:
            connection.execute(
                sa.text("INSERT INTO event_samples VALUES (:block, :event_id, :members)"), blocks
            )
    connection.execute(sa.text("UPDATE state SET nbytes = nbytes + :added"), {"added": added})


def _pages(connection: sa.Connection, table: str, columns: str) -> Iterator[list[Any]]:
    """Yield the rows of a table in pages, by id."""
    query = f"SELECT {columns} FROM {table} WHERE id > :last ORDER BY id LIMIT {_PAGE}"  # noqa: S608  # names of this module
    last = -1
    while rows := list(connection.execute(sa.text(query), {"last": last})):
        yield rows
        last = rows[-1].id
