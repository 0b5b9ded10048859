"""Redaction: replacement of matches of patterns before text of samples is stored."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

from dataplane_admin.ingest.sample_text import attributed

REDACTED = "[redacted]"


class Redaction:
    """Replacement of all matches of ``patterns``, one pattern after the other."""

    def __init__(self, patterns: Sequence[re.Pattern[str]] = ()) -> None:
        self._patterns = tuple(patterns)

    def text(self, text: str) -> str:
        """Return a text with its matches replaced."""
        for pattern in self._patterns:
            text = pattern.sub(REDACTED, text)
        return text

    def tokens(self, texts: list[str]) -> list[str]:
        """Return the texts of consecutive tokens; those that overlap a match are replaced."""
        joined = "".join(texts)
        ends = list(accumulate(map(len, texts)))
        redacted = list(texts)
        for pattern in self._patterns:
            for match in pattern.finditer(joined):
                start, end = match.span()
                for place in range(bisect_right(ends, start), len(texts)):
                    if ends[place] - len(texts[place]) >= end:
                        break
                    redacted[place] = REDACTED
        return redacted

    def attributes(self, request: TracesData | LogsData | MetricsData) -> bool:
        """Replace the matches in all attributes of a request; return True if there were any.

        Names and status messages of spans, and names of their events, count as attributes.
        """
        if not self._patterns:
            return False
        changed = False
        for record in attributed(request):
            for pair in record.attributes:
                changed |= self.value(pair.value)
            if isinstance(record, Span | Span.Event) and record.name:
                name = self.text(record.name)
                changed |= name != record.name
                record.name = name
            if isinstance(record, Span) and record.status.message:
                message = self.text(record.status.message)
                changed |= message != record.status.message
                record.status.message = message
        return changed

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
