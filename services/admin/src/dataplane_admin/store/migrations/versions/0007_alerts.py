"""Alerts, their notifications, and the lease of the service that evaluates the rules."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the tables to this version."""
    key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "alerts",
        sa.Column("id", key, autoincrement=False, nullable=False),
        *(
            sa.Column(name, sa.Text(), nullable=False)
            for name in ("name", "kind", "severity", "run_id", "subject")
        ),
        sa.Column("value", sa.Double(), nullable=False),
        sa.Column("bound", sa.Double(), nullable=False),
        sa.Column("sentence", sa.Text(), nullable=False),
        sa.Column("raised_ns", sa.BigInteger(), nullable=False),
        sa.Column("cleared_ns", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alerts")),
    )
    op.create_index(op.f("ix_alerts_cleared_ns"), "alerts", ["cleared_ns"])
    op.create_table(
        "notifications",
        sa.Column("id", key, autoincrement=False, nullable=False),
        *(
            sa.Column(name, sa.Text(), nullable=False)
            for name in ("webhook", "message", "body", "error")
        ),
        *(
            sa.Column(name, sa.BigInteger(), nullable=False)
            for name in ("attempts", "created_ns", "next_ns")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notifications")),
    )
    op.create_index(op.f("ix_notifications_webhook_id"), "notifications", ["webhook", "id"])
    op.create_table(
        "alert_holder",
        sa.Column("id", key, autoincrement=False, nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("until_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alert_holder")),
    )
