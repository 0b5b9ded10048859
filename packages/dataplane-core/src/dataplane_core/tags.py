"""What a tag may hold: primitives that travel between processes and can be compared.

Needs neither numpy nor torch; their scalars are known by what they offer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: whatever a caller gives as a tag

from dataplane_core.arguments import checked_mapping, is_utf8, scalar_of, shown
from dataplane_core.errors import InvalidRequestError, InvalidTypeError

LENGTH_TAG = "input_lengths"
"""Tag that tells a sample's tokens."""


def primitive(value: Any) -> str | int | float | None:
    """``value`` as the primitive that it is: scalars of numpy and torch by their ``item``.

    Args:
        value: str, int of 64 bits (-2**63 up to 2**64), float, bool or None.

    Raises:
        InvalidRequestError: (a ValueError) it is nothing of that.
    """
    found: Any = scalar_of(value)
    if found is None or isinstance(found, bool):
        return found
    # An enum that is also a number or a str stands for that.
    if isinstance(found, int):
        number = int.__int__(found)
        if -(2**63) <= number < 2**64:
            return number
        raise InvalidRequestError(f"{shown(number)} has more than 64 bits")
    if isinstance(found, float):
        return float.__float__(found)
    if isinstance(found, str):
        text = str.__str__(found)
        if is_utf8(text):
            return text
        raise InvalidRequestError(f"{text!r} has half a surrogate pair, which UTF-8 cannot hold")
    raise InvalidTypeError(f"{shown(found)}; expected str, int, float, bool or None")


def checked_column(where: str, name: str, values: Sequence[Any]) -> list[Any]:
    """The values of one tag as primitives, sample by sample.

    Raises:
        InvalidRequestError: (a ValueError) names the tag and the place of the first wrong one.
    """
    checked = []
    for place, value in enumerate(values):
        try:
            checked.append(primitive(value))
        except InvalidRequestError as error:
            raise type(error)(f"{where}: tag {name!r}, sample {place}: {error}") from None
    return checked


def checked_tags(where: str, sample_id: str, tags: object) -> dict[str, Any]:
    """A sample's tags as primitives, in a dict of their own.

    Args:
        where: names the call in the error.
        sample_id: names the sample.
        tags: what the caller gave.

    Raises:
        InvalidRequestError: (a ValueError) names the tag that holds something else.
    """
    own = f"{where}: sample {sample_id!r}"
    tags = checked_mapping(own, "tags", tags, "a dict of primitives")
    checked: dict[str, Any] = {}
    for name, value in tags.items():
        try:
            key, found = primitive(name), primitive(value)
            if not isinstance(key, str):
                raise InvalidRequestError("expected a str as its name")
            if key == LENGTH_TAG and (type(found) is not int or found < 0):
                raise InvalidRequestError(f"{found!r}; expected an int of at least 0")
        except InvalidRequestError as error:
            shown_name = repr(name) if isinstance(name, str) else shown(name)
            raise type(error)(f"{own}, tag {shown_name}: {error}") from None
        checked[key] = found
    return checked
