"""Migrations of a database to the newest version of the tables.

A new database gets the newest tables at once; migrations change the tables of an older version.
Both run in one transaction under the writers' lock, so that two services can open a database at the
same time.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, insert

from dataplane_admin.store.engine import Database
from dataplane_admin.store.errors import StoreError
from dataplane_admin.store.tables import Base, StateRow


def migrate(database: Database) -> None:
    """Create the tables, or run missing migrations.

    Raises StoreError if the database has tables of a version that this service does not know.
    """
    with database.writer.begin() as connection:
        database.lock(connection)
        config = configuration(connection)
        known = ScriptDirectory.from_config(config)
        current = MigrationContext.configure(connection).get_current_revision()
        if current is not None and current not in {
            script.revision for script in known.walk_revisions()
        }:
            raise StoreError(
                f"{database.url.render_as_string()}: tables have version {current}; this service "
                f"knows versions up to {known.get_current_head()}. Use the version of the service "
                "that created them, or another database"
            )
        if current is None:
            # Without checks: tables of these names would be another program's.
            Base.metadata.create_all(connection, checkfirst=False)
            counters = dict.fromkeys(StateRow.__table__.columns.keys(), 0)
            connection.execute(insert(StateRow).values(counters | {"id": 1}))
            command.stamp(config, "head")
        elif current != known.get_current_head():
            command.upgrade(config, "head")
        database.stamp(connection)


def configuration(connection: Connection) -> Config:
    """Return Alembic's configuration on an open transaction."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
