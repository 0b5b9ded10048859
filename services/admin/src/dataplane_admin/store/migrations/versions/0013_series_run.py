"""Runs of metric series. Those of series stored before are empty until their next point."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the tables to this version."""
    op.add_column("series", sa.Column("run_id", sa.Text(), server_default="", nullable=False))
