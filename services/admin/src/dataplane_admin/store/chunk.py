"""Chunks: the spans of one trace in one request, and how they update the row of the trace.

A fact about a trace is collected in `Chunk.add`, merged in `Chunk.merged`, and stored by
`tables.TraceModel` under the same name; `models.TraceFacts` has the columns that are shown.

`Chunk.add` is part of the service's hot path, see `ingest.spans`. So attributes are read only until
run and step are found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any  # Any: values of rows

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from dataplane_admin.store.texts import lines_of, storable, texts_in
from observability.records import UNNAMED

MAX_PROCESSES = 1024
"""Maximum number of processes counted in a trace."""

MAX_INT = (1 << 63) - 1
"""Largest integer that a database holds."""

MAX_SERVICES = 16
"""Maximum number of services named in a trace."""

NO_TRACE = bytes(16)
_NO_PARENT = (b"", bytes(8))
RUN_ID, STEP = "rl.run_id", "rl.step"
_FAILED = Status.STATUS_CODE_ERROR
_DIGEST = 8


def span_key(span_id: bytes) -> int:
    """Return a span id as an integer that a database holds."""
    return int.from_bytes(span_id, "big", signed=True)


def span_state(times: int, failed: bool) -> int:
    """Return the state of a span: how many of start and end are known, and whether it failed.

    Of two copies of a span, the copy with more times counts. Bits, highest first: two for the
    number of times, one for failed.
    """
    return times << 1 | failed


@dataclass(slots=True)
class Chunk:
    """The spans of one trace in one request.

    Attributes:
        trace_id: 16 bytes.
        digest: digest that only equal chunks share, such as the chunks of a retried request.
        blob: compressed OTLP TracesData with the spans; empty if there are none.
        spans: number of spans; a repeated span counts each time.
        states: `span_key` of each span to its `span_state`.
        rejected: spans rejected as invalid or beyond limits.
        run_id: ``rl.run_id``, empty if unknown.
        step: ``rl.step``, None if unknown.
        name: name of the root if present, else of the first span.
        named_ns: start of the span that gave the name.
        has_root: whether the finished root is present.
        start_ns: start of the earliest span, nanoseconds since 1970; 0 if no time was reported.
        end_ns: latest end, as ``start_ns``.
        processes: eight bytes of each process.
        services: ``service.name`` of each process that has one.
        links: other traces that its spans link to.
    """

    trace_id: bytes
    digest: bytes = b""
    blob: bytes = b""
    spans: int = 0
    states: dict[int, int] = field(default_factory=dict)
    rejected: int = 0
    run_id: str = ""
    step: int | None = None
    name: str = ""
    named_ns: int = 0
    has_root: bool = False
    start_ns: int = 0
    end_ns: int = 0
    processes: set[bytes] = field(default_factory=set)
    services: set[str] = field(default_factory=set)
    links: set[bytes] = field(default_factory=set)

    def add(self, span: Span, run_id: str) -> None:
        """Add a span; ``run_id`` is the one of its resource."""
        # A time of 0 is unset; then use the other time.
        start, end = span.start_time_unix_nano, span.end_time_unix_nano
        start_ns = start or end
        is_root = end > 0 and span.parent_span_id in _NO_PARENT
        # Comparisons are faster than `min`, `max` and tuples, which would dominate here.
        if (
            not self.spans
            or is_root > self.has_root
            or (is_root == self.has_root and start_ns < self.named_ns)
        ):
            self.name, self.named_ns = span.name or UNNAMED, start_ns
        self.spans += 1
        if is_root:
            self.has_root = True
        if start_ns:
            if start_ns < self.start_ns or not self.start_ns:
                self.start_ns = start_ns
            end_ns = end or start
            if end_ns > self.end_ns:
                self.end_ns = end_ns
        failed = span.HasField("status") and span.status.code == _FAILED
        state = span_state((start > 0) + (end > 0), failed)
        key = span_key(span.span_id)
        known = self.states.get(key)
        if known is None or known >> 1 < state >> 1:
            self.states[key] = state
        if not self.run_id or self.step is None:
            named, step = run_and_step(span.attributes)
            self.run_id = self.run_id or named or run_id
            self.step = step if self.step is None else self.step
        if span.links:  # cheaper than starting an iteration
            for link in span.links:
                if len(link.trace_id) == 16 and link.trace_id != NO_TRACE:
                    self.links.add(link.trace_id)

    def row(self) -> dict[str, Any]:
        """Return the row of a new trace, without its counts."""
        return {
            "trace_id": self.trace_id,
            "run_id": storable(self.run_id),
            "step": self.step,
            "name": storable(self.name),
            "start_ns": self.start_ns,
            "end_ns": self.end_ns,
            "has_root": self.has_root,
            "processes": min(len(self.processes), MAX_PROCESSES),
            "process_digests": b"".join(sorted(self.processes)[:MAX_PROCESSES]),
            "service_names": lines_of(self.services, MAX_SERVICES),
            "rejected": self.rejected,
        }

    def merged(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the stored row of the trace merged with this chunk, without its counts."""
        new = self.row()
        processes = digests_in(row["process_digests"]) | self.processes
        processes = set(sorted(processes)[:MAX_PROCESSES])
        earlier = 0 < self.start_ns < row["start_ns"] or not row["start_ns"]
        is_first = not row["spans"] or (earlier and self.has_root == row["has_root"])
        renames = self.spans and (is_first or (self.has_root and not row["has_root"]))
        return new | {
            "run_id": row["run_id"] or new["run_id"],
            "step": new["step"] if row["step"] is None else row["step"],
            "name": new["name"] if renames else row["name"],
            "start_ns": min(filter(None, (row["start_ns"], self.start_ns)), default=0),
            "end_ns": max(row["end_ns"], self.end_ns),
            "has_root": row["has_root"] or self.has_root,
            "processes": len(processes),
            "process_digests": b"".join(sorted(processes)),
            "service_names": lines_of(
                [*texts_in(row["service_names"]), *self.services], MAX_SERVICES
            ),
            "rejected": row["rejected"] + self.rejected,
        }


def digests_in(packed: bytes) -> set[bytes]:
    """Return the digest of each process in ``process_digests`` of a trace."""
    return {packed[at : at + _DIGEST] for at in range(0, len(packed), _DIGEST)}


def service_of(pairs: Iterable[KeyValue]) -> str:
    """Return ``service.name`` of a resource, empty if unknown; the last of equal keys counts."""
    names = [pair.value.string_value for pair in pairs if pair.key == "service.name"]
    return names[-1] if names else ""


def run_and_step(pairs: Iterable[KeyValue]) -> tuple[str, int | None]:
    """Return ``rl.run_id``, empty if unknown, and ``rl.step``; the last of equal keys counts."""
    run_id, step = "", None
    for pair in pairs:
        key = pair.key
        if key == RUN_ID and pair.value.WhichOneof("value") is not None:
            run_id = pair.value.string_value
        elif key == STEP and pair.value.WhichOneof("value") is not None:
            step = _integer(pair.value)
    return run_id, step


def _integer(value: AnyValue) -> int | None:
    """Return an integer, also from decimal text, since baggage is text; else None."""
    kind = value.WhichOneof("value")
    if kind == "int_value":
        return value.int_value
    if kind == "string_value":
        text = value.string_value
        if len(text) < 20 and text.isascii() and text.isdigit() and int(text) <= MAX_INT:
            return int(text)
    return None
