"""Rate at which the admin service ingests spans, with its server on one core.

The same requests of 100 realistic spans go to the service's OTLP routes, which commit them to
SQLite before they answer, and to `observability.receiver.Receiver`, which appends them to a file as
a collector's file exporter does. The rounds alternate between them. Each server runs in a separate
process pinned to one core, the client on another. Lost spans are counted from the data on disk
after the last answer. Imports internals: the service has only its ingest routes, and the spans in
both sides' files are counted.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from integration.benchmarks.admin_history import add_attributes
from integration.benchmarks.admin_service import run_app
from integration.benchmarks.results_file import Entry
from integration.benchmarks.spawned import Spawned, spawned
from integration.benchmarks.summary import Summary
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

SPANS = 100
"""Number of spans in a request."""

INGEST_HEADINGS = ["server, one core", "spans/s, p50", "IQR", "µs/span", "lost", "rounds"]

_SERVERS = ("admin into SQLite", "receiver into a file")
_CONNECTIONS = 4
_REQUESTS_A_TRACE = 4
_QUICK = (10, 40)
_FULL = (15, 600)
SEED = 20_262


@dataclass(frozen=True)
class IngestResult:
    """Result of the ingest benchmark.

    Attributes:
        rates: server to the spans per second of each round.
        lost: server to the number of spans that were answered with 200 and are not on disk.
        requests: number of requests in a round.
    """

    rates: dict[str, list[float]]
    lost: dict[str, int]
    requests: int

    def rows(self) -> list[list[str]]:
        """Return rows for a table with `INGEST_HEADINGS`."""
        rows = []
        for server, rates in self.rates.items():
            rate = Summary.of(rates)
            rows.append(
                [
                    server,
                    f"{rate.value:,.0f}",
                    f"{rate.spread:,.0f}",
                    f"{1e6 / rate.value:.1f}",
                    str(self.lost[server]),
                    str(rate.count),
                ]
            )
        return rows

    def entries(self) -> list[Entry]:
        """Return entries for the file of results."""
        service, plain = (self.rates[server] for server in _SERVERS)
        rate, other = Summary.of(service), Summary.of(plain)
        ratio = Summary.of([a / b for a, b in zip(service, plain, strict=True)])
        return [
            Entry.of("admin.ingest_spans_per_s", rate, "1/s"),
            Entry("admin.ingest_lost", self.lost[_SERVERS[0]], "1", None, 0.0, rate.count),
            Entry.of("admin.ingest_file_spans_per_s", other, "1/s"),
            Entry.of("admin.ingest_of_file", ratio, "x", baseline="receiver writing to a file"),
        ]


@dataclass(frozen=True)
class IngestServers:
    """Servers that ingest spans.

    Attributes:
        folder: folder of their data.
        processes: server to its process.
    """

    folder: Path
    processes: Mapping[str, Spawned]


@contextlib.contextmanager
def ingest_servers() -> Iterator[IngestServers]:
    """Run both servers; they start in the background."""
    core, _ = cores(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory(prefix="bench-ingest-") as folder,
        spawned(_SERVERS[0], _admin, Path(folder), core) as admin,
        spawned(_SERVERS[1], _receiver, Path(folder), core) as receiver,
    ):
        yield IngestServers(Path(folder), dict(zip(_SERVERS, (admin, receiver), strict=True)))


def measure_ingest(servers: IngestServers, *, full: bool) -> IngestResult:
    """Run the rounds, and stop the servers.

    Raises:
        RuntimeError: a server did not start, or did not accept a request.
    """
    rounds, requests = _FULL if full else _QUICK
    rng = random.Random(SEED)
    before = os.sched_getaffinity(0)
    _, other = cores(before)
    rates: dict[str, list[float]] = {server: [] for server in _SERVERS}
    ports: dict[str, int] = {server: servers.processes[server].ready for server in _SERVERS}
    os.sched_setaffinity(0, {other})
    try:
        for number in range(1 + rounds):
            bodies = make_requests(requests if number else requests // 4, rng)
            for server in rng.sample(_SERVERS, len(_SERVERS)):
                duration = send_all(ports[server], bodies)
                if number:  # the first round is a warm-up
                    rates[server].append(len(bodies) * SPANS / duration)
    finally:
        os.sched_setaffinity(0, before)
    for process in servers.processes.values():
        process.stop()
    sent = (requests // 4 + rounds * requests) * SPANS
    lost = {server: sent - _stored(server, servers.folder) for server in _SERVERS}
    return IngestResult(rates, lost, requests)


def make_requests(count: int, rng: random.Random) -> list[bytes]:
    """Return export requests of the processes of a GRPO run.

    A trace is a step and is split over several requests; every span has ten attributes.
    """
    bodies = []
    trace_id = b""
    for number in range(count):
        if number % _REQUESTS_A_TRACE == 0:
            trace_id = rng.randbytes(16)
        data = TracesData()
        resource = data.resource_spans.add()
        rank = number % _REQUESTS_A_TRACE
        facts: dict[str, str | int] = {
            "service.name": "grpo.policy",
            "service.instance.id": str(rank),
            "host.name": "node-17.cluster.local",
            "process.pid": 40_000 + rank,
            "rl.run_id": "qwen-3b-grpo-2026-11-21",
            "telemetry.sdk.language": "python",
        }
        add_attributes(resource.resource.attributes, facts)
        scope = resource.scope_spans.add()
        scope.scope.name = "rl-dataplane"
        start_ns = time.time_ns()
        parent = rng.randbytes(8)
        for place in range(SPANS):
            start_ns += rng.randrange(1_000_000)
            span = scope.spans.add(
                trace_id=trace_id,
                span_id=rng.randbytes(8),
                parent_span_id=parent,
                name=("get train", "forward", "send train", "optimizer_step")[place % 4],
                kind=Span.SPAN_KIND_CLIENT,
                start_time_unix_nano=start_ns,
                end_time_unix_nano=start_ns + rng.randrange(50_000_000),
            )
            facts = {
                "rl.run_id": "qwen-3b-grpo-2026-11-21",
                "rl.step": number // _REQUESTS_A_TRACE,
                "rl.weight_version": number // _REQUESTS_A_TRACE,
                "rl.bucket": "overhead",
                "db.system.name": "dataplane",
                "db.operation.name": "get",
                "db.collection.name": "train",
                "db.operation.batch.size": 512,
                "dataplane.fields": "input_ids,generation_logprobs,advantages,mask",
                "dataplane.bytes": rng.randrange(1 << 24),
            }
            add_attributes(span.attributes, facts)
        bodies.append(data.SerializeToString())
    return bodies


def cores(usable: set[int]) -> tuple[int, int]:
    """Return a core for the servers and one for the client; the same if there is only one."""
    ordered = sorted(usable)
    return ordered[-1], ordered[0]


def send_all(port: int, bodies: Sequence[bytes]) -> float:
    """Send requests over several connections; return the seconds until the last answer."""
    parts = [bodies[first::_CONNECTIONS] for first in range(_CONNECTIONS)]
    start = threading.Barrier(_CONNECTIONS + 1)
    failures: list[str] = []

    def post(part: Sequence[bytes]) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.connect()
        except OSError:
            start.abort()  # the other threads would block on it forever
            raise
        start.wait()
        try:
            for body in part:
                connection.request(
                    "POST", "/v1/traces", body, {"Content-Type": "application/x-protobuf"}
                )
                answer = connection.getresponse()
                text = answer.read()
                if answer.status != 200 or text:
                    failures.append(f"{answer.status} {text[:100]!r}")
        except OSError as error:
            failures.append(repr(error))
        finally:
            connection.close()

    threads = [threading.Thread(target=post, args=(part,), daemon=True) for part in parts]
    for thread in threads:
        thread.start()
    start.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    duration = time.perf_counter() - began
    if failures:
        raise RuntimeError(f"{len(failures)} requests were not fully accepted: {failures[0]}")
    return duration


def _admin(pipe: Connection, folder: Path, core: int) -> None:
    from fastapi import FastAPI

    from dataplane_admin import Limits
    from dataplane_admin.ingest import router
    from dataplane_admin.store import Store

    os.sched_setaffinity(0, {core})
    with Store.open(f"sqlite:///{folder}/admin.sqlite") as store:
        app = FastAPI(openapi_url=None)
        app.include_router(router(store, Limits()))
        run_app(pipe, app)


def _receiver(pipe: Connection, folder: Path, core: int) -> None:
    from observability.receiver import Receiver

    os.sched_setaffinity(0, {core})
    with Receiver(folder / "frames") as receiver:
        pipe.send(receiver.port)
        pipe.recv()


def _stored(server: str, folder: Path) -> int:
    """Count the spans on disk."""
    if server == _SERVERS[0]:
        from sqlalchemy import create_engine, text

        from dataplane_admin.store.compressed import expand

        engine = create_engine(f"sqlite:///{folder}/admin.sqlite")
        with engine.connect() as connection:
            blobs = connection.execute(text("SELECT blob FROM span_chunks"))
            stored = sum(_spans(expand(row[0])) for row in blobs)
        engine.dispose()
        return stored
    from observability.receiver.frames import frames

    return sum(_spans(body) for _, body in frames(folder / "frames" / "traces.otlp"))


def _spans(body: bytes) -> int:
    return sum(
        len(scope.spans)
        for resource in TracesData.FromString(body).resource_spans
        for scope in resource.scope_spans
    )
