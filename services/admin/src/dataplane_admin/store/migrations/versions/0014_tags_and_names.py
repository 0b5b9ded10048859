"""Tags of samples, empty for facts stored before; two columns named for what they hold."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the tables to this version."""
    op.add_column("sample_facts", sa.Column("tags", sa.Text(), server_default="", nullable=False))
    op.alter_column("open_waits", "again", new_column_name="is_periodic")
    op.alter_column("load_series", "grows", new_column_name="is_counter")
