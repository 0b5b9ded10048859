"""What alembic runs: the migrations on the connection that `migrate` hands over."""

from __future__ import annotations

from alembic import context

from dataplane_admin.store.models import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=True,
    compare_type=True,
)
# The transaction and its lock are the caller's.
context.run_migrations()
