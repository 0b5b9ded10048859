"""Fixtures: processes and applications of the service, and a job that sends telemetry to them."""

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from hypothesis import settings
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, MetricsData
from opentelemetry.proto.trace.v1.trace_pb2 import Status, TracesData
from typer.testing import CliRunner

from dataplane_admin import Settings, create_app
from dataplane_admin.cli import app as command_line

# Tests are imported by path, so their shared modules need this folder.
sys.path.insert(0, str(Path(__file__).parent))

COMMAND = str(Path(sysconfig.get_path("scripts")) / "dataplane-admin")
TIMEOUT_S = 60.0
# A process that imports torch and runs steps may need minutes on a loaded machine. A failed one
# exits, which is noticed at once.
START_S = 240.0
TOKEN = "3f2b8c0d9e7a6b5c"
START_NS = 1_790_000_000_000_000_000
KINDS = {
    TracesData: ("traces", ExportTraceServiceResponse),
    LogsData: ("logs", ExportLogsServiceResponse),
    MetricsData: ("metrics", ExportMetricsServiceResponse),
}


class Service:
    """Process of a command, and the URL that it printed."""

    def __init__(self, command, folder):
        # A file, since an unread pipe would block the process.
        self.errors = tempfile.NamedTemporaryFile("w")  # noqa: SIM115  # `end` closes it
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self.errors, text=True, cwd=folder
        )

    def wait_for_url(self):
        ready, _, _ = select.select([self.process.stdout], [], [], START_S)
        assert ready, f"no line of output within {START_S:g} s; {self.written_errors()}"
        self.url = self.process.stdout.readline().strip()
        assert self.url, self.written_errors()
        return self

    def written_errors(self):
        """Return its standard error so far."""
        return Path(self.errors.name).read_text()

    @property
    def port(self):
        return int(self.url.rsplit(":", 1)[1])

    def stop(self, number):
        """Send a signal and wait; return the status, the duration in seconds, and the output."""
        start_s = time.monotonic()
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, time.monotonic() - start_s, out + self.written_errors()

    def end(self):
        """Kill the process."""
        self.process.kill()
        self.process.communicate()
        self.errors.close()


@pytest.fixture
def start(tmp_path):
    """Start the service, or another command that prints a URL, in the test's folder."""
    services = []

    def start_service(*arguments, command=(COMMAND, "serve", "--port", "0")):
        services.append(Service([*command, *arguments], tmp_path))
        return services[-1].wait_for_url()

    yield start_service
    for service in services:
        service.end()


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Start the service with wrong options; return its exit status and standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        done = CliRunner().invoke(command_line, ["serve", *arguments])
        assert done.stdout == ""
        return done.exit_code, done.stderr

    return run


@pytest.fixture(scope="session")
def sqlite_with_tables(tmp_path_factory):
    """Return a database with empty tables; copying it is faster than creating the tables."""
    path = tmp_path_factory.mktemp("template") / "admin.sqlite"
    create_app(Settings(store_url=f"sqlite:///{path}")).state.store.close()
    return path


@pytest.fixture
def store_url(tmp_path, sqlite_with_tables):
    """Return the URL of a database with empty tables in the test's folder."""
    path = tmp_path / "admin.sqlite"
    shutil.copyfile(sqlite_with_tables, path)
    return f"sqlite:///{path}"


@pytest.fixture
def make_app(store_url):
    """Return a function that creates applications on one file, with the arguments of `Settings`."""
    apps = []

    def make(*, inspector=None, **settings):
        settings.setdefault("store_url", store_url)
        settings.setdefault("failed_login_delay_s", 0.0)
        apps.append(create_app(Settings(**settings), inspector=inspector))
        return apps[-1]

    yield make
    for app in apps:
        app.state.store.close()


