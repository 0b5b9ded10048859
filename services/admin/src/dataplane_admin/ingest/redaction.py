"""Redaction: replacement of matches of patterns before text of samples is stored."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

from dataplane_admin.ingest.sample_text import attributed

REDACTED = "[redacted]"
IDENTIFYING_KEYS = frozenset(
    {
        "dataplane.partition",
        "dataplane.task",
        "dataplane.unit",
        "dataplane.wait",
        "db.collection.name",
        "db.operation.name",
        "error.type",
        "host.name",
        "messaging.consumer.group.name",
        "messaging.destination.name",
        "messaging.operation.name",
        "rl.bucket",
        "rl.component",
        "rl.metric",
        "rl.run_id",
        "service.instance.id",
        "service.name",
        "service.namespace",
    }
)
"""Attributes that are never redacted: lineage, curves and alerts need distinct values."""
_OWN_SCOPES = frozenset({"rl-dataplane", "refit-mx"})
"""Scopes whose spans have documented names, on which views depend."""


def check_pattern(pattern: re.Pattern[str]) -> None:
    """Raise ValueError if a pattern matches the empty string, and so matches everywhere."""
    if pattern.search("") is not None:
        raise ValueError(f"{pattern.pattern!r} matches the empty string")


class Redaction:
    """Replacement of all matches of ``patterns``; matches that overlap are replaced together."""

    def __init__(self, patterns: Sequence[re.Pattern[str]] = ()) -> None:
        self._patterns = tuple(patterns)

    def text(self, text: str) -> str:
        """Return a text with its matches replaced."""
        parts, at = [], 0
        for start, end in self._matches(text):
            parts += [text[at:start], REDACTED]
            at = end
        return "".join([*parts, text[at:]]) if parts else text

    def tokens(self, texts: list[str], contents: Sequence[str] = ()) -> list[str]:
        """Return the texts of consecutive tokens; those that overlap a match are replaced.

        A pattern may match in the conversation only, for example at the start of a turn. So
        each turn of ``contents`` with a match is located in the text of the tokens. If it is not
        there, all tokens are replaced.
        """
        joined = "".join(texts)
        ranges = self._matches(joined)
        for content in contents:
            matches = self._matches(content)
            if not matches:
                continue
            inner = content.strip()  # chat templates remove spaces around it
            offset = len(content) - len(content.lstrip())
            places = list(_places_of(inner, joined)) if inner else []
            if not places:
                return [REDACTED] * len(texts)
            ranges += [
                (place + max(0, start - offset), place + min(len(inner), end - offset))
                for place in places
                for start, end in matches
            ]
        ends = list(accumulate(map(len, texts)))
        redacted = list(texts)
        for start, end in ranges:
            for place in range(bisect_right(ends, start), len(texts)):
                if ends[place] - len(texts[place]) >= end:
                    break
                redacted[place] = REDACTED
        return redacted

    def attributes(self, request: TracesData | LogsData | MetricsData) -> bool:
        """Replace the matches in the attributes of a request; return True if there were any.

        `IDENTIFYING_KEYS` keep their values. Status messages of spans count as attributes, and so
        do names of spans and of their events, except in scopes of this project.
        """
        if not self._patterns:
            return False
        changed = False
        for record in attributed(request):
            for pair in record.attributes:
                if pair.key not in IDENTIFYING_KEYS:
                    changed |= self.value(pair.value)
            if isinstance(record, Span) and record.status.message:
                message = self.text(record.status.message)
                changed |= message != record.status.message
                record.status.message = message
        if isinstance(request, TracesData):
            for record in _foreign(request):
                name = self.text(record.name)
                if name != record.name:
                    changed, record.name = True, name
        return changed

    def _matches(self, text: str) -> list[tuple[int, int]]:
        """Return start and end of the matches in a text, in order, overlapping ones as one."""
        spans = [each.span() for pattern in self._patterns for each in pattern.finditer(text)]
        merged: list[tuple[int, int]] = []
        for start, end in sorted(spans):
            if merged and start < merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            elif start < end:
                merged.append((start, end))
        return merged

    def value(self, value: AnyValue) -> bool:
        """Replace the matches in all text of a value; return True if there were any."""
        match value.WhichOneof("value"):
            case "string_value":
                text = self.text(value.string_value)
                if text == value.string_value:
                    return False
                value.string_value = text
                return True
            case "bytes_value":
                # Bytes that are not UTF-8 stay as they are.
                text = value.bytes_value.decode(errors="surrogateescape")
                redacted = self.text(text).encode(errors="surrogateescape")
                changed = redacted != value.bytes_value
                value.bytes_value = redacted
                return changed
            case "array_value":
                # A list: `any` would stop at the first match.
                return any([*map(self.value, value.array_value.values)])
            case "kvlist_value":
                return any([*map(self.value, (each.value for each in value.kvlist_value.values))])
        return False


def _places_of(part: str, text: str) -> Iterator[int]:
    place = text.find(part)
    while place >= 0:
        yield place
        place = text.find(part, place + len(part))


def _foreign(request: TracesData) -> Iterator[Span | Span.Event]:
    """Yield the spans of other scopes than this project's, and their events."""
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            if scope_spans.scope.name in _OWN_SCOPES:
                continue
            for span in scope_spans.spans:
                yield span
                yield from span.events
