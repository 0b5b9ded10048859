"""A database that turns out damaged, or is gone, while the service runs: readiness says so."""

import sqlite3
from contextlib import closing

import pytest
from fastapi.testclient import TestClient

from dataplane_admin.store import Store, StoreUnavailable

SPAN = {
    "traceId": "0af7651916cd43dd8448eb211c80319c",
    "spanId": "b7ad6b7169203331",
    "name": "a",
    "startTimeUnixNano": "1",
    "endTimeUnixNano": "2",
}


def damage(path, table):
    """Overwrite the first pages of a table and its indexes, as a broken disk may."""
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        found = "SELECT rootpage FROM sqlite_master WHERE tbl_name=? AND rootpage > 0"
        pages = [page for (page,) in raw.execute(found, (table,))]
        [size] = raw.execute("PRAGMA page_size").fetchone()
    with open(path, "r+b") as file:
        for page in pages:
            file.seek((page - 1) * size)
            file.write(b"\xff" * size)


def post(client):
    body = {"resourceSpans": [{"scopeSpans": [{"spans": [SPAN]}]}]}
    return client.post("/v1/traces", json=body).status_code


@pytest.mark.parametrize("by", ["reading", "writing"])
def test_a_database_that_is_found_damaged_is_not_ready(tmp_path, make_app, by):
    path = tmp_path / "admin.sqlite"
    # Pages that a connection holds in memory are not read again, so it opens what is damaged.
    Store.open(f"sqlite:///{path}").close()
    damage(path, "traces")
    client = TestClient(make_app(), base_url="http://localhost")
    if by == "reading":
        assert client.get("/api/v1/traces").status_code == 503
    else:
        # Not 500, after which an exporter drops what it has.
        assert post(client) == 503
    ready = client.get("/readyz")
    assert ready.status_code == 503
    assert "is damaged: database disk image is malformed" in ready.json()["store"]
    assert post(client) == 503


def test_a_file_that_is_removed_while_it_is_served_is_not_ready(tmp_path, make_app):
    client = TestClient(make_app(), base_url="http://localhost")
    assert post(client) == 200
    (tmp_path / "admin.sqlite").unlink()
    assert post(client) == 503
    ready = client.get("/readyz")
    assert ready.status_code == 503
    assert "was removed or replaced" in ready.json()["store"]


def test_a_store_says_what_to_do_about_damage(tmp_path):
    path = tmp_path / "admin.sqlite"
    Store.open(f"sqlite:///{path}").close()
    damage(path, "traces")
    with (
        Store.open(f"sqlite:///{path}") as store,
        pytest.raises(StoreUnavailable, match="malformed"),
    ):
        store.totals()