@pytest.fixture(scope="session")
def app_of(tmp_path_factory):
    """Return a function that creates one application per settings, for read-only tests."""
    apps = {}

    def app(**settings):
        place = repr(sorted(settings.items()))
        if place not in apps:
            path = tmp_path_factory.mktemp("admin") / "admin.sqlite"
            settings.setdefault("failed_login_delay_s", 0.0)
            apps[place] = create_app(Settings(store_url=f"sqlite:///{path}", **settings))
        return apps[place]

    yield app
    for app in apps.values():
        app.state.store.close()


@pytest.fixture(scope="session")
def start_running(tmp_path_factory):
    """Return a function that starts services with a data plane and a traced run, see running.py."""
    services = []

    def start(**settings):
        folder = tmp_path_factory.mktemp("running")
        command = [sys.executable, str(Path(__file__).with_name("running.py"))]
        settings = {"store_url": f"sqlite:///{folder}/admin.sqlite", **settings}
        services.append(Service([*command, json.dumps(settings)], folder))
        return services[-1].wait_for_url()

    yield start
    for service in services:
        service.end()


@pytest.fixture(scope="session")
def running(start_running):
    """Start a service with a data plane and a traced run, for read-only tests."""
    return start_running(token=TOKEN, allow_actions=True)


# The duration of an example depends on the load of the machine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def _set(pairs, values):
    for key, value in values.items():
        pair = pairs.add(key=key)
        if isinstance(value, bool):
            pair.value.bool_value = value
        elif isinstance(value, int):
            pair.value.int_value = value
        elif isinstance(value, list):
            for item in value:
                pair.value.array_value.values.add(string_value=item)
        elif isinstance(value, dict):
            _set(pair.value.kvlist_value.values, value)
        else:
            pair.value.string_value = value


def _resource(target, service, run):
    _set(target.resource.attributes, {"service.name": service, "rl.run_id": run})
    return target


class Otlp:
    """Builder of export requests. Times are seconds since `start_ns`."""

    start_ns = START_NS
    set = staticmethod(_set)

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
        trace_id, first = trace_id or os.urandom(16), span_id or os.urandom(8)
        data = TracesData()
        spans = _resource(data.resource_spans.add(), service, run).scope_spans.add().spans
        for place, name in enumerate(names):
            span = spans.add(
                trace_id=trace_id,
                span_id=first if place == 0 else os.urandom(8),
                name=name,
                start_time_unix_nano=START_NS + int((start_s + place * 1e-3) * 1e9),
                end_time_unix_nano=START_NS + int((start_s + seconds) * 1e9),
            )
            if place or not root:
                span.parent_span_id = first if place else os.urandom(8)
            _set(span.attributes, {"rl.run_id": run} | ({} if step is None else {"rl.step": step}))
            for link in links:
                span.links.add(trace_id=link, span_id=os.urandom(8))
            if failed:
                span.status.code = Status.STATUS_CODE_ERROR
        return data

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
        scope = _resource(data.resource_logs.add(), service, run).scope_logs.add()
        record = scope.log_records.add(
            event_name=f"dataplane.{name}",
            time_unix_nano=START_NS + int(at_s * 1e9),
            trace_id=trace_id,
            span_id=span_id,
        )
        record.body.string_value = json.dumps(list(ids)) if body is None else body
        names = {"step": "rl.step", "version": "rl.weight_version", "error": "error.type"}
        attributes = {names.get(key, f"dataplane.{key}"): value for key, value in facts.items()}
        if partition is not None:
            named = {"dataplane.partition": partition, "dataplane.samples": len(ids)}
            attributes = named | attributes
        _set(record.attributes, attributes)
        return data

    def run(self, name, run="run", *, at_s=0.0, **facts):
        """Return the event of a run's start or end."""
        return self.log(f"run_{name}", run=run, at_s=at_s, partition=None, **facts)

    def gauge(self, service="grpo.driver", *, run="run", name="up", value=1):
        data = MetricsData()
        scope = _resource(data.resource_metrics.add(), service, run).scope_metrics.add()
        points = scope.metrics.add(name=name).gauge.data_points
        points.add(as_int=value, time_unix_nano=time.time_ns())
        return data

    def dropped(self, counts, *, run="run"):
        """Return the numbers of items that a process dropped since its start, by signal."""
        data = MetricsData()
        scope = _resource(data.resource_metrics.add(), "grpo.driver", run).scope_metrics.add()
        counter = scope.metrics.add(name="dataplane.telemetry.dropped").sum
        counter.is_monotonic = True
        counter.aggregation_temporality = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
        for signal, count in counts.items():
            point = counter.data_points.add(as_int=count, time_unix_nano=time.time_ns())
            _set(point.attributes, {"dataplane.signal": signal})
        return data

    def curve(
        self,
        values,
        *,
        run="run",
        name="rl.reward.mean",
        unit="1",
        first=0,
        at_s=0.0,
        **attributes,
    ):
        """Return a gauge with a point per step from ``first``; None leaves a step out."""
        start_ns = START_NS + int(at_s * 1e9)
        data = MetricsData()
        scope = _resource(data.resource_metrics.add(), "grpo.driver", run).scope_metrics.add()
        points = scope.metrics.add(name=name, unit=unit).gauge.data_points
        for step, value in enumerate(values, first):
            if value is not None:
                point = points.add(as_double=value, time_unix_nano=start_ns + step % 10**9)
                _set(point.attributes, {"rl.step": step, **attributes})
        return data


