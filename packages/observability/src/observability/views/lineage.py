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
from observability.views.clocks import clocks_ahead, moved_event
from observability.views.distinct import distinct_events, timed_events
from observability.views.printable import listed, printable
from observability.views.steps import root_of, stage_of
from observability.views.tree import Tree

# Order of events with the same time.
_ORDER = ("put", "claimed", "read", "trained", "acknowledged", "released", "dropped", "cleared")

_SUGGESTED = 5


class SampleNotFound(LookupError):
    """A sample that no lifecycle event names.

    Attributes:
        sample_id: the requested id.
        suggestions: up to five known ids with a common prefix, the longest prefix first.
    """

    def __init__(self, sample_id: str, suggestions: Iterable[str]) -> None:
        self.sample_id = sample_id
        self.suggestions = tuple(suggestions)
        hint = f"; similar ids: {listed(self.suggestions)}"
        super().__init__(
            f"no event names the sample '{printable(sample_id)}'{hint if self.suggestions else ''}"
        )


@dataclass(frozen=True)
class Hop:
    """One event in the lineage of a sample.

    Attributes:
        name: name of the event, for example ``put``; see docs/telemetry.md.
        time_ns: nanoseconds since 1970 by the clock of its process, corrected within its trace.
        seconds: seconds since the sample's first event, on one clock.
        process: the process that recorded it.
        partition: partition of the sample.
        step: ``rl.step``; None if not reported.
        stage: name of the step's stage during which it happened; empty if unknown.
        weight_version: ``rl.weight_version``; None if not reported.
        task: task that claimed, acknowledged, released or trained; else empty.
        fields: fields named by the event, sorted.
        n_bytes: bytes of the batch divided by its samples; None if not reported.
        batch: number of samples in the batch.
        detail: further details: the reason of a drop, the wait of a claim.
        whole_partition: whether the entire partition was cleared, not this sample by id.
        run_id: ``rl.run_id``; empty if not reported.
        trace_id: trace of the span in which it happened; empty if there is none.
        span_id: that span; empty if there is none.
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


def life_of(sample_id: str, records: Records) -> list[Hop]:
    """Return the events of a sample in the order in which they happened.

    Events of hosts whose clocks are wrong by more than the delay of an export are ordered by their
    receipt (see `observability.views.arrivals`); this does not change `Hop.time_ns`.

    A clear of an entire partition is one hop of each sample in it. A sample id in two partitions
    has one lineage. If clocks of hosts disagree, event times are corrected within the traces that
    name the sample, as in `Step`.

    Raises:
        SampleNotFound: no event names the sample.
    """
    events = [event for event in timed_events(records.events) if _may_concern(event, sample_id)]
    # Read only traces whose events name samples. A clear of an entire partition names none, and
    # every step may have one.
    trees = _trees(records, {event.trace_id for event in events if event.sample_ids})
    ahead = {trace_id: clocks_ahead(tree, root_of(tree)) for trace_id, tree in trees.items()}
    events = [moved_event(event, ahead.get(event.trace_id, {})) for event in events]

    def clock(event: Event) -> Hashable:
        host = event.process.host
        return host or event.process, ahead.get(event.trace_id, {}).get(host, 0)

    shifts = clock_shifts((clock(event), event.time_ns, event.received_ns) for event in events)

    def order_ns(event: Event) -> int:
        return event.time_ns + shifts.get(clock(event), 0)

    events.sort(key=lambda event: (order_ns(event), _rank(event)))
    chosen = list(_of_sample(sample_id, distinct_events(events)))
    if not chosen:
        raise SampleNotFound(sample_id, _alike(sample_id, records.events))
    trees |= _trees(records, {event.trace_id for event in chosen} - trees.keys())
    first_ns = order_ns(chosen[0])
    return [_hop(event, (order_ns(event) - first_ns) / 1e9, trees) for event in chosen]


def _may_concern(event: Event, sample_id: str) -> bool:
    return sample_id in event.sample_ids or _clears_partition(event)


def _clears_partition(event: Event) -> bool:
    return event.name == "cleared" and not event.sample_ids


def _of_sample(sample_id: str, events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events, except clears of partitions that do not hold the sample."""
    present: set[tuple[str, str]] = set()
    seen: set[tuple[str, str]] = set()
    for event in events:
        facts = event.attributes
        place = attributes.text(facts, "rl.run_id"), attributes.text(facts, "dataplane.partition")
        if _clears_partition(event):
            if place not in present:
                continue
            present.discard(place)
        elif event.name == "cleared":
            present.discard(place)
        elif event.name == "put" or place not in seen:
            # Events reported after a clear do not bring a sample back; only a put does.
            present.add(place)
        seen.add(place)
        yield event


def _hop(event: Event, seconds: float, trees: dict[str, Tree]) -> Hop:
    facts = event.attributes
    batch = attributes.count(facts, "dataplane.samples") or len(event.sample_ids)
    n_bytes = attributes.integer(facts, "dataplane.bytes")
    return Hop(
        name=event.name,
        time_ns=event.time_ns,
        seconds=seconds,
        process=event.process,
        partition=attributes.text(facts, "dataplane.partition"),
        step=attributes.integer(facts, "rl.step"),
        stage=_stage(event, trees),
        weight_version=attributes.integer(facts, "rl.weight_version"),
        task=attributes.text(facts, "dataplane.task"),
        fields=tuple(sorted(attributes.names(facts, "dataplane.fields"))),
        n_bytes=None if n_bytes is None or not batch else n_bytes / batch,
        batch=batch,
        detail=_detail(event),
        whole_partition=_clears_partition(event),
        run_id=attributes.text(facts, "rl.run_id"),
        trace_id=event.trace_id,
        span_id=event.span_id,
    )


def _detail(event: Event) -> str:
    facts = event.attributes
    parts = [attributes.text(facts, "dataplane.reason"), attributes.text(facts, "error.type")]
    wait_s = facts.get("dataplane.wait_s")
    if isinstance(wait_s, int | float):
        parts.append(f"blocked {wait_s:.3f} s")
    if _clears_partition(event):
        parts.append("entire partition")
    return ", ".join(part for part in parts if part)


def _stage(event: Event, trees: dict[str, Tree]) -> str:
    tree = trees.get(event.trace_id)
    if tree is None:
        return ""
    stage = stage_of(tree, root_of(tree), event.span_id)
    return stage.name if stage else ""


def _trees(records: Records, trace_ids: set[str]) -> dict[str, Tree]:
    spans: dict[str, list[Span]] = defaultdict(list)
    for span in records.spans:
        if span.trace_id in trace_ids:
            spans[span.trace_id].append(span)
    return {trace_id: Tree(trace_spans) for trace_id, trace_spans in spans.items()}


def _rank(event: Event) -> int:
    return _ORDER.index(event.name) if event.name in _ORDER else -1


def _alike(sample_id: str, events: Iterable[Event]) -> list[str]:
    def shared(other: str) -> int:
        return sum(takewhile(bool, map(eq, sample_id, other)))

    known = {other for event in events for other in event.sample_ids}
    alike = (other for other in known if shared(other))
    return heapq.nsmallest(_SUGGESTED, alike, key=lambda other: (-shared(other), other))
