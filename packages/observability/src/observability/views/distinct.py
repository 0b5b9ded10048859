"""Removal of repeated records: an exporter that retries sends the same span or event again.

A span may also arrive twice: while it is open and after it finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from observability.records import Event, Span


def distinct_spans(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in the given order, each trace and span id once.

    Of several spans with one id, the one with the most reported times counts; on a tie, the first.
    """
    by_id: dict[tuple[str, str], Span] = {}
    for span in spans:
        key = span.trace_id, span.span_id
        known = by_id.setdefault(key, span)
        if not known.is_timed and _times(span) > _times(known):
            by_id[key] = span
    return list(by_id.values())


def _times(span: Span) -> int:
    return span.has_start + span.has_end


def timed_events(events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events; one without a time gets its time of receipt.

    If that is unknown, it gets the time of the event received before it; events before the first
    known time get the first known time. A repeated event without a time is skipped here: its times
    of receipt differ, so `distinct_events` would keep both.
    """
    waiting: list[Event] = []
    untimed: set[tuple[object, ...]] = set()
    last_ns = 0
    for event in events:
        if not event.time_ns:
            key = _key(event)
            if key in untimed:
                continue
            untimed.add(key)
        if not event.time_ns and event.received_ns:
            event = replace(event, time_ns=event.received_ns)
        if event.time_ns:
            last_ns = event.time_ns
            yield from (replace(earlier, time_ns=last_ns) for earlier in waiting)
            waiting.clear()
            yield event
        elif last_ns:
            yield replace(event, time_ns=last_ns)
        else:
            waiting.append(event)
    yield from waiting


def distinct_events(events: Iterable[Event]) -> list[Event]:
    """Return the events in the given order, identical ones once."""
    # A key takes longer than all else here, so only events with equal name, time and span get keys.
    first: dict[tuple[str, int, str], Event | None] = {}
    keys: set[tuple[object, ...]] = set()
    distinct = []
    for event in events:
        moment = event.name, event.time_ns, event.span_id
        if moment in first:
            known = first[moment]
            if known is not None:
                keys.add(_key(known))
                first[moment] = None
            key = _key(event)
            if key in keys:
                continue
            keys.add(key)
        else:
            first[moment] = event
        distinct.append(event)
    return distinct


def _key(event: Event) -> tuple[object, ...]:
    # Attributes may hold lists, which are not hashable: compare them as text.
    reported = repr(sorted(event.attributes.items()))
    place = (event.process, event.trace_id, event.span_id)
    return (event.name, event.time_ns, *place, reported, event.sample_ids)
