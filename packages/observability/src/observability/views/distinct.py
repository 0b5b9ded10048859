"""Records without repetition: an exporter that retries sends the same span or event again."""

from __future__ import annotations

from collections.abc import Iterable

from observability.records import Event, Span


def distinct_spans(spans: Iterable[Span]) -> list[Span]:
    """The spans in the order given, each trace and span id once; the first one counts."""
    found: dict[tuple[str, str], Span] = {}
    for span in spans:
        found.setdefault((span.trace_id, span.span_id), span)
    return list(found.values())


def distinct_events(events: Iterable[Event]) -> list[Event]:
    """The events in the order given, identical ones once."""
    found: dict[tuple[object, ...], Event] = {}
    for event in events:
        # Attributes may hold lists, so they are compared as text.
        told = repr(sorted(event.attributes.items()))
        place = (event.process, event.trace_id, event.span_id)
        found.setdefault((event.name, event.time_ns, *place, told, event.sample_ids), event)
    return list(found.values())
