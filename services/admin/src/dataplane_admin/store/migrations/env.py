"""Alembic environment: runs the migrations on the connection of `migrate`."""

from __future__ import annotations

from alembic import context

from dataplane_admin.store.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    transactional_ddl=True,
    compare_type=True,
)
# The caller has the transaction and its lock.
context.run_migrations()
