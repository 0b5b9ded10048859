"""Log records of traces."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the tables to this version."""
    op.create_table(
        "trace_logs",
        sa.Column(
            "id",
            sa.BigInteger().with_variant(sa.Integer(), "sqlite"),
            autoincrement=False,
            nullable=False,
        ),
        *(
            sa.Column(name, sa.LargeBinary(), nullable=False)
            for name in ("trace_id", "digest", "record")
        ),
        sa.Column("received_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trace_logs")),
    )
    op.create_index(
        op.f("ix_trace_logs_trace_id_digest"), "trace_logs", ["trace_id", "digest"], unique=True
    )
