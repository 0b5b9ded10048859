"""Cursors: where a page ended, as text that a caller hands back without knowing what it says."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any  # Any: JSON

from dataplane_admin.answers.errors import Refused
from dataplane_admin.store import Cursor, SampleCursor

MOST = 30_000
"""Characters of a cursor; the longest sample id makes one of about 28,000."""

_LARGEST = 2**63


def trace_cursor(cursor: Cursor | None) -> str | None:
    """Of a page of traces."""
    return None if cursor is None else _encoded("traces", cursor.arrival)


def read_trace_cursor(text: str | None) -> Cursor | None:
    """Raises Refused."""
    match _decoded("traces", text):
        case None:
            return None
        case [int(arrival)] if 0 <= arrival < _LARGEST:
            return Cursor(arrival)
        case _:
            raise _Foreign("traces")


def sample_cursor(cursor: SampleCursor) -> str:
    """Of a page of samples."""
    return _encoded("samples", *cursor)


def read_sample_cursor(text: str | None) -> SampleCursor | None:
    """Raises Refused."""
    match _decoded("samples", text):
        case None:
            return None
        case [str(sample_id), int(key)] if 0 <= key < _LARGEST:
            return sample_id, key
        case _:
            raise _Foreign("samples")


def audit_cursor(entry_id: int) -> str:
    """Of a page of the audit record."""
    return _encoded("audit", entry_id)


def read_audit_cursor(text: str | None) -> int | None:
    """Raises Refused."""
    match _decoded("audit", text):
        case None:
            return None
        case [int(entry_id)] if 0 <= entry_id < _LARGEST:
            return entry_id
        case _:
            raise _Foreign("audit")


def _encoded(kind: str, *place: str | int) -> str:
    told = json.dumps([kind, *place], separators=(",", ":"))
    return base64.urlsafe_b64encode(told.encode("ascii")).decode("ascii").rstrip("=")


def _decoded(kind: str, text: str | None) -> list[Any] | None:
    if text is None:
        return None
    try:
        padded = text.encode("ascii") + b"=" * (-len(text) % 4)
        told = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (ValueError, binascii.Error, RecursionError):
        raise _Foreign(kind) from None
    if not isinstance(told, list) or not told or told[0] != kind:
        raise _Foreign(kind)
    if any(isinstance(part, bool) for part in told):
        raise _Foreign(kind)
    return told[1:]


class _Foreign(Refused):
    def __init__(self, kind: str) -> None:
        super().__init__(
            f"cursor: found one that no page of {kind} gave; expected the 'next' of such a page"
        )
