"""Brings a database to the newest version of the tables.

In one transaction and under the writers' lock, so that of two services that open one database at
the same moment one does it and the other finds it done.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from dataplane_admin.store.engine import Database
from dataplane_admin.store.errors import StoreError


def migrate(database: Database) -> None:
    """Run the migrations that are missing.

    Raises:
        StoreError: a newer version of this service made the database.
    """
    with database.writer.begin() as connection:
        database.lock(connection)
        config = configuration(connection)
        known = ScriptDirectory.from_config(config)
        found = MigrationContext.configure(connection).get_current_revision()
        if found is not None and found not in {one.revision for one in known.walk_revisions()}:
            raise StoreError(
                f"{database.url.render_as_string()}: its tables are of version {found}, which this "
                f"service does not know; it knows them up to {known.get_current_head()}: use the "
                "newer service that made them, or another database"
            )
        if found != known.get_current_head():
            command.upgrade(config, "head")
        database.stamp(connection)


def configuration(connection: Connection) -> Config:
    """Alembic's, on an open transaction."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config