@pytest.fixture(scope="session")
def otlp():
    return Otlp()


class Job:
    """A job that sends to a service of this process, and a client of the service."""

    def __init__(self, app):
        self.app = app
        self.client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)

    def __enter__(self):
        self.client.__enter__()
        return self

    def __exit__(self, *failure):
        self.client.__exit__(*failure)

    def send(self, *requests):
        """Send export requests, merging neighbors of one kind; return the last answer."""
        merged = []
        for request in requests:
            if not merged or type(merged[-1]) is not type(request):
                merged.append(type(request)())
            merged[-1].MergeFrom(request)
        for request in merged:
            kind, answered = KINDS[type(request)]
            answer = self.post(kind, request.SerializeToString())
            assert answer.status_code == 200, answer.text
        return answered.FromString(answer.content).partial_success

    def post(self, kind, body, content_type="application/x-protobuf", **headers):
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if content_type is not None:
            named["content-type"] = content_type
        return self.client.post(f"/v1/{kind}", content=body, headers=named)

    def get(self, path, **query):
        """Return the API's answer."""
        answer = self.client.get(f"/api/v1/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def all(self, path, items, **query):
        """Return the items of all pages."""
        listed, cursor = [], {}
        while True:
            page = self.get(path, **query, **cursor)
            listed += page[items]
            if page["next"] is None:
                return listed
            cursor = {"cursor": page["next"]}

    def trace(self, trace_id):
        return self.get("trace", id=trace_id.hex())

    def counts(self):
        """Return the totals of stored and received records."""
        status = self.get("status")
        return status["store"] | status["telemetry"]


@pytest.fixture(scope="session")
def job_class():
    return Job


@pytest.fixture
def job_of(store_url):
    """Return a function that creates jobs with a service of some settings."""
    with contextlib.ExitStack() as stack:

        def make(*, inspector=None, **given):
            given.setdefault("store_url", store_url)
            return stack.enter_context(Job(create_app(Settings(**given), inspector=inspector)))

        yield make


@pytest.fixture
def alerted(job_of, tmp_path):
    """Start a job and a service with these rules."""
    from alerting import rules_in  # a sibling of this file, which is on the path only by now

    def start(*rules, **settings):
        return job_of(alerts=rules_in(tmp_path, *rules), alerts_every_s=0.02, **settings)

    return start


@pytest.fixture
def job(job_of):
    return job_of()


@pytest.fixture
def later(monkeypatch):
    """Function that sets the service's clock forward; may be called again."""

    def forward(seconds):
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + int(seconds * 1e9))

    return forward
