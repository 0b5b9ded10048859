"""Limits of one request."""

from __future__ import annotations

from dataclasses import dataclass, fields

BODY_S = 30.0
"""Deadline in seconds for a body to arrive."""


@dataclass(frozen=True)
class Limits:
    """Limits of one request. Records beyond them are rejected, or cut where noted.

    Attributes:
        body_bytes: bytes of a request as sent.
        inflated_bytes: bytes of a decompressed request.
        waiting_bytes: bytes of all requests that are being read or decoded.
        spans: spans of a request; further ones are rejected and counted.
        events: log records of each kind in a request: lifecycle events, records of samples, logs
            of traces; further ones are rejected and counted.
        points: data points of a request; further ones are rejected and counted.
        attributes: attributes of a span, event or link; further ones are cut and counted as
            dropped.
        attribute_length: length of a value, in characters of text or in bytes; longer values are
            cut, as the SDK does.
        links: links of a span, and events of a span; further ones are cut and counted as dropped.
        ids: samples of an event; an event with more is rejected.
        id_bytes: bytes of a sample id; an event with a longer one is rejected.
    """

    body_bytes: int = 32 << 20
    inflated_bytes: int = 64 << 20
    waiting_bytes: int = 256 << 20
    spans: int = 10_000
    events: int = 10_000
    points: int = 50_000
    attributes: int = 128
    attribute_length: int = 4096
    links: int = 128
    ids: int = 16_384
    id_bytes: int = 4096

    def __post_init__(self) -> None:
        """Check the limits. Raises ValueError if a limit is below 1."""
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value < 1:
                raise ValueError(f"{limit.name}={value}: expected at least 1")
