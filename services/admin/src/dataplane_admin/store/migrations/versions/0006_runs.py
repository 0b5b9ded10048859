"""State, configuration and tags of runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the tables to this version."""
    for name, default in (("state", ""), ("error", ""), ("config", "{}"), ("tags", "[]")):
        op.add_column("runs", sa.Column(name, sa.Text(), server_default=default, nullable=False))
    for name in ("state_ns", "started_ns"):
        op.add_column("runs", sa.Column(name, sa.BigInteger(), server_default="0", nullable=False))
    op.add_column("runs", sa.Column("resumed_from", sa.BigInteger(), nullable=True))
