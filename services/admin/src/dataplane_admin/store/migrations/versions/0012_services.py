"""Services of traces. Those of traces stored before stay unknown."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Upgrade the tables to this version."""
    op.add_column(
        "traces", sa.Column("service_names", sa.Text(), server_default="", nullable=False)
    )
