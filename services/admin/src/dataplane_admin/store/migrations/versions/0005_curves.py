"""Curves: metrics of a run over its steps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the tables to this version."""
    key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "curves",
        sa.Column("id", key, autoincrement=False, nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in _TEXTS),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _NUMBERS),
        sa.Column("last_value", sa.Double(), nullable=True),
        sa.Column("updated_ns", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_curves")),
    )
    op.create_index(op.f("ix_curves_digest"), "curves", ["digest"], unique=True)
    op.create_index(op.f("ix_curves_run_id"), "curves", ["run_id"])
    op.create_index(op.f("ix_curves_updated_ns"), "curves", ["updated_ns"])
    op.create_table(
        "curve_points",
        sa.Column("curve", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("curve", "step", name=op.f("pk_curve_points")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "curve_blocks",
        sa.Column("curve", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("block", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("points", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=True) for name in ("mean", "low", "high")),
        sa.PrimaryKeyConstraint("curve", "block", name=op.f("pk_curve_blocks")),
        sqlite_with_rowid=False,
    )


_TEXTS = ("run_id", "name", "unit", "attributes")
_NUMBERS = ("points", "first_step", "last_step")
