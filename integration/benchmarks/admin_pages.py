"""Duration of each page and API answer of the admin service, with a long history.

The service runs in a separate process with a SQLite file, and inspects a data plane of 100,000
samples. One client requests all pages over one connection, in shuffled rounds. Nothing else runs.
The service renders the page of a live run for every request, since the client sends no ETag. Then
Chromium, if it is installed, loads pages; their time to the first contentful paint includes the
request. Last, the service ingests spans into the filled store, as in `admin_ingest`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import shutil
import time
import urllib.parse
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import psutil
from integration.benchmarks import admin_history
from integration.benchmarks.admin_ingest import SPANS, make_requests, send_all
from integration.benchmarks.admin_service import PARTITION, Service
from integration.benchmarks.results_file import Entry
from integration.benchmarks.summary import Summary

PAGES_HEADINGS = ["page or answer", "p50 ms", "p95 ms", "kB", "requests"]
PAINT_HEADINGS = ["page in Chromium", "first paint p50 ms", "p95 ms", "loads"]
LIVE_SAMPLES = 100_000

_QUICK_STEPS, _FULL_STEPS = 100, 1_000
_QUICK_SAMPLES, _FULL_SAMPLES = 4, 100
_QUICK_ROUNDS, _FULL_ROUNDS = 15, 60
_QUICK_CURVES, _FULL_CURVES = (20, 1_000), (200, 10_000)
_QUICK_LOADS, _FULL_LOADS = 3, 15
_QUICK_INGEST, _FULL_INGEST = (3, 40), (7, 600)
"""Rounds, and requests in each."""
_ENGINES, _LOAD_S = 8, 3_600
_WARM_UPS = 2
SEED = 20_264


@dataclass(frozen=True)
class PagesResult:
    """Result of the page benchmark.

    Attributes:
        large_trace: path of the page of a trace with `admin_history.LARGE_SPANS` spans.
        seconds: path to the duration of each request.
        nbytes: path to the size of the last answer.
        traces: number of traces in the store.
        events: number of events in the store.
        filling_s: duration of their ingest over HTTP, in seconds.
        memory: bytes of the service's memory after a tenth, a half and all of the history.
        paints: path to the seconds until the first contentful paint of each load in Chromium.
        ingest_rates: spans per second of each round of requests to the filled store.
    """

    large_trace: str
    seconds: dict[str, list[float]]
    nbytes: dict[str, int]
    traces: int
    events: int
    filling_s: float
    memory: list[int]
    paints: dict[str, list[float]]
    ingest_rates: list[float]

    def p95(self, path: str) -> float:
        """Return the 95th percentile of a path's durations, in seconds."""
        return float(np.percentile(self.seconds[path], 95))

    def label(self, path: str) -> str:
        """Return a path as it is shown."""
        return (
            f"/trace of {admin_history.LARGE_SPANS:,} spans" if path == self.large_trace else path
        )

    def rows(self) -> list[list[str]]:
        """Return rows for a table with `PAGES_HEADINGS`, slowest first."""
        return [
            [
                self.label(path),
                f"{Summary.of(self.seconds[path]).value * 1e3:.1f}",
                f"{self.p95(path) * 1e3:.1f}",
                f"{self.nbytes[path] / 1e3:.0f}",
                str(len(self.seconds[path])),
            ]
            for path in sorted(self.seconds, key=self.p95, reverse=True)
        ]

    def paint_rows(self) -> list[list[str]]:
        """Return rows for a table with `PAINT_HEADINGS`, slowest first."""
        rows = {
            path: [f"{np.percentile(paints, q) * 1e3:.0f}" for q in (50, 95)] + [str(len(paints))]
            for path, paints in self.paints.items()
        }
        return [
            [self.label(path), *rows[path]]
            for path in sorted(rows, key=lambda path: max(self.paints[path]), reverse=True)
        ]

    def entries(self) -> list[Entry]:
        """Return entries for the file of results."""
        slowest = max(self.seconds.keys() - {self.large_trace}, key=self.p95)
        entries = [
            Entry.of(name, Summary.of(self.seconds[path]), "ms", factor=1e3, value=self.p95(path))
            for name, path in (
                ("admin.page_p95_ms", slowest),
                ("admin.large_trace_p95_ms", self.large_trace),
            )
        ]
        paints = {path: Summary.of(paints) for path, paints in self.paints.items()}
        if paints:  # Chromium is installed
            large = paints.pop(self.large_trace)
            slowest_paint = max(paints.values(), key=lambda paint: paint.value)
            entries.append(Entry.ms("admin.first_paint_ms", slowest_paint))
            entries.append(Entry.ms("admin.large_trace_first_paint_ms", large))
        rate = Summary.of(self.ingest_rates)
        entries += [
            Entry.of("admin.full_store_ingest_spans_per_s", rate, "1/s"),
            Entry("admin.history_traces", self.traces, "1", None, 0.0, 1),
            Entry("admin.history_events", self.events, "1", None, 0.0, 1),
            Entry("admin.events_per_s", self.events / self.filling_s, "1/s", None, 0.0, 1),
        ]
        for place, nbytes in zip(("tenth", "half", "end"), self.memory, strict=True):
            entries.append(Entry(f"admin.memory_{place}_mb", nbytes / 1e6, "MB", None, 0.0, 1))
        return entries


