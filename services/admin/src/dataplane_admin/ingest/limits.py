"""How much one request may bring."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """What is beyond them is refused, or cut where it says so.

    Attributes:
        body_bytes: of a request as it is sent.
        inflated_bytes: of a request without its compression.
        waiting_bytes: of all requests that are being read or decoded.
        spans: in a request; further ones are refused and counted.
        events: log records in a request; further ones are refused and counted.
        points: data points in a request; further ones are refused and counted.
        attributes: of a span, event or link; further ones are cut and counted as dropped.
        attribute_length: characters of text, or bytes, of a value; cut, as the SDK does.
        links: of a span; cut and counted as dropped.
        ids: samples that an event may name; an event with more is refused.
        id_bytes: of a sample id; an event with a longer one is refused.
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
        """Refuse what cannot be meant.

        Raises:
            ValueError: a limit is below 1.
        """
        for one in fields(self):
            value = getattr(self, one.name)
            if value < 1:
                raise ValueError(f"{one.name}={value}: expected at least 1")
