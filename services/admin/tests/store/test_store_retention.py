"""The oldest records are deleted by age and size, and SQLite's file shrinks.

These tests use the store, to write megabytes a second and to count rows.
So internals are imported.
"""

import math
import os
import sqlite3
import time
from collections import deque
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from dataplane_admin import Retention
from dataplane_admin.models import AuditEntry
from dataplane_admin.store import Store

TIMEOUT_S = 20.0


def wait_until(reached, store):
    """Wait until retention, which runs while nothing is written, changes the revision."""
    deadline = time.monotonic() + TIMEOUT_S
    while not reached():
        assert time.monotonic() < deadline, store.totals()
        time.sleep(0.02)


def large(batches, nbytes):
    batch = batches.spans()
    return replace(batch, chunks=(replace(batch.chunks[0], blob=os.urandom(nbytes)),))


def pages(path):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA page_count").fetchone()[0]


RECEIVED = {
    "traces": "updated_ns",
    "events": "received_ns",
    "trace_logs": "received_ns",
    "runs": "updated_ns",
}


def make_older(url, seconds, tables=tuple(RECEIVED)):
    """Shift receive times into the past."""
    engine = create_engine(url)
    with engine.begin() as connection:
        for table in tables:
            column = RECEIVED[table]
            connection.execute(
                text(f"UPDATE {table} SET {column} = {column} - :ns"), {"ns": int(seconds * 1e9)}
            )
    engine.dispose()


def rows(url, *tables):
    engine = create_engine(url)
    with engine.connect() as connection:
        counts = [connection.scalar(text(f"SELECT count(*) FROM {table}")) for table in tables]
    engine.dispose()
    return counts


def counted_bytes(url):
    engine = create_engine(url)
    with engine.connect() as connection:
        nbytes = connection.scalar(text("SELECT nbytes FROM state"))
    engine.dispose()
    return nbytes


ALL = ["traces", "span_chunks", "trace_links", "events", "samples", "event_samples", "open_waits"]
ALL += ["sample_stems"]


def test_old_records_are_deleted_with_all_their_rows(url, batches):
    other, again = batches.spans(), f"{3:036}-1"
    with Store.open(url) as store:
        for number in range(18):
            store.write(batches.spans(links=[os.urandom(16)]))
            ids = [f"{number:036}-{place}" for place in range(20)]
            store.write(batches.event("put", ids, at_s=number))
            store.write(batches.event("waiting", at_s=number, wait=f"w{number}"))
    make_older(url, 1000)
    with Store.open(url, retention=Retention(max_age_s=500, max_bytes=None)) as store:
        store.write(other)
        store.write(batches.event("put", ["kept", again], at_s=99))
        wait_until(lambda: store.totals().events == 1 and store.totals().traces == 1, store)
        assert store.trace(other.chunks[0].trace_id.hex()) is not None
        assert {row.sample_id for row in store.find_samples("")[0]} == {"kept", again}
        assert len(store.sample_records(again, "run").events) == 1
        assert rows(url, *ALL) == [1, 1, 0, 1, 2, 2, 0, 2]
        totals = store.totals()
        assert (totals.spans, totals.samples) == (1, 2)
        assert [row.run_id for row in store.runs()] == ["run"]


@pytest.mark.parametrize("with_trace", [True, False])
def test_logs_are_deleted_with_their_trace_or_by_age(url, batches, with_trace):
    trace_id = os.urandom(16)
    with Store.open(url) as store:
        for number in range(600):
            store.submit(batches.trace_log(trace_id, at_s=number))
        store.write(batches.spans(trace_id) if with_trace else batches.event("put"))
    make_older(url, 1000)
    if with_trace:  # the logs are younger than their trace
        make_older(url, -1000, ["trace_logs"])
    with Store.open(url, retention=Retention(max_age_s=500, max_bytes=None)) as store:
        wait_until(lambda: rows(url, "trace_logs", "traces") == [0, 0], store)
        wait_until(lambda: store.totals().events == 0, store)
    assert counted_bytes(url) == 0


@pytest.mark.parametrize(("run_age_s", "curves"), [(None, 0), (math.inf, 1)])
def test_a_full_store_retains_old_curves_if_set(url, batches, otlp, run_age_s, curves):
    limits = Retention(max_bytes=1 << 20, max_run_age_s=run_age_s)
    with Store.open(url, retention=limits) as store:
        store.write(batches.metrics(otlp.curve([1.0] * 40)))
        for _ in range(20):
            store.write(large(batches, 100_000))
        wait_until(lambda: store.totals().traces < 15, store)
        assert rows(url, "curves") == [curves]


def test_a_run_without_records_is_deleted(url, batches):
    with Store.open(url) as store:
        store.write(batches.spans(run="old"))
        store.write(batches.event("put", ["a"], run="old"))
    make_older(url, 1000)
    with Store.open(url, retention=Retention(max_age_s=500)) as store:
        wait_until(lambda: not store.runs(), store)
        assert rows(url, "runs", "places", "samples") == [0, 0, 0]


