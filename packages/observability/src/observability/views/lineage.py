"""The lineage of one sample from put to clear, derived from its lifecycle events."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from operator import eq

from observability.records import Event, Process, Records, Span
from observability.views import attributes
from observability.views.arrivals import clock_shifts
from observability.views.clocks import align_event, clock_offsets
from observability.views.distinct import distinct_events, timed_events
from observability.views.printable import join_printable, printable
from observability.views.steps import root_of, stages_of
from observability.views.tree import Tree

_EVENT_ORDER = (
    "put",
    "claimed",
    "read",
    "trained",
    "acknowledged",
    "released",
    "dropped",
    "cleared",
)
"""Order of events with the same time."""

_MAX_SUGGESTIONS = 5


class SampleNotFound(LookupError):
    """An error: no lifecycle event names the sample.

    Attributes:
        sample_id: the requested id.
        suggestions: up to five ids that share a prefix with the requested id, the longest prefix
            first.
    """

    def __init__(self, sample_id: str, suggestions: Iterable[str]) -> None:
        self.sample_id = sample_id
        self.suggestions = tuple(suggestions)
        hint = f"; similar ids: {join_printable(self.suggestions)}"
        super().__init__(
            f"no event names the sample '{printable(sample_id)}'{hint if self.suggestions else ''}"
        )


@dataclass(frozen=True)
class LineageEvent:
    """One event in the lineage of a sample.

    Attributes:
        name: name of the event, for example ``put``; see docs/telemetry.md.
        time_ns: nanoseconds since 1970 by the clock of its process, corrected within its trace.
        seconds: seconds since the sample's first event, corrected for differences of clocks.
        process: the process that recorded it.
        partition: partition of the sample.
        step: ``rl.step``; None if not reported.
        stage: name of the step's stage during which it was emitted; empty if unknown.
        weight_version: ``rl.weight_version``; None if not reported.
        task: task that claimed, acknowledged, released or trained the sample; else empty.
        fields: fields named by the event, sorted.
        n_bytes: bytes of the batch divided by its samples; None if not reported.
        batch: number of samples in the batch of the operation.
        detail: further details as text, for example the reason of a drop; else empty.
        whole_partition: whether the event cleared the entire partition, not this sample by id.
        run_id: ``rl.run_id``; empty if not reported.
        trace_id: trace of the span during which it was emitted; empty if there was none.
        span_id: id of that span; empty if there was none.
    """

    name: str
    time_ns: int
    seconds: float
    process: Process
    partition: str
    step: int | None = None
    stage: str = ""
    weight_version: int | None = None
    task: str = ""
    fields: tuple[str, ...] = ()
    n_bytes: float | None = None
    batch: int = 0
    detail: str = ""
    whole_partition: bool = False
    run_id: str = ""
    trace_id: str = ""
    span_id: str = ""


def runs_of_sample(sample_id: str, records: Records) -> list[str]:
    """Return the ids of the runs whose events name a sample, newest event first.

    The id is empty for events without a run.
    """
    last_ns: dict[str, int] = {}
    for event in timed_events(records.events):
        if sample_id in event.sample_ids:
            run_id, time_ns = _run_id(event), event.received_ns or event.time_ns
            last_ns[run_id] = max(time_ns, last_ns.get(run_id, time_ns))
    return sorted(last_ns, key=lambda run_id: -last_ns[run_id])


def lineage_of(
    sample_id: str, records: Records, *, run_id: str | None = None
) -> list[LineageEvent]:
    """Return the events of a sample in the order in which they happened.

    A clear of an entire partition is in the lineage of each sample that the partition held. If a
    sample id occurs in several partitions, the lineage has the events of all of them. But it has
    events of one run only: another run may use the same sample ids.

    Differences of clocks are corrected in two steps. First, event times are corrected within the
    traces whose events name the sample, as in `Step`. If clocks still differ by more than the
    delay of an export, events are ordered with the help of their times of receipt (see
    `observability.views.arrivals`). This second step does not change `LineageEvent.time_ns`.

    Args:
        sample_id: id of the sample.
        records: records of one or more runs.
        run_id: id of the run, empty for events without a run; None is the first of
            `runs_of_sample`.

    Raises:
        SampleNotFound: no event of the run names the sample.
    """
    if run_id is None:
        run_id = next(iter(runs_of_sample(sample_id, records)), "")
    events = [
        event
        for event in timed_events(records.events)
        if _may_concern(event, sample_id) and _run_id(event) == run_id
    ]
    # Build trees only of traces whose events name the sample. Clears of entire partitions name no
    # sample, and every step may have one.
    trees = _trees(records, {event.trace_id for event in events if event.sample_ids})
    offsets = {trace_id: clock_offsets(tree, root_of(tree)) for trace_id, tree in trees.items()}
    events = [align_event(event, offsets.get(event.trace_id, {})) for event in events]

    def clock(event: Event) -> Hashable:
        # Events of one host with different corrections count as events of different clocks.
        host = event.process.host
        return host or event.process, offsets.get(event.trace_id, {}).get(host, 0)

    shifts = clock_shifts((clock(event), event.time_ns, event.received_ns) for event in events)

    def shifted_ns(event: Event) -> int:
        return event.time_ns + shifts.get(clock(event), 0)

    events.sort(key=lambda event: (shifted_ns(event), _rank(event)))
    lineage = list(_without_other_clears(distinct_events(events)))
    if not lineage:
        raise SampleNotFound(sample_id, _similar_ids(sample_id, records.events))
    # The stage of a clear of the partition needs the tree of its trace, too.
    trees |= _trees(records, {event.trace_id for event in lineage} - trees.keys())
    stages = {trace_id: stages_of(tree, root_of(tree)) for trace_id, tree in trees.items()}
    first_ns = shifted_ns(lineage[0])
    return [
        _lineage_event(
            event,
            (shifted_ns(event) - first_ns) / 1e9,
            stages.get(event.trace_id, {}).get(event.span_id),
        )
        for event in lineage
    ]


def _may_concern(event: Event, sample_id: str) -> bool:
    return sample_id in event.sample_ids or _clears_partition(event)


def _run_id(event: Event) -> str:
    return attributes.text(event.attributes, "rl.run_id")


def _clears_partition(event: Event) -> bool:
    return event.name == "cleared" and not event.sample_ids


def _without_other_clears(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events; skip a partition clear if the sample was not in that partition then.

    Args:
        events: events that name the sample, and clears of any partition, in order.
    """
    # Pairs of (run, partition): `holding` contains the sample now; `seen` occurred in an earlier
    # event.
    holding: set[tuple[str, str]] = set()
    seen: set[tuple[str, str]] = set()
    for event in events:
        key = attributes.run_and_partition(event.attributes)
        if _clears_partition(event):
            if key not in holding:
                continue
            holding.discard(key)
        elif event.name == "cleared":
            holding.discard(key)
        elif event.name == "put" or key not in seen:
            # A put adds the sample. The sample's first event in a partition shows that it is there,
            # though its put was not received. A later event does not: it may come after a clear.
            holding.add(key)
        seen.add(key)
        yield event


