"""Databases are created, migrated and refused.

These tests use the store: they run migrations one by one and compare tables with the models.
"""

import sqlite3
import stat
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import create_engine, text

from dataplane_admin.store import Store, StoreError, StoreUnavailable  # noqa: TID251
from dataplane_admin.store.compressed import expand  # noqa: TID251
from dataplane_admin.store.engine import Database  # noqa: TID251
from dataplane_admin.store.migrate import configuration  # noqa: TID251
from dataplane_admin.store.tables import Base  # noqa: TID251


@pytest.fixture
def url(new_url):
    return new_url(empty=True)


def test_migrations_create_the_tables_of_the_models(url):
    Store.open(url).close()
    engine = create_engine(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


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


def test_waits_survive_a_migration_from_the_first_tables(new_url, batches):
    url = new_url(empty=True)
    database = Database(url)
    with database.writer.begin() as connection:
        command.upgrade(configuration(connection), "0001")
        event = batches.event("waiting", wait="w", task="t", fields=["x"]).events[0]
        connection.execute(
            text(
                "INSERT INTO events (id, place_id, name, time_ns, received_ns, task, samples, wait,"
                " digest, record, keys) VALUES (1, 2, 'waiting', 1, 1, 't', 0, :wait, :digest,"
                " :record, :keys)"
            ),
            {
                "wait": b"of old",
                "digest": event.digest,
                "record": expand(event.record),
                "keys": b"",
            },
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
        store.write(batches.event("claimed", wait="w", task="t"))
        assert store.wait_records().events == []


def test_spans_events_and_samples_survive_their_compression(new_url, batches):
    url = new_url(empty=True)
    database = Database(url)
    trace_id = bytes(range(16))
    keys = [3, 70, 2]
    with database.writer.begin() as connection:
        command.upgrade(configuration(connection), "0009")
        event = batches.event("put", ["c", "z", "b"], version=5).events[0]
        chunk = batches.spans(trace_id).chunks[0]
        insert = (
            "INSERT INTO events (id, place_id, name, time_ns, received_ns, task, samples,"
            " weight_version, digest, record, keys)"
            " VALUES (90, 1, 'put', 1, 1, '', 3, 5, :digest, :record, :keys)"
        )
        row = {"digest": event.digest, "record": expand(event.record)}
        connection.execute(text(insert), row | {"keys": struct.pack("<3q", *keys)})
        connection.execute(text("INSERT INTO places VALUES (1, 'run', 'train', 0)"))
        for key, head in zip(keys, "czb", strict=True):
            connection.execute(
                text(
                    "INSERT INTO samples (key, place_id, head, tail, weight_version, put_ns,"
                    " live_ns, gone_ns, first_ns, last_ns)"
                    " VALUES (:key, 1, :head, :tail, 5, 1, 1, 0, 1, 1)"
                ),
                {"key": key, "head": head.encode(), "tail": b""},
            )
            connection.execute(text("INSERT INTO event_samples VALUES (:key, 90)"), {"key": key})
        connection.execute(
            text(
                "INSERT INTO span_chunks (id, trace_id, digest, spans, received_ns, blob)"
                " VALUES (91, :trace_id, :digest, 1, 1, :blob)"
            ),
            {"trace_id": trace_id, "digest": chunk.digest, "blob": expand(chunk.blob)},
        )
        connection.execute(text("UPDATE state SET last_id = 91, events = 1, samples = 3"))
    database.close()
    with Store.open(url) as store:
        [put] = store.sample_records("z").events
        assert (put.name, put.sample_ids) == ("put", ("z",))
        assert store.sample_records("a").events == []
        [span] = store.trace_records(trace_id.hex())[0].spans
        assert span.name == "grpo.step"


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


def test_a_file_without_an_application_id_is_accepted(tmp_path, batches):
    path = tmp_path / "admin.sqlite"
    with Store.open(f"sqlite:///{path}") as store:
        store.write(batches.event("put", ["a"]))
    with closing(sqlite3.connect(path)) as raw:
        assert raw.execute("PRAGMA application_id").fetchone()[0]
        raw.execute("PRAGMA application_id=0")
        raw.commit()
    with Store.open(f"sqlite:///{path}") as store:
        assert store.totals().events == 1


def test_an_unreachable_server_is_reported_without_password():
    with pytest.raises(StoreUnavailable) as refused:
        Store.open("postgresql://user:secret@127.0.0.1:1/x")
    assert "secret" not in str(refused.value)


def test_only_the_owner_may_read_the_file(tmp_path):
    path = tmp_path / "admin.sqlite"
    Store.open(f"sqlite:///{path}").close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
