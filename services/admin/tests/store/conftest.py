"""A real PostgreSQL beside SQLite, and OTLP requests to fill either with."""

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import psycopg
import pytest
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.trace.v1.trace_pb2 import Status, TracesData

from dataplane_admin.ingest.events import batch_of_logs
from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.spans import batch_of_spans
from dataplane_admin.store import Store

BINARIES = Path("/usr/lib/postgresql")
PATIENCE_S = 30.0
START_NS = 1_790_000_000_000_000_000


def _binaries():
    found = sorted(BINARIES.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not found:
        raise RuntimeError(
            f"no PostgreSQL below {BINARIES}: install Debian's package (apt-get install postgresql)"
        )
    return found[-1].parent


class PostgreSQL:
    """A server of its own, ended by its id; it refuses to run as root."""

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
            timeout=PATIENCE_S,
            **self._user,
        )
        # Bound and not listening, it keeps the port from everybody who does not ask for it.
        self._holder = socket.socket()
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._holder.bind(("127.0.0.1", 0))
        self.port = self._holder.getsockname()[1]
        settings = ["fsync=off", "synchronous_commit=off", "full_page_writes=off"]
        self.process = subprocess.Popen(
            [binaries / "postgres", "-D", data, "-h", "127.0.0.1", "-p", str(self.port)]
            + ["-k", str(folder)]
            + [part for one in settings for part in ("-c", one)],
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            **self._user,
        )
        self._ready = threading.Event()
        self._log = []
        threading.Thread(target=self._read, daemon=True).start()
        assert self._ready.wait(PATIENCE_S), "".join(self._log)
        assert self.process.poll() is None, "".join(self._log)

    def _read(self):
        for line in self.process.stderr:
            self._log.append(line)
            if "ready to accept connections" in line:
                self._ready.set()
        self._ready.set()

    def make(self, *, empty):
        """A database with nothing in it, or with our tables: copied, which is quicker."""
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
        self.process.send_signal(signal.SIGINT)  # at once, whoever is connected
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(PATIENCE_S)
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


@pytest.fixture(scope="session")
def sqlite_with_tables(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "admin.sqlite"
    Store.open(f"sqlite:///{path}").close()
    return path


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request):
    """Makes URLs of databases without a record; an empty one has no tables either."""

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
def store(url):
    with Store.open(url) as opened:
        yield opened


def _set(pairs, values):
    for key, value in values.items():
        pair = pairs.add(key=key)
        if isinstance(value, bool):
            pair.value.bool_value = value
        elif isinstance(value, int):
            pair.value.int_value = value
        elif isinstance(value, list):
            for one in value:
                pair.value.array_value.values.add(string_value=one)
        else:
            pair.value.string_value = value


class Otlp:
    """Makes requests, and the batches that ingest makes of them. Times are seconds of a run."""

    limits = Limits()
    start_ns = START_NS

    def trace(
        self,
        trace_id=None,
        *,
        names=("grpo.step",),
        start_s=0.0,
        seconds=1.0,
        run="run",
        step=0,
        service="grpo.driver",
        root=True,
        failed=False,
        links=(),
        span_id=None,
    ):
        trace_id = trace_id or os.urandom(16)
        data = TracesData()
        resource = data.resource_spans.add()
        _set(resource.resource.attributes, {"service.name": service, "rl.run_id": run})
        spans = resource.scope_spans.add().spans
        first = span_id or os.urandom(8)
        for place, name in enumerate(names):
            start_ns = START_NS + int((start_s + place * 1e-3) * 1e9)
            span = spans.add(
                trace_id=trace_id,
                span_id=first if place == 0 else os.urandom(8),
                name=name,
                start_time_unix_nano=start_ns,
                end_time_unix_nano=START_NS + int((start_s + seconds) * 1e9),
            )
            if place or not root:
                span.parent_span_id = first if place else os.urandom(8)
            attributes = {} if step is None else {"rl.step": step}
            _set(span.attributes, {"rl.run_id": run, **attributes})
            for link in links:
                span.links.add(trace_id=link, span_id=os.urandom(8))
            if failed:
                span.status.code = Status.STATUS_CODE_ERROR
        return data

    def spans(self, *args, **kwargs):
        return self.batch(self.trace(*args, **kwargs))

    def batch(self, data, limits=None):
        return batch_of_spans(data, data.SerializeToString(), limits or self.limits)

    def log(
        self,
        name,
        ids=(),
        *,
        at_s=0.0,
        partition="train",
        run="run",
        service="grpo.driver",
        trace_id=b"",
        span_id=b"",
        body=None,
        **facts,
    ):
        data = LogsData()
        resource = data.resource_logs.add()
        _set(resource.resource.attributes, {"service.name": service, "rl.run_id": run})
        record = resource.scope_logs.add().log_records.add(
            event_name=f"dataplane.{name}",
            time_unix_nano=START_NS + int(at_s * 1e9),
            trace_id=trace_id,
            span_id=span_id,
        )
        record.body.string_value = json.dumps(list(ids)) if body is None else body
        names = {"step": "rl.step", "version": "rl.weight_version"}
        told = {names.get(key, f"dataplane.{key}"): value for key, value in facts.items()}
        if partition is not None:
            told = {"dataplane.partition": partition, "dataplane.samples": len(ids)} | told
        _set(record.attributes, told)
        return data

    def event(self, *args, **kwargs):
        return batch_of_logs(self.log(*args, **kwargs), self.limits, time.time_ns())


@pytest.fixture(scope="session")
def otlp():
    return Otlp()


@pytest.fixture(scope="session")
def start_ns():
    """The zero of `Otlp`'s seconds."""
    return START_NS
