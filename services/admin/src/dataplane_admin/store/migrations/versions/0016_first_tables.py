"""The tables of the first release. New databases get the newest tables at once, see `migrate`."""

from __future__ import annotations

revision = "0016"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change nothing: no database has an older version."""
