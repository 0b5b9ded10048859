"""Parameters of a request, from its query or form."""

from __future__ import annotations

import math
from collections.abc import Sequence

from starlette.datastructures import FormData, QueryParams

from dataplane_admin.service import Refused
from dataplane_admin.service.limits import MAX_PAGE

_LARGEST = 2**53


def check_choice(name: str, value: str, known: Sequence[str]) -> None:
    """Raise `Refused` unless a parameter is empty or has one of the known values."""
    if value and value not in known:
        raise Refused(f"{name} is '{value[:40]}'; expected one of {', '.join(known)}")


class Params:
    """The values of a query or form. Empty values count as missing."""

    def __init__(self, given: QueryParams | FormData) -> None:
        self._given = given

    def text(self, name: str) -> str:
        """Return the value of ``name``, empty if missing."""
        value = self._given.get(name, "")
        return value if isinstance(value, str) else ""

    def texts(self, name: str) -> list[str]:
        """Return the distinct values of ``name`` without empty ones."""
        values = [value for value in self._given.getlist(name) if isinstance(value, str)]
        return list(dict.fromkeys(value for value in values if value))

    def maybe(self, name: str) -> str | None:
        """Return the value of ``name``, None if missing."""
        return self.text(name) or None

    def given(self, name: str) -> str | None:
        """Return the value of ``name``, even if it is empty; None if missing."""
        return self.text(name) if name in self._given else None

    def required(self, name: str) -> str:
        """Return the value of ``name``. Raises Refused if it is missing."""
        value = self.text(name)
        if not value:
            raise Refused(f"parameter '{name}' is missing; expected ?{name}=... in the URL")
        return value

    def integer(self, name: str) -> int | None:
        """Return a non-negative integer, None if missing.

        Raises Refused if the value is not one.
        """
        value = self.text(name).strip()
        if not value:
            return None
        if not (value.isascii() and value.isdigit() and len(value) < 18) or int(value) > _LARGEST:
            raise Refused(f"{name} is '{value[:40]}'; expected an integer of at least 0")
        return int(value)

    def number(self, name: str) -> float | None:
        """Return a non-negative number, None if missing. Raises Refused if the value is not one."""
        value = self.text(name).strip()
        if not value:
            return None
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            raise Refused(f"{name} is '{value[:40]}'; expected a number of at least 0")
        return number

    def rows(self, table: str, default: int = 50, maximum: int = MAX_PAGE) -> int:
        """Return how many rows of a table to show.

        They are ``maximum`` if the parameter ``all``, which ``tables.js`` sets for downloads, names
        the table.
        """
        return maximum if self.text("all") == table else default

    def flag(self, name: str) -> bool:
        """Return whether a checkbox was checked."""
        return self.text(name) in ("true", "on", "1")