def _lineage_event(event: Event, seconds: float, stage: Span | None) -> LineageEvent:
    values = event.attributes
    batch = attributes.count(values, "dataplane.samples") or len(event.sample_ids)
    n_bytes = attributes.integer(values, "dataplane.bytes")
    return LineageEvent(
        name=event.name,
        time_ns=event.time_ns,
        seconds=seconds,
        process=event.process,
        partition=attributes.text(values, "dataplane.partition"),
        step=attributes.integer(values, "rl.step"),
        stage=stage.name if stage else "",
        weight_version=attributes.integer(values, "rl.weight_version"),
        task=attributes.text(values, "dataplane.task"),
        fields=tuple(sorted(attributes.names(values, "dataplane.fields"))),
        n_bytes=None if n_bytes is None or not batch else n_bytes / batch,
        batch=batch,
        detail=_detail(event),
        whole_partition=_clears_partition(event),
        run_id=_run_id(event),
        trace_id=event.trace_id,
        span_id=event.span_id,
    )


def _detail(event: Event) -> str:
    values = event.attributes
    parts = [attributes.text(values, "dataplane.reason"), attributes.text(values, "error.type")]
    wait_s = values.get("dataplane.wait_s")
    if isinstance(wait_s, int | float):
        parts.append(f"blocked {wait_s:.3f} s")
    if _clears_partition(event):
        parts.append("entire partition")
    return ", ".join(part for part in parts if part)


def _trees(records: Records, trace_ids: set[str]) -> dict[str, Tree]:
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in records.spans:
        if span.trace_id in trace_ids:
            spans[span.trace_id].append(span)
    return {trace_id: Tree(trace_spans) for trace_id, trace_spans in spans.items()}


def _rank(event: Event) -> int:
    """Return the position of an event among events with the same time."""
    return _EVENT_ORDER.index(event.name) if event.name in _EVENT_ORDER else -1


def _similar_ids(sample_id: str, events: Iterable[Event]) -> list[str]:
    """Return `SampleNotFound.suggestions` from the ids in events."""

    def prefix_length(other: str) -> int:
        return sum(takewhile(bool, map(eq, sample_id, other)))

    ids = {other for event in events for other in event.sample_ids}
    similar = (other for other in ids if prefix_length(other))
    return heapq.nsmallest(
        _MAX_SUGGESTIONS, similar, key=lambda other: (-prefix_length(other), other)
    )
