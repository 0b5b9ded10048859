"""Repeated reports of an open wait."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the tables to this version."""
    op.add_column(
        "open_waits", sa.Column("again", sa.Boolean(), server_default=sa.false(), nullable=False)
    )
