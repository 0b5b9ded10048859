"""Databases are made, brought up to date and refused."""

import sqlite3
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, text

from dataplane_admin.store import Store, StoreError, StoreUnavailable
from dataplane_admin.store.engine import Database
from dataplane_admin.store.migrate import configuration
from dataplane_admin.store.models import Base


@pytest.fixture
def url(new_url):
    return new_url(empty=True)


def test_migrations_make_exactly_what_the_models_say(url):
    Store.open(url).close()
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_sqlite_keeps_the_tables_that_are_read_by_key_in_its_order(tmp_path):
    path = tmp_path / "admin.sqlite"
    Store.open(f"sqlite:///{path}").close()
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        made = connection.execute(text("SELECT name, sql FROM sqlite_master WHERE type='table'"))
        tables = {row.name: row.sql for row in made}
        assert "WITHOUT ROWID" in tables["event_samples"]
        assert "WITHOUT ROWID" in tables["trace_links"]
        assert connection.scalar(text("PRAGMA auto_vacuum")) == 2
        assert connection.scalar(text("PRAGMA journal_mode")) == "wal"
    engine.dispose()


def test_services_that_open_a_new_database_at_once_do_not_race(url):
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
            told = list(pool.map(lambda one: one.communicate("", timeout=30), services))
    finally:
        for one in services:
            one.kill()
    assert [out for out, _ in told] == ["0\n"] * 2, [err for _, err in told]


def test_waits_of_a_database_of_the_first_tables_are_still_told(new_url, otlp):
    url = new_url(empty=True)
    database = Database(url)
    with database.writer.begin() as connection:
        command.upgrade(configuration(connection), "0001")
        told = otlp.event("waiting", wait="w", task="t", fields=["x"]).events[0]
        connection.execute(
            text(
                "INSERT INTO events (id, place_id, name, time_ns, received_ns, task, samples, wait,"
                " digest, record, keys) VALUES (1, 2, 'waiting', 1, 1, 't', 0, :wait, :digest,"
                " :record, :keys)"
            ),
            {"wait": b"of old", "digest": told.digest, "record": told.record, "keys": b""},
        )
        connection.execute(text("INSERT INTO places VALUES (2, 'run', 'train', 0)"))
        connection.execute(
            text("INSERT INTO open_waits (event_id, wait, place_id) VALUES (1, :wait, 2)"),
            {"wait": b"of old"},
        )
        connection.execute(text("UPDATE state SET last_id = 2, events = 1"))
    database.close()
    with Store.open(url) as store:
        records = store.wait_records()
        assert [event.name for event in records.events if event.name] == ["waiting"]
        assert records.silent == {}
        store.write(otlp.event("claimed", wait="w", task="t"))
        assert store.wait_records().events == []


def test_a_database_of_a_newer_service_is_refused(url):
    Store.open(url).close()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(StoreError, match="tables are of version 9999, which this service does not"):
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
def test_a_url_that_names_no_database_of_ours_is_refused(url):
    with pytest.raises(ValueError, match="expected sqlite:///path or postgresql"):
        Store.open(url)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        Store.open(f"sqlite:///{tmp_path}/none/admin.sqlite")


def test_a_file_that_is_no_database_is_refused_and_kept(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but somebody's notes " * 100)
    before = path.read_bytes()
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        Store.open(f"sqlite:///{path}")
    assert path.read_bytes() == before


@pytest.mark.parametrize("application_id", [0, 0x1234])
@pytest.mark.parametrize("journal", ["delete", "wal"])
def test_another_programs_file_is_refused_and_kept(tmp_path, application_id, journal):
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


def test_a_file_that_was_made_before_files_were_marked_is_taken(tmp_path, otlp):
    path = tmp_path / "admin.sqlite"
    with Store.open(f"sqlite:///{path}") as store:
        store.write(otlp.event("put", ["a"]))
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("PRAGMA application_id").fetchone()[0]
        raw.execute("PRAGMA application_id=0")
        raw.commit()
    with Store.open(f"sqlite:///{path}") as store:
        assert store.totals().events == 1


def test_an_unreachable_server_is_refused_without_telling_the_password():
    with pytest.raises(StoreUnavailable) as refused:
        Store.open("postgresql://somebody:secret@127.0.0.1:1/x")
    assert "secret" not in str(refused.value)


def test_only_the_owner_may_read_the_file(tmp_path):
    path = tmp_path / "admin.sqlite"
    Store.open(f"sqlite:///{path}").close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
