"""The SQLite file stores every record, for one server at a time; the plane waits for its writes.

These tests use internals: the records of the file, and the plane under a clock that the test sets.
"""

import contextlib
import shutil
import sqlite3
import threading
from concurrent.futures import Future

import pytest
from control_clients import until
from control_states import Clock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refit_mx import EmbeddedControlServer, RefitConfigError
from refit_mx.control import PayloadFormat, Shard, SqliteStore, VersionState, WorkerRole
from refit_mx.control import plane as plane_module
from refit_mx.control.ledger import identity
from refit_mx.control.plane import ControlPlane
from refit_mx.control.records import (
    Code,
    Lease,
    ObjectStorage,
    Refusal,
    Version,
    VersionBody,
    Worker,
)
from refit_mx.control.store import SCHEMA_VERSION, _digest

TIMEOUT_S = 30.0
BODY = VersionBody(
    "m",
    "k",
    PayloadFormat.FULL_TENSOR,
    "base",
    ("a", "b"),
    ObjectStorage("s3://x", 1),
    VersionState.READY,
    None,
)
RECORDS = [
    Version("v", BODY, VersionState.RELEASING, 3, 1_795_316_954_762, 1_795_316_954_763, "why"),
    Worker("w", WorkerRole.TRAINER, "m", 1000, 2_000, stale=True, expired=True),
    Shard("v", "a", "w", 2**40, 2**50, "digest", "[::1]:5"),
    Lease("l", "v", "g", 1000, 2_000),
]


def keep(store, *records):
    store.write({identity(record): record for record in records}).result(TIMEOUT_S)


def stored(path):
    with contextlib.closing(SqliteStore(path)) as store:
        return store.load()


def by_kind(records):
    return sorted(records, key=lambda record: type(record).__name__)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state.db"


def test_every_field_of_every_record_is_stored(path):
    store = SqliteStore(path)
    assert store.load() == []
    keep(store, *RECORDS)
    store.close()
    assert by_kind(stored(path)) == by_kind(RECORDS)


def test_changes_of_all_threads_are_stored(path):
    store = SqliteStore(path)

    def write(number):
        for n in range(50):
            keep(store, Worker(f"{number}-{n}", WorkerRole.TRAINER, "m", 1, 1))

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    store.close()
    assert len(stored(path)) == 400


def test_file_is_used_by_one_server_at_a_time(path):
    store = SqliteStore(path)
    with pytest.raises(RefitConfigError, match="in use by another server"):
        SqliteStore(path)
    store.close()
    SqliteStore(path).close()


