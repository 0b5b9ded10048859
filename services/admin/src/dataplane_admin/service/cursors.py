"""Cursors: opaque texts that a caller passes back to get the next page."""

from __future__ import annotations

import base64
import json
from typing import Any  # Any: places of several kinds

from dataplane_admin.service.errors import Refused

MAX_CURSOR = 30_000
"""Maximum length of a cursor in characters; the longest sample id needs about 28,000."""

_LARGEST = 2**63


class Cursor:
    """Encoding of the places in one kind of list.

    ``types`` are the types of the parts of a place. Integers must be from 0 to 2**63 - 1.
    """

    def __init__(self, kind: str, *types: type) -> None:
        self._kind = kind
        self._types = types

    def write(self, place: tuple[str | float, ...] | None) -> str | None:
        """Return the cursor of a place; None after the last page."""
        if place is None:
            return None
        text = json.dumps([self._kind, *place], separators=(",", ":"))
        return base64.urlsafe_b64encode(text.encode("ascii")).decode("ascii").rstrip("=")

    def read(self, text: str | None) -> Any:
        """Return the place that a cursor encodes, a tuple; None without a cursor.

        Raises Refused if it is not a cursor of this kind.
        """
        if text is None:
            return None
        try:
            padded = text.encode("ascii") + b"=" * (-len(text) % 4)
            kind, *place = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
            is_valid = kind == self._kind and [type(part) for part in place] == [*self._types]
            if is_valid and all(type(part) is not int or 0 <= part < _LARGEST for part in place):
                return tuple(place)
        except (ValueError, TypeError, RecursionError):
            pass
        raise Refused(
            f"cursor: found an invalid cursor; expected the 'next' of a page of {self._kind}"
        )


TRACES = Cursor("traces", int)
SAMPLES = Cursor("samples", str, int)
FACTS = Cursor("facts", float, int)
AUDIT = Cursor("audit", int)
