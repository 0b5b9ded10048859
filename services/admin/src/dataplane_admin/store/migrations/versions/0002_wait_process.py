"""Process of an open wait."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the tables to this version."""
    op.add_column("open_waits", sa.Column("process", sa.Text(), server_default="", nullable=False))