def test_database_of_another_program_is_refused_and_unchanged(path):
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(RefitConfigError, match="not the state of a refit server"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_another_schema_version_is_refused(path):
    SqliteStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as changed, changed:
        changed.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    with pytest.raises(RefitConfigError, match=f"schema version {SCHEMA_VERSION + 1}"):
        SqliteStore(path)


def test_unreadable_record_is_refused(path):
    SqliteStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as changed, changed:
        digest = _digest("lease", "x", b"\xc1")
        changed.execute("INSERT INTO records VALUES ('lease', 'x', x'c1', ?)", [digest])
    with pytest.raises(RefitConfigError, match="a record of kind 'lease'"):
        stored(path)


@pytest.mark.parametrize(("column", "type_"), [("kind", "BLOB"), ("key", "BLOB"), ("body", "TEXT")])
def test_record_with_a_changed_sql_type_is_refused(path, column, type_):
    with contextlib.closing(SqliteStore(path)) as store:
        keep(store, Worker("w", WorkerRole.TRAINER, "m", 1000, 2_000))
    with contextlib.closing(sqlite3.connect(path)) as changed, changed:
        if type_ == "TEXT":
            changed.execute(f"UPDATE records SET {column} = x'61'")
        changed.execute(f"UPDATE records SET {column} = CAST({column} AS {type_})")
    with pytest.raises(RefitConfigError, match="is damaged: a record of kind"):
        stored(path)


def many_records():
    """Return enough records for several pages of the file."""
    return [
        *RECORDS,
        *(Worker(f"w{n}", WorkerRole.TRAINER, "m", 1000, 2_000, stale=True) for n in range(400)),
    ]


@pytest.fixture
def pages(tmp_path):
    """Return the bytes of a file with many records."""
    path = tmp_path / "pages.db"
    store = SqliteStore(path)
    keep(store, *many_records())
    store.close()
    assert len(path.read_bytes()) > 4 * 4096
    return path.read_bytes()


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_file_is_refused_or_read_correctly(pages, path, data):
    at = data.draw(st.integers(0, len(pages) - 1))
    damage = data.draw(st.binary(min_size=1, max_size=64) | st.just(bytes(4096)))
    path.write_bytes(pages[:at] + damage + pages[at + len(damage) :])
    refusal = None
    try:
        records = stored(path)
    except RefitConfigError as error:
        refusal = str(error)
    if refusal is not None:
        assert refusal.startswith(f"state {str(path)!r}")
        assert "\n" not in refusal
    else:
        by_name = {identity(record): record for record in records}
        assert by_name == {identity(record): record for record in many_records()}
    path.with_name(path.name + "-wal").unlink(missing_ok=True)


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(RefitConfigError, match="nowhere"):
        SqliteStore(tmp_path / "nowhere" / "state.db")


# The plane above it


def register(state, now_ms):
    return state.register_worker("w", WorkerRole.TRAINER, "m", ttl_s=10, now_ms=now_ms)


def test_call_is_answered_after_its_change_is_stored(path, tmp_path):
    plane = ControlPlane(SqliteStore(path), clock=Clock())
    plane.call(register)
    # The files that remain if a server is killed now.
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in (path, path.with_name("state.db-wal")):
        shutil.copy(file, copy)
    assert [each.worker_id for each in stored(copy / "state.db")] == ["w"]
    plane.close()


def test_calls_after_a_store_failure_are_refused(path):
    store = SqliteStore(path)
    plane = ControlPlane(store, clock=Clock())
    plane.call(register)
    store._connection.execute("PRAGMA max_page_count=1")

    def fill(state, now_ms):
        for n in range(200):
            state.register_worker(f"w{n}", WorkerRole.TRAINER, "m" * 500, ttl_s=9, now_ms=now_ms)

    for call in (fill, register, lambda state, now_ms: None):
        with pytest.raises(Refusal, match="full") as refusal:
            plane.call(call)
        assert refusal.value.code is Code.UNAVAILABLE
    assert "full" in plane.failed
    plane.close()


def test_failed_rollback_hides_no_error(path):
    store = SqliteStore(path)
    connection = store._connection

    class Failing:
        in_transaction = True
        close = connection.close

        def execute(self, statement):
            raise sqlite3.OperationalError(f"of {statement}")

    store._connection = Failing()
    with pytest.raises(sqlite3.OperationalError, match="of BEGIN"):
        keep(store, RECORDS[0])
    store.close()


def test_expiry_is_stored_without_a_call(path):
    clock = Clock()
    plane = ControlPlane(SqliteStore(path), clock=clock)
    plane.call(register)
    clock.run(plane, 10_000)
    until(lambda: plane._state.ledger.workers["w"].expired)
    plane.close()
    assert [each.expired for each in stored(path)] == [True]


def test_expiry_before_a_refused_call_is_stored(path):
    clock = Clock()
    plane = ControlPlane(SqliteStore(path), clock=clock)
    plane.call(register)
    clock.run(plane, 10_000)
    with pytest.raises(Refusal):
        plane.call(lambda state, now_ms: state.get_version("x", now_ms=now_ms))
    plane.close()
    assert [each.expired for each in stored(path)] == [True]


def test_store_failure_during_a_refused_call_is_reported(path):
    clock = Clock()
    store = SqliteStore(path)
    plane = ControlPlane(store, clock=clock)
    plane.call(register)
    store._connection.execute("PRAGMA query_only=1")
    clock.run(plane, 10_000)
    with pytest.raises(Refusal) as refusal:
        plane.call(lambda state, now_ms: state.get_version("x", now_ms=now_ms))
    assert refusal.value.code is Code.UNAVAILABLE
    assert "readonly" in plane.failed
    plane.close()


class HangingStore:
    """A store whose writes never end."""

    def load(self):
        return []

    def write(self, changes):
        return Future()

    def close(self):
        pass


def test_hanging_store_delays_no_expiry():
    clock = Clock()
    plane = ControlPlane(HangingStore(), clock=clock)
    workers = plane._state.ledger.workers
    with plane._lock:
        for worker, ttl_s in (("a", 2), ("b", 6)):
            plane._state.register_worker(
                worker, WorkerRole.TRAINER, "m", ttl_s=ttl_s, now_ms=clock.now_ms
            )
    for worker in ("a", "b"):
        clock.run(plane, 4_000)
        until(lambda worker=worker: workers[worker].expired)
    plane.close()


def test_hanging_store_is_named_in_the_refusal(monkeypatch):
    monkeypatch.setattr(plane_module, "_STORE_TIMEOUT_S", 0.1)
    plane = ControlPlane(HangingStore(), clock=Clock())
    with pytest.raises(Refusal, match=r"no answer from the store within 0\.1 s"):
        plane.call(register)
    plane.close()


def test_server_that_cannot_listen_releases_all_resources(path, server):
    threads = set(threading.enumerate())
    port = int(server.address.rpartition(":")[2])
    with pytest.raises(RefitConfigError, match="cannot listen"):
        EmbeddedControlServer(port=port, store=SqliteStore(path))
    SqliteStore(path).close()  # the first one is closed
    until(lambda: set(threading.enumerate()) <= threads)