def measure_pages(service: Service, *, full: bool) -> PagesResult:
    """Fill the store of a service, then request its pages.

    Raises:
        RuntimeError: the service did not start, or refused a request.
    """
    samples = _FULL_SAMPLES if full else _QUICK_SAMPLES
    rounds = _FULL_ROUNDS if full else _QUICK_ROUNDS
    steps = _FULL_STEPS if full else _QUICK_STEPS
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120)
    with contextlib.closing(connection):
        large_trace = _send_large_trace(connection, steps)
        marks = (steps // 10, steps // 2, steps)
        memory, filling_s = fill(connection, service.process, steps, samples, marks)
        metrics, points = _FULL_CURVES if full else _QUICK_CURVES
        start_ns = time.time_ns()
        for run, count in ((admin_history.RUN, points), (admin_history.OTHER_RUN, points // 10)):
            for body in admin_history.curves(metrics, count, start_ns=start_ns, run=run):
                _send(connection, "/v1/metrics", body)
        for body in admin_history.sample_facts(steps, samples=samples, start_ns=start_ns):
            _send(connection, "/v1/logs", body)
        for body in admin_history.engine_load(_ENGINES, _LOAD_S, end_ns=time.time_ns()):
            _send(connection, "/v1/metrics", body)
        paths = [*_paths(connection, steps), large_trace]
        seconds: dict[str, list[float]] = defaultdict(list)
        nbytes: dict[str, int] = {}
        order = random.Random(SEED)
        for number in range(_WARM_UPS + rounds):
            for path in order.sample(paths, len(paths)):
                began = time.perf_counter()
                answer = _ask(connection, path)
                if number >= _WARM_UPS:
                    seconds[path].append(time.perf_counter() - began)
                    nbytes[path] = len(answer)
    pages = [path for path in paths if not path.startswith("/api/")]
    paints = _paints(service.port, pages, _FULL_LOADS if full else _QUICK_LOADS)
    rounds, requests = _FULL_INGEST if full else _QUICK_INGEST
    ingest_rates = []
    for number in range(1 + rounds):
        bodies = make_requests(requests, order)
        duration_s = send_all(service.port, bodies)
        if number:  # the first round is a warm-up
            ingest_rates.append(len(bodies) * SPANS / duration_s)
    return PagesResult(
        large_trace,
        dict(seconds),
        nbytes,
        steps,
        steps * samples * admin_history.EVENTS_A_SAMPLE,
        filling_s,
        memory,
        paints,
        ingest_rates,
    )


def _paints(port: int, paths: list[str], loads: int) -> dict[str, list[float]]:
    """Return the seconds until the first contentful paint of each load; empty without Chromium.

    All files but the page itself come from the browser's cache, as at any but the first visit.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        return {}
    from playwright.sync_api import sync_playwright

    seconds: dict[str, list[float]] = defaultdict(list)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        for number in range(1 + loads):
            for path in paths:
                # Leaving a page counts as well, and a large page takes longer than a paint.
                page.goto(f"http://127.0.0.1:{port}/healthz")
                page.goto(f"http://127.0.0.1:{port}{path}")
                painted = page.evaluate(
                    "new Promise((resolve) => new PerformanceObserver((list) =>"
                    "  list.getEntriesByName('first-contentful-paint').forEach("
                    "    (one) => resolve(one.startTime))"
                    ").observe({ type: 'paint', buffered: true }))"
                )
                if number:
                    seconds[path].append(painted / 1e3)
        browser.close()
    return dict(seconds)


def fill(
    connection: http.client.HTTPConnection,
    process: psutil.Process,
    steps: int,
    samples: int,
    marks: Collection[int],
) -> tuple[list[int], float]:
    """Send the telemetry of ``steps`` steps with ``samples`` samples each.

    Returns:
        The process's memory in bytes after the steps numbered ``marks``, and the seconds that the
        requests took.

    Raises:
        RuntimeError: a request was not fully accepted.
    """
    memory = []
    duration = 0.0
    start_ns = time.time_ns() - steps * 2_000_000_000
    history = admin_history.steps(steps, samples=samples, start_ns=start_ns)
    for number, step in enumerate(history):
        began = time.perf_counter()
        for path, bodies in (("/v1/traces", step.traces), ("/v1/logs", step.logs)):
            for body in bodies:
                _send(connection, path, body)
        duration += time.perf_counter() - began
        if number + 1 in marks:
            memory.append(process.memory_info().rss)
    return memory, duration


def _send_large_trace(connection: http.client.HTTPConnection, steps: int) -> str:
    """Send a step after those of the history, and return the path of its page.

    It is received before the history, so that other pages do not show it.
    """
    for body in admin_history.large_step(steps, start_ns=time.time_ns()).traces:
        _send(connection, "/v1/traces", body)
    [trace] = json.loads(_ask(connection, "/api/v1/traces"))["traces"]
    return f"/trace?id={trace['trace_id']}"


def _send(connection: http.client.HTTPConnection, path: str, body: bytes) -> None:
    connection.request("POST", path, body, {"Content-Type": "application/x-protobuf"})
    answer = connection.getresponse()
    text = answer.read()
    if answer.status != 200 or text:
        raise RuntimeError(f"{path}: {answer.status} {text[:200]!r}")


def _paths(connection: http.client.HTTPConnection, steps: int) -> list[str]:
    """Return the paths of every page and answer, with ids that exist."""
    listed = json.loads(_ask(connection, "/api/v1/traces?limit=50"))["traces"]
    trace, other = listed[10]["trace_id"], listed[11]["trace_id"]
    partition = urllib.parse.quote(PARTITION)
    sample = urllib.parse.quote(admin_history.sample_id(steps - 20, 1))
    run, other_run = map(urllib.parse.quote, (admin_history.RUN, admin_history.OTHER_RUN))
    return [
        "/",
        f"/partition?id={partition}",
        "/samples?q=prompt-0001",
        f"/sample?id={sample}",
        "/runs",
        "/run",
        f"/runs/compare?run={run}&run={other_run}",
        "/samples",
        f"/samples?run={run}&step={steps - 20}&sort=reward&order=ascending",
        f"/samples?run={run}&state=dropped",  # no sample matches
        f"/samples?run={run}&tagged=source%3Dmath",  # no sample matches
        "/samples?sort=step",
        f"/group?run={run}&group=prompt-{steps - 20:06d}-000",
        "/engines",
        "/alerts",
        "/traces",
        f"/trace?id={trace}",
        f"/compare?a={trace}&b={other}",
        "/staleness",
        "/audit",
        "/api/v1/status",
        "/api/v1/partitions",
        f"/api/v1/partition?id={partition}",
        f"/api/v1/partition/matrix?id={partition}&windows=120",
        f"/api/v1/partition/samples?id={partition}&start=50000&limit=100",
        f"/api/v1/partition/claims?id={partition}",
        "/api/v1/samples?q=prompt-0001",
        f"/api/v1/sample?id={sample}",
        "/api/v1/why",
        f"/api/v1/staleness?run={run}",
        "/api/v1/runs",
        f"/api/v1/runs/curves?run={run}&name=rl.reward.mean&name=rl.loss",
        f"/api/v1/samples/facts?run={run}",
        "/api/v1/alerts",
        "/api/v1/traces?limit=50",
        f"/api/v1/traces?run={run}&min_s=1&limit=50",
        f"/api/v1/trace?id={trace}",
        f"/api/v1/trace/compare?a={trace}&b={other}",
        "/api/v1/series",
    ]


def _ask(connection: http.client.HTTPConnection, path: str) -> bytes:
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"{path}: {answer.status} {body[:200]!r}")
    return body
