"""Removal of repeated records.

An exporter that retries sends the same spans and events again. A span may also be sent twice: while
it is open, and after it ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from observability.records import Event, Span


def distinct_spans(spans: Iterable[Span]) -> list[Span]:
    """Return one span per trace and span id, in the order in which these first occur.

    Of several spans with the same ids, return the one with more reported times; on a tie, the
    first.
    """
    by_id: dict[tuple[str, str], Span] = {}
    for span in spans:
        key = span.trace_id, span.span_id
        best = by_id.setdefault(key, span)
        if not best.is_timed and _reported_times(span) > _reported_times(best):
            by_id[key] = span
    return list(by_id.values())


def _reported_times(span: Span) -> int:
    return span.has_start + span.has_end


def timed_events(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events, and give a time to events without one.

    An event without a time gets its time of receipt. If that is unknown, it gets the time of the
    previous event with a time, or else of the next event with a time.

    Of repeated events without a time, only the first is yielded. `distinct_events` would not remove
    the others, because their times of receipt differ.
    """
    untimed: list[Event] = []  # events before the first one with a time
    untimed_keys: set[tuple[object, ...]] = set()
    last_ns = 0
    for event in events:
        if not event.time_ns:
            key = _full_key(event)
            if key in untimed_keys:
                continue
            untimed_keys.add(key)
        if not event.time_ns and event.received_ns:
            event = replace(event, time_ns=event.received_ns)
        if event.time_ns:
            last_ns = event.time_ns
            yield from (replace(earlier, time_ns=last_ns) for earlier in untimed)
            untimed.clear()
            yield event
        elif last_ns:
            yield replace(event, time_ns=last_ns)
        else:
            untimed.append(event)
    yield from untimed


def distinct_events(events: Iterable[Event]) -> list[Event]:
    """Return the events in the given order, without repetitions."""
    # A full key is slow to compute. Events with different short keys differ, so a full key is
    # needed only where short keys are equal.
    first_events: dict[tuple[str, int, str], Event | None] = {}  # None once its full key is known
    full_keys: set[tuple[object, ...]] = set()
    distinct = []
    for event in events:
        short_key = event.name, event.time_ns, event.span_id
        if short_key in first_events:
            first = first_events[short_key]
            if first is not None:
                full_keys.add(_full_key(first))
                first_events[short_key] = None
            full_key = _full_key(event)
            if full_key in full_keys:
                continue
            full_keys.add(full_key)
        else:
            first_events[short_key] = event
        distinct.append(event)
    return distinct


def _full_key(event: Event) -> tuple[object, ...]:
    """Return a key of every field of an event except its time of receipt."""
    # Attributes may have lists as values, which are not hashable. So compare their text.
    attributes = repr(sorted(event.attributes.items()))
    origin = (event.process, event.trace_id, event.span_id)
    return (event.name, event.time_ns, *origin, attributes, event.sample_ids)
