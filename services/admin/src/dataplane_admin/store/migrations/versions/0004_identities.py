"""Identities of spans and of the processes of series and waits; arrival order of traces.

Series are keyed by identities that old rows lack. They are dropped, and live processes report them
again. Spans of old rows have no identity: a span that is resent after the migration counts twice.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from dataplane_admin.store.batch import wait_digest
from observability.records import decode_logs

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the tables to this version."""
    op.create_table(
        "spans",
        sa.Column("trace", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("span", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("state", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("trace", "span", name=op.f("pk_spans")),
        sqlite_with_rowid=False,
    )
    op.add_column(
        "traces", sa.Column("arrival", sa.BigInteger(), server_default="0", nullable=False)
    )
    op.execute(
        "UPDATE traces SET arrival = coalesce((SELECT min(span_chunks.id) FROM span_chunks "
        "WHERE span_chunks.trace_id = traces.trace_id), 0)"
    )
    op.drop_index(op.f("ix_traces_start_ns_trace_id"), "traces")
    op.drop_index(op.f("ix_traces_run_id_start_ns_trace_id"), "traces")
    op.create_index(op.f("ix_traces_arrival"), "traces", ["arrival"])
    op.create_index(op.f("ix_traces_run_id_arrival"), "traces", ["run_id", "arrival"])
    op.add_column("open_waits", _digest("process_id"))
    _identify_waits()
    op.execute("DELETE FROM series")
    op.add_column("series", _digest("process_id"))
    op.add_column("series", sa.Column("scope", sa.Text(), server_default="", nullable=False))
    op.add_column("series", sa.Column("sums", sa.Text(), server_default="{}", nullable=False))
    op.add_column("series", _digest("points"))


def _identify_waits() -> None:
    """Store the new digest of each open wait, by which its end event finds it."""
    events = sa.table("events", *map(sa.column, ("id", "record", "wait")))
    waits = sa.table("open_waits", *map(sa.column, ("event_id", "process_id", "wait")))
    connection = op.get_bind()
    of_open_waits = sa.select(events).where(events.c.id.in_(sa.select(waits.c.event_id)))
    for row in connection.execute(of_open_waits).all():
        for event in decode_logs(row.record).events:
            name = event.attributes.get("dataplane.wait")
            values = {"process_id": bytes.fromhex(event.process.identity)}
            if isinstance(name, str) and name:
                values["wait"] = wait_digest(event.process, name)
                chosen = events.update().where(events.c.id == row.id)
                connection.execute(chosen.values(wait=values["wait"]))
            connection.execute(waits.update().where(waits.c.event_id == row.id).values(values))


def _digest(name: str) -> sa.Column[bytes]:
    return sa.Column(name, sa.LargeBinary(), server_default="", nullable=False)
