"""Steps as a Chrome trace, the JSON that ui.perfetto.dev and chrome://tracing open.

The format is Google's "Trace Event Format". Each process of the run is a process there. Its spans
are on one thread; spans that overlap without nesting need further threads, because a thread holds
only nested slices.
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
from observability.views.lanes import Key, key_of, threads
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
    """Return the trace as JSON values.

    Times are microseconds, with fractions to the nanosecond, since the start of the first step;
    ``otherData.begin_ns`` is that start in nanoseconds since 1970. Spans are complete events
    (``X``). Arrows (``s``, ``f``) go from a put to each span that links to it, and from a parent to
    a child in another process.
    """
    begin = min((span.start_ns for step in steps for span in step.spans), default=0)
    processes = dict.fromkeys(process for step in steps for process in step.processes)
    places = {process: place for place, process in enumerate(processes, 1)}
    trees = {step.trace_id: step.tree for step in steps}
    by_process: dict[Process, list[Span]] = {process: [] for process in processes}
    for tree in trees.values():
        for span in tree.spans:
            by_process[span.process].append(span)
    slices: dict[Key, Entry] = {}
    used: dict[Process, int] = {}
    for process, spans in by_process.items():
        placed = threads(spans, lambda span: trees[span.trace_id].line(span.span_id))
        used[process] = 1 + max(placed.values(), default=0)
        for span in spans:
            slices[key_of(span)] = _slice(span, begin, places[process], placed[key_of(span)])
    entries = [*_names(steps, places, used), *slices.values(), *_arrows(steps, slices)]
    return {
        "traceEvents": entries,
        "displayTimeUnit": "ms",
        "otherData": {"begin_ns": str(begin)},
    }


def _names(
    steps: Sequence[Step], places: Mapping[Process, int], used: Mapping[Process, int]
) -> Iterator[Entry]:
    labels = {process: label for step in steps for process, label in step.labels.items()}
    for process, pid in places.items():
        for name, value in (
            ("process_name", {"name": labels[process]}),
            ("process_labels", {"labels": printable(process.location)}),
            ("process_sort_index", {"sort_index": pid}),
        ):
            yield {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": value}
        for tid in range(used[process]):
            thread_name = "spans" if tid == 0 else f"overlapping spans {tid}"
            yield {
                "ph": "M",
                "name": "thread_name",
                "pid": pid,
                "tid": tid,
                "args": {"name": thread_name},
            }


def _slice(span: Span, begin: int, pid: int, tid: int) -> Entry:
    facts = {printable(name): _json(value) for name, value in span.attributes.items()}
    facts |= {"trace_id": printable(span.trace_id), "span_id": printable(span.span_id)}
    if span.outcome != "unset":
        facts["outcome"] = span.outcome
    if span.message:
        facts["message"] = printable(span.message)
    return {
        "ph": "X",
        "name": printable(span.name),
        "cat": printable(attributes.bucket(span) or "groups"),
        "ts": _microseconds(span.start_ns - begin),
        "dur": _microseconds(max(0, span.end_ns - span.start_ns)),
        "pid": pid,
        "tid": tid,
        "args": facts,
    }


def _arrows(steps: Sequence[Step], slices: Mapping[Key, Entry]) -> Iterator[Entry]:
    number = 0
    for step in steps:
        for span in step.spans:
            ends = [("data", (link.trace_id, link.span_id)) for link in span.links]
            parent = step.tree.get(span.parent_id) if span.parent_id else None
            if parent is not None and parent.process != span.process:
                ends.append(("call", key_of(parent)))
            for kind, begin in ends:
                if begin not in slices:
                    continue
                number += 1
                # Attach each end to the start of its slice, where no nested slice has begun yet.
                for phase, place in (
                    ("s", slices[begin]),
                    ("f", slices[key_of(span)]),
                ):
                    arrow = {key: place[key] for key in ("ts", "pid", "tid")}
                    arrow |= {"ph": phase, "id": number, "name": kind, "cat": kind}
                    yield arrow if phase == "s" else {**arrow, "bp": "e"}


def _microseconds(nanoseconds: int) -> float:
    # As a float, a time is exact to the nanosecond for weeks after the first span. A time since
    # 1970 would not be.
    return nanoseconds / 1000


def _json(value: object) -> object:
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
