"""Load of engines and nodes over time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the tables to this version."""
    key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "load_series",
        sa.Column("id", key, autoincrement=False, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("kind", "subject", "metric")),
        sa.Column("grows", sa.Boolean(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("device", "run_id")),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _TIMES),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_load_series")),
    )
    op.create_index(op.f("ix_load_series_digest"), "load_series", ["digest"], unique=True)
    op.create_table(
        "load_points",
        *(
            sa.Column(name, sa.BigInteger(), autoincrement=False, nullable=False)
            for name in ("series", "second")
        ),
        *(sa.Column(name, sa.Double(), nullable=False) for name in ("value", "total")),
        sa.PrimaryKeyConstraint("series", "second", name=op.f("pk_load_points")),
        sqlite_with_rowid=False,
    )


_TIMES = ("first_s", "last_s", "updated_ns")
