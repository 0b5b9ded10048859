"""Cursors: opaque texts that a caller passes back to get the next page."""

from __future__ import annotations

import base64
import json
from typing import Any  # Any: JSON

from dataplane_admin.service.errors import Refused
from dataplane_admin.store import SampleCursor, TraceCursor

MAX_CURSOR = 30_000
"""Maximum length of a cursor in characters; the longest sample id needs about 28,000."""

_LARGEST = 2**63


def trace_cursor(cursor: TraceCursor | None) -> str | None:
    """Return the cursor after a page of traces, None after the last page."""
    return None if cursor is None else _encoded("traces", cursor)


def read_trace_cursor(text: str | None) -> TraceCursor | None:
    """Return the place that a cursor encodes. Raises Refused."""
    place = _decoded("traces", text, int)
    return None if place is None else place[0]


def sample_cursor(cursor: SampleCursor | None) -> str | None:
    """Return the cursor after a page of samples, None after the last page."""
    return None if cursor is None else _encoded("samples", *cursor)


def read_sample_cursor(text: str | None) -> SampleCursor | None:
    """Return the place that a cursor encodes. Raises Refused."""
    place = _decoded("samples", text, str, int)
    return None if place is None else (place[0], place[1])


def fact_cursor(place: tuple[float, int] | None) -> str | None:
    """Return the cursor after a page of facts of samples, None after the last page."""
    return None if place is None else _encoded("facts", repr(place[0]), place[1])


def read_fact_cursor(text: str | None) -> tuple[float, int] | None:
    """Return the place that a cursor encodes. Raises Refused."""
    place = _decoded("facts", text, str, int)
    if place is None:
        return None
    try:
        return float(place[0]), place[1]
    except ValueError:
        raise Refused("cursor: found an invalid cursor; expected the 'next' of a page") from None


def audit_cursor(entry_id: int) -> str:
    """Return the cursor after a page of the audit log."""
    return _encoded("audit", entry_id)


def read_audit_cursor(text: str | None) -> int | None:
    """Return the place that a cursor encodes. Raises Refused."""
    place = _decoded("audit", text, int)
    return None if place is None else place[0]


def _encoded(kind: str, *place: str | int) -> str:
    text = json.dumps([kind, *place], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode("ascii")).decode("ascii").rstrip("=")


def _decoded(kind: str, text: str | None, *types: type) -> list[Any] | None:
    """Return the parts of a cursor, which have these types; integers fit a database."""
    if text is None:
        return None
    try:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        given_kind, *place = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        is_valid = given_kind == kind and [type(part) for part in place] == [*types]
        if is_valid and all(type(part) is str or 0 <= part < _LARGEST for part in place):
            return list(place)
    except (ValueError, TypeError, RecursionError):
        pass
    raise Refused(f"cursor: found an invalid cursor; expected the 'next' of a page of {kind}")
