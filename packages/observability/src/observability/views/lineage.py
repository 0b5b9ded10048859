"""The life of one sample, from its put to its clear, as its lifecycle events tell it."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from operator import eq

from observability.records import Event, Process, Records, Span
from observability.views import attributes
from observability.views.clocks import clocks_ahead, moved_event
from observability.views.distinct import distinct_events, timed_events
from observability.views.printable import listed, printable
from observability.views.steps import root_of, stage_of
from observability.views.tree import Tree

# What comes first of events that tell the same moment.
_ORDER = ("put", "claimed", "read", "trained", "acknowledged", "released", "dropped", "cleared")

_SUGGESTED = 5


class SampleNotFound(LookupError):
    """No lifecycle event names the sample.

    Attributes:
        sample_id: the id that was asked for.
        suggestions: up to five known ids that begin as it does, the most alike first.
    """

    def __init__(self, sample_id: str, suggestions: Iterable[str]) -> None:
        self.sample_id = sample_id
        self.suggestions = tuple(suggestions)
        hint = f"; ids that begin as it does: {listed(self.suggestions)}"
        super().__init__(
            f"no event names the sample '{printable(sample_id)}'{hint if self.suggestions else ''}"
        )


@dataclass(frozen=True)
class Hop:
    """One thing that happened to a sample.

    Attributes:
        name: the event, ``put`` for example; see docs/telemetry.md.
        time_ns: nanoseconds since 1970.
        seconds: since the sample's first event.
        process: where it happened.
        partition: of the sample.
        step: ``rl.step``, None if not told.
        stage: name of the step's stage during which it happened; empty if not known.
        weight_version: ``rl.weight_version``, None if not told.
        task: of a claim, a settlement or training; else empty.
        fields: those that the event tells, sorted.
        n_bytes: the sample's share of the batch's bytes, evenly spread; None if none are told.
        batch: samples of the whole batch.
        detail: what else the event tells: the reason of a drop, the wait of a claim.
        whole_partition: the whole partition was cleared, not this sample by name.
        run_id: ``rl.run_id``, empty if not told.
        trace_id: of the span in which it happened; empty if there is none.
        span_id: as ``trace_id``.
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
    """What happened to a sample, in the order of the times told.

    A clear of a whole partition is a hop of each sample that was there, once. A sample of the same
    id in two partitions has one life. Where clocks of hosts disagree, the times of events within
    the traces that name the sample are put right, as those of `Step` are.

    Raises:
        SampleNotFound: no event names the sample.
    """
    events = [event for event in timed_events(records.events) if _may_concern(event, sample_id)]
    # Not of every step's trace, though each clears a partition.
    trees = _trees(records, {event.trace_id for event in events if event.sample_ids})
    ahead = {trace_id: clocks_ahead(tree, root_of(tree)) for trace_id, tree in trees.items()}
    events = [moved_event(event, ahead.get(event.trace_id, {})) for event in events]
    events.sort(key=lambda event: (event.time_ns, _rank(event)))
    chosen = list(_of_sample(sample_id, distinct_events(events)))
    if not chosen:
        raise SampleNotFound(sample_id, _alike(sample_id, records.events))
    trees |= _trees(records, {event.trace_id for event in chosen} - trees.keys())
    return [_hop(event, chosen[0].time_ns, trees) for event in chosen]


def _may_concern(event: Event, sample_id: str) -> bool:
    return sample_id in event.sample_ids or _clears_partition(event)


def _clears_partition(event: Event) -> bool:
    return event.name == "cleared" and not event.sample_ids


def _of_sample(sample_id: str, events: Iterable[Event]) -> Iterator[Event]:
    """Leaves out clears of partitions in which the sample is not, or is no more."""
    present: set[tuple[str, str]] = set()
    seen: set[tuple[str, str]] = set()
    for event in events:
        told = event.attributes
        place = attributes.text(told, "rl.run_id"), attributes.text(told, "dataplane.partition")
        if _clears_partition(event):
            if place not in present:
                continue
            present.discard(place)
        elif event.name == "cleared":
            present.discard(place)
        elif event.name == "put" or place not in seen:
            # What is told after a clear does not bring a sample back; only a put does.
            present.add(place)
        seen.add(place)
        yield event


def _hop(event: Event, first_ns: int, trees: dict[str, Tree]) -> Hop:
    told = event.attributes
    batch = attributes.count(told, "dataplane.samples") or len(event.sample_ids)
    n_bytes = attributes.integer(told, "dataplane.bytes")
    return Hop(
        name=event.name,
        time_ns=event.time_ns,
        seconds=(event.time_ns - first_ns) / 1e9,
        process=event.process,
        partition=attributes.text(told, "dataplane.partition"),
        step=attributes.integer(told, "rl.step"),
        stage=_stage(event, trees),
        weight_version=attributes.integer(told, "rl.weight_version"),
        task=attributes.text(told, "dataplane.task"),
        fields=tuple(sorted(attributes.names(told, "dataplane.fields"))),
        n_bytes=None if n_bytes is None or not batch else n_bytes / batch,
        batch=batch,
        detail=_detail(event),
        whole_partition=_clears_partition(event),
        run_id=attributes.text(told, "rl.run_id"),
        trace_id=event.trace_id,
        span_id=event.span_id,
    )


def _detail(event: Event) -> str:
    told = event.attributes
    parts = [attributes.text(told, "dataplane.reason"), attributes.text(told, "error.type")]
    waited = told.get("dataplane.wait_s")
    if isinstance(waited, int | float):
        parts.append(f"waited {waited:.3f} s")
    if _clears_partition(event):
        parts.append("the whole partition")
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
    return {trace_id: Tree(those) for trace_id, those in spans.items()}


def _rank(event: Event) -> int:
    return _ORDER.index(event.name) if event.name in _ORDER else -1


def _alike(sample_id: str, events: Iterable[Event]) -> list[str]:
    def shared(other: str) -> int:
        return sum(takewhile(bool, map(eq, sample_id, other)))

    known = {other for event in events for other in event.sample_ids}
    alike = (other for other in known if shared(other))
    return heapq.nsmallest(_SUGGESTED, alike, key=lambda other: (-shared(other), other))
