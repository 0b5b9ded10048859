"""Readiness with a database that is damaged or removed while the service runs."""

import sqlite3
from contextlib import closing

import pytest


def damage(path, table):
    """Overwrite the first pages of a table and its indexes, as a broken disk does."""
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        query = "SELECT rootpage FROM sqlite_master WHERE tbl_name=? AND rootpage > 0"
        pages = [page for (page,) in raw.execute(query, (table,))]
        [size] = raw.execute("PRAGMA page_size").fetchone()
    with open(path, "r+b") as file:
        for page in pages:
            file.seek((page - 1) * size)
            file.write(b"\xff" * size)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "admin.sqlite"


def post(job, otlp):
    return job.post("traces", otlp.trace().SerializeToString()).status_code


@pytest.mark.parametrize("by", ["reading", "writing"])
def test_a_damaged_database_is_not_ready(path, make_app, job_of, otlp, by):
    # Connections cache pages, so damage the file before the service opens it.
    make_app().state.store.close()
    damage(path, "traces")
    job = job_of()
    if by == "reading":
        answer = job.client.get("/api/v1/traces")
        assert answer.status_code == 503
        assert "malformed" in answer.json()["detail"]
        page = job.client.get("/traces", headers={"accept": "text/html"})
        assert page.status_code == 503
        assert '<ul class="links"><li><a href="/traces">Retry</a>' in page.text
    else:
        # Not 500, after which an exporter drops its records.
        assert post(job, otlp) == 503
    ready = job.client.get("/readyz")
    assert ready.status_code == 503
    assert "is damaged: database disk image is malformed" in ready.json()["store"]
    assert post(job, otlp) == 503


def test_a_removed_database_file_is_not_ready(path, job, otlp):
    assert post(job, otlp) == 200
    path.unlink()
    assert post(job, otlp) == 503
    ready = job.client.get("/readyz")
    assert ready.status_code == 503
    assert "was removed or replaced" in ready.json()["store"]


def test_writes_continue_once_a_replaced_folder_is_back(tmp_path, job_of, otlp):
    folder, moved = tmp_path / "folder", tmp_path / "moved"
    folder.mkdir()
    job = job_of(store_url=f"sqlite:///{folder / 'admin.sqlite'}")
    assert post(job, otlp) == 200
    folder.rename(moved)
    folder.touch()
    assert [post(job, otlp), post(job, otlp)] == [503, 503]
    assert "was removed or replaced" in job.client.get("/readyz").json()["store"]
    folder.unlink()
    moved.rename(folder)
    assert post(job, otlp) == 200
