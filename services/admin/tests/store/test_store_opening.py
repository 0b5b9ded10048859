"""Databases are created, migrated and refused.

Imports internals: a service opens only a database that it accepts.
"""

import shutil
import sqlite3
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text

from dataplane_admin.store import Store, StoreError, StoreUnavailable, migrate


@pytest.fixture
def url(new_url):
    return new_url(empty=True)


def test_sqlite_stores_tables_in_key_order(tmp_path):
    path = tmp_path / "admin.sqlite"
    Store.open(f"sqlite:///{path}").close()
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT name, sql FROM sqlite_master WHERE type='table'"))
        tables = {row.name: row.sql for row in rows}
        assert "WITHOUT ROWID" in tables["event_samples"]
        assert "WITHOUT ROWID" in tables["trace_links"]
        assert connection.scalar(text("PRAGMA auto_vacuum")) == 2
        assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
    engine.dispose()


def test_services_can_open_a_new_database_concurrently(url):
    program = (
        "import sys; from dataplane_admin.store import Store; sys.stdin.read()\n"
        f"with Store.open({url!r}) as store: print(store.totals().traces)"
    )
    services = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        with ThreadPoolExecutor(2) as pool:
            outputs = list(pool.map(lambda service: service.communicate("", timeout=120), services))
    finally:
        for service in services:
            service.kill()
    assert [out for out, _ in outputs] == ["0\n"] * 2, [err for _, err in outputs]


def test_a_database_of_an_older_service_is_migrated(url, tmp_path, monkeypatch):
    Store.open(url).close()
    newer = tmp_path / "migrations"
    shutil.copytree(Path(migrate.__file__).parent / "migrations", newer)
    (newer / "versions" / "newer.py").write_text(
        "from alembic import op\n"
        "revision, down_revision = 'newer', '0016'\n"
        "def upgrade():\n"
        "    op.rename_table('audit', 'renamed')\n"
    )
    monkeypatch.setattr(migrate, "__file__", str(tmp_path / "migrate.py"))
    Store.open(url).close()
    engine = create_engine(url)
    assert inspect(engine).has_table("renamed")
    engine.dispose()


def test_a_database_of_a_newer_service_is_refused(url):
    Store.open(url).close()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(StoreError, match="tables have version 9999; this service"):
        Store.open(url)


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "sqlite:///file:x?mode=memory",
        "mysql://host/x",
        "nothing",
        "",
    ],
)
def test_an_invalid_database_url_is_refused(url):
    with pytest.raises(ValueError, match="expected sqlite:///path or postgresql"):
        Store.open(url)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        Store.open(f"sqlite:///{tmp_path}/none/admin.sqlite")


def test_a_file_that_is_no_database_is_refused_unchanged(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but other notes " * 100)
    before = path.read_bytes()
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        Store.open(f"sqlite:///{path}")
    assert path.read_bytes() == before


@pytest.mark.parametrize("application_id", [0, 0x1234])
@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_another_programs_file_is_refused_unchanged(tmp_path, application_id, journal):
    path = tmp_path / "places.sqlite"
    with closing(sqlite3.connect(path)) as other:
        other.execute(f"PRAGMA journal_mode={journal}")
        other.execute(f"PRAGMA application_id={application_id}")
        other.execute("CREATE TABLE bookmarks (url TEXT)")
        other.commit()
        before = path.read_bytes()
        with pytest.raises(StoreError, match="another program's database"):
            Store.open(f"sqlite:///{path}")
        assert path.read_bytes() == before
        assert other.execute("PRAGMA journal_mode").fetchone()[0] == journal


def test_an_unreachable_server_is_reported_without_password():
    with pytest.raises(StoreUnavailable) as refused:
        Store.open("postgresql://user:secret@127.0.0.1:1/x")
    assert "secret" not in str(refused.value)


def test_only_the_owner_may_read_the_file(tmp_path):
    path = tmp_path / "admin.sqlite"
    Store.open(f"sqlite:///{path}").close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
