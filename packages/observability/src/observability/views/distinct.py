"""Records without repetition: an exporter that retries sends the same span or event again.

A span may also come while it is open, and again when it has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from observability.records import Event, Span


def distinct_spans(spans: Iterable[Span]) -> list[Span]:
    """The spans in the order given, each trace and span id once.

    Of several with one id the first that reports most of its times counts.
    """
    found: dict[tuple[str, str], Span] = {}
    for span in spans:
        key = span.trace_id, span.span_id
        known = found.setdefault(key, span)
        if not known.is_timed and _times(span) > _times(known):
            found[key] = span
    return list(found.values())


def _times(span: Span) -> int:
    return span.has_start + span.has_end


def timed_events(events: Iterable[Event]) -> Iterator[Event]:
    """The events, of which one without a time has that at which it was received.

    Where that is unknown it takes the time of the one received before it; those before the first
    time take that one.
    """
    waiting: list[Event] = []
    last_ns = 0
    for event in events:
        if not event.time_ns and event.received_ns:
            event = replace(event, time_ns=event.received_ns)
        if event.time_ns:
            last_ns = event.time_ns
            yield from (replace(one, time_ns=last_ns) for one in waiting)
            waiting.clear()
            yield event
        elif last_ns:
            yield replace(event, time_ns=last_ns)
        else:
            waiting.append(event)
    yield from waiting


def distinct_events(events: Iterable[Event]) -> list[Event]:
    """The events in the order given, identical ones once."""
    found: dict[tuple[object, ...], Event] = {}
    for event in events:
        # Attributes may hold lists, so they are compared as text.
        told = repr(sorted(event.attributes.items()))
        place = (event.process, event.trace_id, event.span_id)
        found.setdefault((event.name, event.time_ns, *place, told, event.sample_ids), event)
    return list(found.values())
