"""Checks of tags, whose values are primitives, and `group_of`, the group of a sample.

The module imports neither numpy nor torch; it recognizes their scalars by their attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any  # Any: callers may pass any type

from dataplane_core.arguments import checked_mapping, is_utf8, repr_with_type, scalar_of
from dataplane_core.errors import InvalidRequestError, InvalidTypeError

LENGTH_TAG = "input_lengths"
"""Tag that holds the number of a sample's tokens."""

GROUP_TAG = "group"
"""Tag that names a sample's group; without it the group is the id up to its last ``_g<number>``."""


def group_of(sample_id: str, tags: Mapping[str, object]) -> str:
    """Return the group (one prompt's samples) to which a sample with these tags belongs."""
    tagged = tags.get(GROUP_TAG)
    if tagged is not None:
        return str(tagged)
    head, mark, number = sample_id.rpartition("_g")
    return head if mark and number.isdecimal() else sample_id


def primitive(value: Any) -> str | int | float | None:
    """Return ``value`` as a plain primitive; scalars of numpy and torch are converted.

    Args:
        value: str, int of 64 bits (from -2**63 to 2**64 - 1), float, bool or None.

    Raises:
        InvalidRequestError: (a ValueError) ``value`` is not a primitive.
    """
    scalar: Any = scalar_of(value)
    if scalar is None or isinstance(scalar, bool):
        return scalar
    # Subclasses, such as an enum that is also a number or a str, become the plain type.
    if isinstance(scalar, int):
        number = int.__int__(scalar)
        if -(2**63) <= number < 2**64:
            return number
        raise InvalidRequestError(f"{repr_with_type(number)} has more than 64 bits")
    if isinstance(scalar, float):
        return float.__float__(scalar)
    if isinstance(scalar, str):
        text = str.__str__(scalar)
        if is_utf8(text):
            return text
        raise InvalidRequestError(f"{text!r} has a lone surrogate, which UTF-8 cannot encode")
    raise InvalidTypeError(f"{repr_with_type(scalar)}; expected str, int, float, bool or None")


def checked_column(operation: str, name: str, values: Sequence[Any]) -> list[Any]:
    """Return the values of one tag as primitives, sample by sample.

    Raises:
        InvalidRequestError: (a ValueError) a value is not a primitive; the error names tag and
            sample.
    """
    checked = []
    for index, value in enumerate(values):
        try:
            checked.append(primitive(value))
        except InvalidRequestError as error:
            raise type(error)(f"{operation}: tag {name!r}, sample {index}: {error}") from None
    return checked


def checked_tags(operation: str, sample_id: str, tags: object) -> dict[str, Any]:
    """Return a sample's tags as primitives, in a new dict.

    Args:
        operation: method and its main arguments, for the error.
        sample_id: id of the sample, for the error.
        tags: the caller's argument.

    Raises:
        InvalidRequestError: (a ValueError) a tag is not a primitive; the error names it.
    """
    sample = f"{operation}: sample {sample_id!r}"
    tags = checked_mapping(sample, "tags", tags, "a dict of primitives")
    checked: dict[str, Any] = {}
    for name, value in tags.items():
        try:
            key, plain = primitive(name), primitive(value)
            if not isinstance(key, str):
                raise InvalidRequestError("expected a str as its name")
            if key == LENGTH_TAG and (type(plain) is not int or plain < 0):
                raise InvalidRequestError(f"{plain!r}; expected an int of at least 0")
        except InvalidRequestError as error:
            shown_name = repr(name) if isinstance(name, str) else repr_with_type(name)
            raise type(error)(f"{sample}, tag {shown_name}: {error}") from None
        checked[key] = plain
    return checked
