"""What a request asks for, out of its query or form, with a sentence for what cannot be read."""

from __future__ import annotations

import math

from starlette.datastructures import FormData, QueryParams

from dataplane_admin.answers import Refused

_LARGEST = 2**53


class Asked:
    """The values of a query or form. Empty ones count as not given."""

    def __init__(self, given: QueryParams | FormData) -> None:
        self._given = given

    def text(self, name: str) -> str:
        """The value of ``name``; empty if it was not given."""
        value = self._given.get(name, "")
        return value if isinstance(value, str) else ""

    def texts(self, name: str) -> list[str]:
        """All values of ``name`` but the empty ones, each once."""
        found = [value for value in self._given.getlist(name) if isinstance(value, str)]
        return list(dict.fromkeys(value for value in found if value))

    def maybe(self, name: str) -> str | None:
        """The value of ``name``; None if it was not given."""
        return self.text(name) or None

    def required(self, name: str) -> str:
        """The value of ``name``.

        Raises:
            Refused: it was not given.
        """
        value = self.text(name)
        if not value:
            raise Refused(f"the address lacks '{name}'; expected for example ?{name}=...")
        return value

    def integer(self, name: str) -> int | None:
        """A whole number from 0 on; None if it was not given.

        Raises:
            Refused: it is none.
        """
        value = self.text(name).strip()
        if not value:
            return None
        if not (value.isascii() and value.isdigit() and len(value) < 18) or int(value) > _LARGEST:
            raise Refused(f"{name} is '{value[:40]}'; expected a whole number from 0 on")
        return int(value)

    def number(self, name: str) -> float | None:
        """A number from 0 on; None if it was not given.

        Raises:
            Refused: it is none.
        """
        value = self.text(name).strip()
        if not value:
            return None
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf:
            raise Refused(f"{name} is '{value[:40]}'; expected a number from 0 on")
        return number

    def flag(self, name: str) -> bool:
        """Whether a box was checked."""
        return self.text(name) in ("true", "on", "1")
