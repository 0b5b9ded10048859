"""Fixtures: SQLite and a real PostgreSQL, services on both, and batches for the store.

Imports internals: batches are written without HTTP, see `Batches`.
"""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import psycopg
import pytest
from integration.ports import hold_port

from dataplane_admin import Limits, Settings, create_app
from dataplane_admin.ingest.events import batch_of_logs  # see `Batches`
from dataplane_admin.ingest.metrics import batch_of_metrics
from dataplane_admin.ingest.spans import batch_of_spans
from dataplane_admin.store import Store

BINARIES = Path("/usr/lib/postgresql")
TIMEOUT_S = 30.0


def _binaries():
    folders = sorted(BINARIES.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not folders:
        raise RuntimeError(
            f"no PostgreSQL below {BINARIES}: install Debian's package (apt-get install postgresql)"
        )
    return folders[-1].parent


class PostgreSQL:
    """A separate PostgreSQL server; it refuses to run as root."""

    def __init__(self, folder):
        binaries = _binaries()
        self._made = 0
        self._ours = None
        self._user = {}
        if os.geteuid() == 0:
            who = pwd.getpwnam("postgres")
            os.chown(folder, who.pw_uid, who.pw_gid)
            self._user = {"user": who.pw_uid, "group": who.pw_gid, "extra_groups": []}
        data = f"{folder}/data"
        initdb = [binaries / "initdb", "-D", data, "-A", "trust", "-U", "postgres", "-E", "UTF8"]
        subprocess.run(
            [*initdb, "--no-sync", "--locale=C"],
            check=True,
            capture_output=True,
            cwd=folder,
            timeout=TIMEOUT_S,
            **self._user,
        )
        self._holder = hold_port()
        self.port = self._holder.getsockname()[1]
        settings = ["fsync=off", "synchronous_commit=off", "full_page_writes=off"]
        self.process = subprocess.Popen(
            [binaries / "postgres", "-D", data, "-h", "127.0.0.1", "-p", str(self.port)]
            + ["-k", str(folder)]
            + [part for setting in settings for part in ("-c", setting)],
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            **self._user,
        )
        self._ready = threading.Event()
        self._log = []
        threading.Thread(target=self._read, daemon=True).start()
        assert self._ready.wait(TIMEOUT_S), "".join(self._log)
        assert self.process.poll() is None, "".join(self._log)

    def _read(self):
        for line in self.process.stderr:
            self._log.append(line)
            if "ready to accept connections" in line:
                self._ready.set()
        self._ready.set()

    def make(self, *, empty):
        """Create an empty database, or one with the tables, which is faster to copy."""
        template = "template0"
        if not empty:
            if self._ours is None:
                self._ours = self.make(empty=True)
                Store.open(self._ours).close()
            template = self._ours.rpartition("/")[2]
        self._made += 1
        dsn = f"host=127.0.0.1 port={self.port} user=postgres dbname=postgres"
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE test_{self._made} TEMPLATE {template}")
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/test_{self._made}"

    def stop(self):
        self.process.send_signal(signal.SIGQUIT)  # at once, without writing the databases
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(TIMEOUT_S)
        self._holder.close()


@pytest.fixture(scope="session")
def postgresql():
    folder = tempfile.mkdtemp(prefix="admin-pg-")
    server = None
    try:
        server = PostgreSQL(folder)
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request):
    """Return a function that returns URLs of new databases; an empty one has no tables."""

    def make(*, empty=False):
        if request.param == "sqlite":
            path = request.getfixturevalue("tmp_path_factory").mktemp("store") / "admin.sqlite"
            if not empty:
                shutil.copyfile(request.getfixturevalue("sqlite_with_tables"), path)
            return f"sqlite:///{path}"
        return request.getfixturevalue("postgresql").make(empty=empty)

    return make


@pytest.fixture
def url(new_url):
    return new_url()


@pytest.fixture
def job(url, job_of):
    """Start a job and a service with an empty store."""
    return job_of(store_url=url)


@pytest.fixture(scope="module")
def shared(tmp_path_factory, job_class):
    """Start one service for all examples of a property, each with a separate run."""
    url = f"sqlite:///{tmp_path_factory.mktemp('shared')}/admin.sqlite"
    with job_class(create_app(Settings(store_url=url))) as job:
        yield job


class Batches:
    """Batches of ingest, to write to a store without a service."""

    def __init__(self, otlp):
        self._otlp = otlp

    def spans(self, *args, **kwargs):
        return self.of(self._otlp.trace(*args, **kwargs))

    def of(self, data):
        return batch_of_spans(data, data.SerializeToString(), Limits())

    def event(self, *args, **kwargs):
        return batch_of_logs(self._otlp.log(*args, **kwargs), Limits(), time.time_ns())

    def metrics(self, data):
        return batch_of_metrics(data, Limits(), time.time_ns())

    def trace_log(self, trace_id, **kwargs):
        data = self._otlp.log("x", trace_id=trace_id, **kwargs)
        data.resource_logs[0].scope_logs[0].log_records[0].event_name = ""
        return batch_of_logs(data, Limits(), time.time_ns())


@pytest.fixture(scope="session")
def batches(otlp):
    return Batches(otlp)


@pytest.fixture
def store(url):
    with Store.open(url) as opened:
        yield opened
