"""Facts and text of samples."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the tables to this version."""
    key = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "sample_facts",
        sa.Column("id", key, autoincrement=False, nullable=False),
        *(sa.Column(name, sa.LargeBinary(), nullable=False) for name in ("digest", "sample")),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("run_id", "group_id", "state")),
        *(sa.Column(name, sa.Double(), nullable=True) for name in ("reward", "advantage")),
        *(sa.Column(name, sa.BigInteger(), nullable=True) for name in _NUMBERS),
        sa.Column("truncated", sa.Boolean(), nullable=True),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _TIMES),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sample_facts")),
    )
    for columns in (["digest"], ["group_id"], ["reward", "id"]):
        name = op.f(f"ix_sample_facts_{'_'.join(columns)}")
        op.create_index(name, "sample_facts", columns, unique=columns == ["digest"])
    op.create_table(
        "sample_texts",
        sa.Column("id", key, autoincrement=False, nullable=False),
        sa.Column("received_ns", sa.BigInteger(), nullable=False),
        sa.Column("blob", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sample_texts")),
    )
    op.create_index(op.f("ix_sample_texts_received_ns"), "sample_texts", ["received_ns"])


_TIMES = ("state_ns", "time_ns", "received_ns")
_NUMBERS = ("step", "length", "first_version", "last_version")