@pytest.mark.parametrize("run", ["", "run"])
def test_a_partition_is_deleted_with_its_last_event(url, batches, run):
    with Store.open(url) as store:
        store.write(batches.event("put", ["a"], run=run, partition="old"))
        store.write(batches.event("put", ["a"], run=run, partition="kept"))
    make_older(url, 1000, ["events"])
    with Store.open(url, retention=Retention(max_age_s=500, max_bytes=None)) as store:
        store.write(batches.event("put", ["b"], run=run, partition="kept"))
        wait_until(lambda: store.totals().events == 1, store)
        assert rows(url, "places", "samples") == [1, 1]


def test_the_deletion_of_a_run_changes_the_revision(url, batches):
    with Store.open(url) as store:
        store.write(batches.spans())
    make_older(url, 1000, ["traces"])
    with Store.open(url, retention=Retention(max_age_s=500)) as store:
        wait_until(lambda: store.totals().traces == 0, store)
        before = store.revision
    make_older(url, 1000, ["runs"])
    with Store.open(url, retention=Retention(max_age_s=500)) as store:
        wait_until(lambda: not store.runs(), store)
        assert store.revision > before


def test_beyond_the_size_limit_the_oldest_is_deleted(url, batches):
    limit = 2_000_000
    with Store.open(url, retention=Retention(max_bytes=limit)) as store:
        for _ in range(60):
            newest = large(batches, 100_000)
            store.write(newest)
        wait_until(lambda: store.totals().traces < 25, store)
        left = store.totals().traces
        assert left >= 5
        assert store.trace(newest.chunks[0].trace_id.hex()) is not None


def test_the_file_of_sqlite_really_shrinks(tmp_path, batches):
    path = tmp_path / "admin.sqlite"
    with Store.open(f"sqlite:///{path}") as store:
        for _ in range(60):
            store.write(large(batches, 200_000))
    before = path.stat().st_size
    assert before > 10_000_000
    with Store.open(f"sqlite:///{path}", retention=Retention(max_bytes=3_000_000)) as store:
        wait_until(lambda: pages(path) * 4096 < 4_000_000, store)
    # Closing writes the log to the file and truncates it.
    assert path.stat().st_size < 5_000_000
    assert not Path(f"{path}-wal").exists() or Path(f"{path}-wal").stat().st_size == 0


def test_the_wal_of_sqlite_counts_against_the_limit(tmp_path, batches):
    path = tmp_path / "admin.sqlite"
    with Store.open(f"sqlite:///{path}", retention=Retention(max_bytes=3_000_000)) as store:
        for _ in range(200):
            store.write(large(batches, 50_000))
        # While the service runs, file and WAL count, not only the used pages.
        wait_until(lambda: store.totals().nbytes < 3_500_000, store)
        assert store.totals().traces >= 15


def test_a_wal_held_by_a_reader_causes_no_deletions(tmp_path, batches):
    path = tmp_path / "admin.sqlite"
    with Store.open(f"sqlite:///{path}", retention=Retention(max_bytes=4_000_000)) as store:
        store.write(large(batches, 100_000))
        with closing(sqlite3.connect(path)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT count(*) FROM traces").fetchall()
            for _ in range(100):
                store.write(large(batches, 100_000))
            wait_until(lambda: store.totals().traces < 45, store)
            wal = Path(f"{path}-wal").stat().st_size
            assert wal > 8_000_000
            assert store.totals().traces >= 20


def test_a_busy_store_does_not_outgrow_its_limit(url, batches):
    limit = 4_000_000
    sizes = []
    with Store.open(url, retention=Retention(max_bytes=limit)) as store:
        waiting = deque()
        for _ in range(500):
            waiting.append(store.submit(large(batches, 200_000)))
            if len(waiting) == 8:
                waiting.popleft().result(TIMEOUT_S)
                sizes.append(store.totals().traces * 200_000)
        for future in waiting:
            future.result(TIMEOUT_S)
    assert limit / 2 < max(sizes) < 3 * limit  # of 100 MB written


def test_a_limit_of_zero_is_refused():
    with pytest.raises(ValueError, match="max_bytes=0: expected more than 0"):
        Retention(max_bytes=0)
    with pytest.raises(ValueError, match="max_age_s=-1"):
        Retention(max_age_s=-1)


def test_entries_of_alerts_displace_older_ones_and_no_actions(store, monkeypatch):
    monkeypatch.setattr("dataplane_admin.store.apply.MAX_ENTRIES", 5)
    for number in range(20):
        for actor in ("alerts", "token") if number < 3 else ("alerts",):
            facts = {"actor": actor, "action": "x", "target": "run", "outcome": f"{number}"}
            store.record_action(AuditEntry(id=0, time_ns=number, parameters={}, **facts))
    entries, _ = store.audit(limit=100)
    shown = [(entry.actor, entry.outcome) for entry in entries]
    actions = [("token", f"{number}") for number in (2, 1, 0)]
    assert shown == [("alerts", f"{number}") for number in range(19, 14, -1)] + actions
