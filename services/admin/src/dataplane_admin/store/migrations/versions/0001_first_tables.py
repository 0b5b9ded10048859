"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_KEY = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Upgrade the tables to this version."""
    op.create_table(
        "audit",
        sa.Column("id", _KEY, autoincrement=False, nullable=False),
        sa.Column("time_ns", sa.BigInteger(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("parameters", sa.Text(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    op.create_table(
        "event_samples",
        sa.Column("sample_key", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("event_id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.PrimaryKeyConstraint("sample_key", "event_id", name=op.f("pk_event_samples")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "events",
        sa.Column("id", _KEY, autoincrement=False, nullable=False),
        sa.Column("place_id", sa.BigInteger(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("time_ns", sa.BigInteger(), nullable=False),
        sa.Column("received_ns", sa.BigInteger(), nullable=False),
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("weight_version", sa.BigInteger(), nullable=True),
        sa.Column("trace_id", sa.LargeBinary(), nullable=True),
        sa.Column("span_id", sa.LargeBinary(), nullable=True),
        sa.Column("wait", sa.LargeBinary(), nullable=True),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("record", sa.LargeBinary(), nullable=False),
        sa.Column("keys", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    op.create_index(op.f("ix_events_digest"), "events", ["digest"], unique=True)
    op.create_index(
        op.f("ix_events_place_id_name_step"), "events", ["place_id", "name", "step"], unique=False
    )
    op.create_index(
        op.f("ix_events_place_id_time_ns"), "events", ["place_id", "time_ns"], unique=False
    )
    op.create_index(op.f("ix_events_trace_id"), "events", ["trace_id"], unique=False)
    op.create_index(op.f("ix_events_wait"), "events", ["wait"], unique=False)
    op.create_table(
        "open_waits",
        sa.Column("event_id", _KEY, autoincrement=False, nullable=False),
        sa.Column("wait", sa.LargeBinary(), nullable=False),
        sa.Column("place_id", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("event_id", name=op.f("pk_open_waits")),
    )
    op.create_index(op.f("ix_open_waits_wait"), "open_waits", ["wait"], unique=False)
    op.create_table(
        "places",
        sa.Column("id", _KEY, autoincrement=False, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("partition", sa.Text(), nullable=False),
        sa.Column("cleared_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_places")),
    )
    op.create_index(
        op.f("ix_places_run_id_partition"), "places", ["run_id", "partition"], unique=True
    )
    op.create_table(
        "runs",
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("first_ns", sa.BigInteger(), nullable=False),
        sa.Column("last_ns", sa.BigInteger(), nullable=False),
        sa.Column("updated_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_runs")),
    )
    op.create_table(
        "samples",
        sa.Column("key", _KEY, autoincrement=False, nullable=False),
        sa.Column("place_id", sa.BigInteger(), nullable=False),
        sa.Column("head", sa.LargeBinary(), nullable=False),
        sa.Column("tail", sa.LargeBinary(), nullable=False),
        sa.Column("weight_version", sa.BigInteger(), nullable=True),
        sa.Column("put_ns", sa.BigInteger(), nullable=False),
        sa.Column("live_ns", sa.BigInteger(), nullable=False),
        sa.Column("gone_ns", sa.BigInteger(), nullable=False),
        sa.Column("first_ns", sa.BigInteger(), nullable=False),
        sa.Column("last_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_samples")),
    )
    op.create_index(op.f("ix_samples_head_key"), "samples", ["head", "key"], unique=False)
    op.create_index(
        op.f("ix_samples_place_id_live_ns"), "samples", ["place_id", "live_ns"], unique=False
    )
    op.create_table(
        "series",
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("process", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("unit", sa.Text(), nullable=False),
        sa.Column("attributes", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("histogram", sa.Text(), nullable=True),
        sa.Column("time_ns", sa.BigInteger(), nullable=False),
        sa.Column("updated_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_series")),
    )
    op.create_index(op.f("ix_series_name"), "series", ["name"], unique=False)
    op.create_index(op.f("ix_series_updated_ns"), "series", ["updated_ns"], unique=False)
    op.create_table(
        "span_chunks",
        sa.Column("id", _KEY, autoincrement=False, nullable=False),
        sa.Column("trace_id", sa.LargeBinary(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("spans", sa.BigInteger(), nullable=False),
        sa.Column("received_ns", sa.BigInteger(), nullable=False),
        sa.Column("blob", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_span_chunks")),
    )
    op.create_index(
        op.f("ix_span_chunks_trace_id_digest"), "span_chunks", ["trace_id", "digest"], unique=True
    )
    op.create_table(
        "state",
        sa.Column("id", _KEY, autoincrement=False, nullable=False),
        sa.Column("revision", sa.BigInteger(), nullable=False),
        sa.Column("last_id", sa.BigInteger(), nullable=False),
        sa.Column("traces", sa.BigInteger(), nullable=False),
        sa.Column("spans", sa.BigInteger(), nullable=False),
        sa.Column("events", sa.BigInteger(), nullable=False),
        sa.Column("samples", sa.BigInteger(), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_state")),
    )
    op.create_table(
        "trace_links",
        sa.Column("trace_id", sa.LargeBinary(), nullable=False),
        sa.Column("linked_id", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("trace_id", "linked_id", name=op.f("pk_trace_links")),
        sqlite_with_rowid=False,
    )
    op.create_index(
        op.f("ix_trace_links_linked_id_trace_id"),
        "trace_links",
        ["linked_id", "trace_id"],
        unique=False,
    )
    op.create_table(
        "traces",
        sa.Column("trace_id", sa.LargeBinary(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("start_ns", sa.BigInteger(), nullable=False),
        sa.Column("end_ns", sa.BigInteger(), nullable=False),
        sa.Column("has_root", sa.Boolean(), nullable=False),
        sa.Column("spans", sa.BigInteger(), nullable=False),
        sa.Column("errors", sa.BigInteger(), nullable=False),
        sa.Column("processes", sa.BigInteger(), nullable=False),
        sa.Column("process_digests", sa.LargeBinary(), nullable=False),
        sa.Column("rejected", sa.BigInteger(), nullable=False),
        sa.Column("nbytes", sa.BigInteger(), nullable=False),
        sa.Column("updated_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("trace_id", name=op.f("pk_traces")),
    )
    op.create_index(
        op.f("ix_traces_run_id_start_ns_trace_id"),
        "traces",
        ["run_id", "start_ns", "trace_id"],
        unique=False,
    )
    op.create_index(op.f("ix_traces_run_id_step"), "traces", ["run_id", "step"], unique=False)
    op.create_index(
        op.f("ix_traces_start_ns_trace_id"), "traces", ["start_ns", "trace_id"], unique=False
    )
    op.create_index(op.f("ix_traces_updated_ns"), "traces", ["updated_ns"], unique=False)
    op.execute(
        "INSERT INTO state (id, revision, last_id, traces, spans, events, samples, nbytes) "
        "VALUES (1, 0, 0, 0, 0, 0, 0, 0)"
    )
