"""Scripts that set up telemetry, each in a separate process, and collectors that misbehave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

DEADLINE_S = 60.0

PREAMBLE = """
import json, os, signal, sys, threading, time
import structlog
structlog.configure(
    processors=[structlog.processors.add_log_level, structlog.processors.JSONRenderer()],
    logger_factory=structlog.PrintLoggerFactory(sys.stderr),
)
from opentelemetry import baggage, context, metrics, trace
from opentelemetry._logs import get_logger
from observability.setup import setup
ENDPOINT = sys.argv[1]
def report(**facts):
    print(json.dumps(facts), flush=True)
def requests_received():
    import urllib.request
    with urllib.request.urlopen(ENDPOINT, timeout=10) as answer:
        return int(answer.read())
def spans(number):
    for _ in range(number):
        trace.get_tracer("test").start_span("work").end()
"""


FORK_WARNING_FILTER = "ignore:This process:DeprecationWarning"


@dataclass
class ScriptResult:
    """Result of a script.

    Attributes:
        exit_code: exit code of its process.
        reports: facts that it passed to ``report``.
        warnings: its log lines.
        stderr_lines: lines of its stderr that are not log lines.
    """

    exit_code: int
    reports: list[dict[str, Any]]
    warnings: list[dict[str, Any]]
    stderr_lines: list[str] = field(default_factory=list)

    @property
    def troubles(self) -> list[str]:
        return [each["trouble"] for each in self.warnings if each["event"] == "telemetry_trouble"]

    @property
    def dropped(self) -> dict[str, Any]:
        """The one line about dropped items; export threads may log others after it."""
        [line] = [each for each in self.warnings if each["event"] == "telemetry_dropped"]
        return line


def start_script(script: str, endpoint: str = "", **variables: str) -> subprocess.Popen[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("OTEL_")}
    return subprocess.Popen(
        # Some scripts fork after starting threads. Python 3.12 and later warn of that.
        [sys.executable, "-W", FORK_WARNING_FILTER, "-c", PREAMBLE + script, endpoint],
        env=inherited | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_end(process: subprocess.Popen[str]) -> ScriptResult:
    try:
        out, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    result = ScriptResult(process.returncode, [json.loads(line) for line in out.splitlines()], [])
    for line in err.splitlines():
        if line.startswith("{"):
            result.warnings.append(json.loads(line))
        else:
            result.stderr_lines.append(line)
    return result


def run_script(script: str, endpoint: str = "", **variables: str) -> ScriptResult:
    result = wait_for_end(start_script(script, endpoint, **variables))
    assert result.stderr_lines == [], result.stderr_lines
    return result


class Collector:
    """HTTP server that stores requests and gives the same answer to each."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.bodies: list[bytes] = []
        self._lock = threading.Lock()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                body = self.rfile.read(int(self.headers["Content-Length"]))
                with collector._lock:  # so that a request and its body have the same index
                    collector.requests.append((self.path, headers))
                    collector.bodies.append(body)
                answer(self)

            def do_GET(self) -> None:
                status(200, str(len(collector.requests)).encode())(self)

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def step_points(
    server: Collector, *, times: bool = False
) -> Iterable[tuple[str, str, float, dict[str, Any]]]:
    """Yield name, unit, value and attributes of each point of step metrics.

    With ``times``, yield the points of ``rl.time`` instead; otherwise omit them.
    """
    for (path, _), body in zip(server.requests, server.bodies, strict=True):
        if path != "/v1/metrics":
            continue
        request = ExportMetricsServiceRequest.FromString(body)
        for resource in request.resource_metrics:
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    if (metric.name == "rl.time") is not times:
                        continue
                    for point in metric.gauge.data_points:
                        attributes = {
                            pair.key: getattr(pair.value, str(pair.value.WhichOneof("value")))
                            for pair in point.attributes
                        }
                        yield metric.name, metric.unit, point.as_double, attributes


@contextmanager
def collector(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[Collector]:
    server = Collector(answer)
    try:
        yield server
    finally:
        server.close()


def status(code: int, body: bytes = b"", **headers: str) -> Callable[[Any], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


@contextmanager
def hanging_collector() -> Iterator[Collector]:
    """Collector that accepts a request and does not answer until the test ends."""
    test_ended = threading.Event()
    with collector(lambda handler: test_ended.wait(DEADLINE_S) and None) as server:
        yield server
        test_ended.set()


def is_balanced(counts: dict[str, dict[str, int]]) -> bool:
    """Return whether recorded = exported + dropped, as after shutdown, for each signal."""
    return all(
        each["recorded"] == each["exported"] + each["dropped"]
        and each["dropped"] == each["queue_full"] + each["export_failed"] + each["shutdown"]
        and each["pending"] == 0
        for each in counts.values()
    )
