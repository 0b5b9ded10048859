"""Steps as a Chrome trace, the JSON that ui.perfetto.dev and chrome://tracing open.

The format is Google's "Trace Event Format". Each process of the run is a process of the trace. Its
spans are on one thread, as far as they are disjoint or nested. Spans that overlap are on further
threads.

This module calls an event of the trace an entry, and the entry of a span a slice. Entries have the
keys of the format: ``ph`` (phase) is the kind of the entry, ``ts`` is its time, and ``pid`` and
``tid`` are its process and thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any  # Any: JSON values

from observability.records import Process, Span
from observability.views import attributes
from observability.views.files import write_atomically
from observability.views.lanes import SpanKey, assign_threads, enclosing_spans, key_of
from observability.views.printable import printable
from observability.views.steps import Step

Entry = dict[str, Any]


def write_perfetto(steps: Iterable[Step], path: str | Path) -> None:
    """Write steps as a Chrome trace, atomically.

    Raises:
        OSError: the file cannot be written.
    """
    text = json.dumps(chrome_trace(list(steps)), allow_nan=False, separators=(",", ":"))
    write_atomically(Path(path), text.encode("utf-8"))


def chrome_trace(steps: Sequence[Step]) -> dict[str, Any]:
    """Return steps as a Chrome trace in JSON values.

    Times are microseconds since the start of the first span, with fractions for nanoseconds;
    ``otherData.begin_ns`` is that start in nanoseconds since 1970. Each span is a complete event
    (phase ``X``). Arrows (phases ``s`` and ``f``) go from a put to each span that links to it, and
    from a parent to a child in another process.
    """
    begin_ns = min((span.start_ns for step in steps for span in step.spans), default=0)
    processes = dict.fromkeys(process for step in steps for process in step.processes)
    pids = {process: pid for pid, process in enumerate(processes, 1)}
    trees = {step.trace_id: step.tree for step in steps}
    by_process: dict[Process, list[Span]] = {process: [] for process in processes}
    enclosing: dict[SpanKey, SpanKey] = {}
    for tree in trees.values():
        enclosing |= enclosing_spans(tree)
        for span, is_before in tree.walk():
            if is_before:
                by_process[span.process].append(span)
    slices: dict[SpanKey, Entry] = {}
    thread_counts: dict[Process, int] = {}
    for process, spans in by_process.items():
        threads = assign_threads(spans, enclosing)
        thread_counts[process] = 1 + max(threads.values(), default=0)
        for span in spans:
            slices[key_of(span)] = _slice(span, begin_ns, pids[process], threads[key_of(span)])
    entries = [*_names(steps, pids, thread_counts), *slices.values(), *_arrows(steps, slices)]
    return {
        "traceEvents": entries,
        "displayTimeUnit": "ms",
        "otherData": {"begin_ns": str(begin_ns)},
    }


def _names(
    steps: Sequence[Step], pids: Mapping[Process, int], thread_counts: Mapping[Process, int]
) -> Iterator[Entry]:
    """Yield the entries that name processes and threads."""
    labels = {process: label for step in steps for process, label in step.labels.items()}
    for process, pid in pids.items():
        for name, args in (
            ("process_name", {"name": labels[process]}),
            ("process_labels", {"labels": printable(process.location)}),
            ("process_sort_index", {"sort_index": pid}),
        ):
            yield {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": args}
        for tid in range(thread_counts[process]):
            thread_name = "spans" if tid == 0 else f"overlapping spans {tid}"
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": pid,
                "tid": tid,
                "args": {"name": thread_name},
            }


def _slice(span: Span, begin_ns: int, pid: int, tid: int) -> Entry:
    args = {printable(name): _json(value) for name, value in span.attributes.items()}
    args |= {"trace_id": printable(span.trace_id), "span_id": printable(span.span_id)}
    if span.outcome != "unset":
        args["outcome"] = span.outcome
    if span.message:
        args["message"] = printable(span.message)
    return {
        "ph": "X",
        "name": printable(span.name),
        "cat": printable(attributes.bucket(span) or "groups"),
        "ts": _microseconds(span.start_ns - begin_ns),
        "dur": _microseconds(max(0, span.end_ns - span.start_ns)),
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _arrows(steps: Sequence[Step], slices: Mapping[SpanKey, Entry]) -> Iterator[Entry]:
    """Yield two entries for each arrow: one for its start, one for its end."""
    arrow_id = 0
    for step in steps:
        for span in step.spans:
            origins = [("data", (link.trace_id, link.span_id)) for link in span.links]
            parent = step.tree.get(span.parent_id) if span.parent_id else None
            if parent is not None and parent.process != span.process:
                origins.append(("call", key_of(parent)))
            for kind, origin in origins:
                if origin not in slices:
                    continue
                arrow_id += 1
                # A viewer attaches an entry to the innermost slice at its time. So the time is the
                # start of the intended slice, before any nested slice begins.
                for phase, end in (
                    ("s", slices[origin]),
                    ("f", slices[key_of(span)]),
                ):
                    arrow = {key: end[key] for key in ("ts", "pid", "tid")}
                    arrow |= {"ph": phase, "id": arrow_id, "name": kind, "cat": kind}
                    # "bp": "e" attaches the end to the slice at its time, not to the next slice.
                    yield arrow if phase == "s" else {**arrow, "bp": "e"}


def _microseconds(nanoseconds: int) -> float:
    # Floats are exact to the nanosecond for weeks after the first span. For times since 1970 they
    # are not.
    return nanoseconds / 1000


def _json(value: object) -> object:
    """Return an attribute's value as a JSON value with printable text."""
    if isinstance(value, bool | int) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if isinstance(value, Mapping):
        return {printable(name): _json(item) for name, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    return printable(value)
