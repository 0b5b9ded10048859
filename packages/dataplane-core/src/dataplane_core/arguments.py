"""Checks of single arguments: names, counts, durations and flags.

Every check returns the plain Python value, so that scalars of numpy and torch, subclasses and enums
go no further than the boundary. What it refuses is named with what was found and what was expected.
Needs neither numpy nor torch; their scalars are known by what they offer.
"""

from __future__ import annotations

import operator
import reprlib
from collections import Counter
from collections.abc import KeysView, Mapping, Sequence
from typing import Any  # Any: whatever a caller gives as an argument

from dataplane_core.errors import (
    DuplicateSampleError,
    InvalidRequestError,
    InvalidTypeError,
    listed,
)

MAX_INT = 2**63 - 1
"""Largest integer argument: it has to fit the wire and the columns of a database."""

MAX_SECONDS = 1e8
"""Longest deadline, three years; beyond it the clocks of the operating system overflow."""

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 60


def shown(value: object) -> str:
    """``value`` and its type for an error message: short, and safe if its repr raises."""
    return f"{_brief.repr(value)} of type {type(value).__name__}"


def refused(where: str, argument: str, value: object, expected: str) -> InvalidTypeError:
    """The error that names an argument of a wrong type, what was found and what was expected."""
    return InvalidTypeError(f"{where}: {argument} is {shown(value)}; expected {expected}")


def checked_name(where: str, argument: str, value: object, *, empty: bool = False) -> str:
    """``value`` as a plain str without half a surrogate pair, not empty unless ``empty``.

    Raises:
        InvalidRequestError: (a ValueError) it is nothing of that.
    """
    if not isinstance(value, str):
        raise refused(where, argument, value, "a str")
    name = str.__str__(value)
    if not name and not empty:
        raise InvalidRequestError(f"{where}: {argument} is empty; expected a name")
    if not is_utf8(name):
        raise InvalidRequestError(
            f"{where}: {argument} {name!r} has half a surrogate pair, which UTF-8 cannot hold"
        )
    return name


def checked_names(where: str, argument: str, value: object, *, empty: bool = False) -> list[str]:
    """``value`` as a list of its own of plain names, each as `checked_name` has it.

    Args:
        where: names the call in the error.
        argument: names the argument.
        value: a list, a tuple, another sequence, the keys of a dict, or an array of one dimension.
        empty: take empty names too.

    Raises:
        InvalidRequestError: (a ValueError) it is a single str, or has no order or no names.
    """
    names: list[Any] = checked_items(where, argument, value, "a list of str")
    # Looked at as a whole first: a put of many ids pays for one pass, not for a call each.
    if set(map(type, names)) <= {str} and (empty or all(names)) and is_utf8("".join(names)):
        return names
    return [
        checked_name(where, f"{argument}[{i}]", name, empty=empty) for i, name in enumerate(names)
    ]


def checked_distinct_ids(where: str, value: object) -> list[str]:
    """Sample ids as `checked_names` has them, each once.

    Raises:
        InvalidRequestError: (a ValueError) as `checked_names`.
        DuplicateSampleError: (a ValueError) an id is given twice.
    """
    ids = checked_names(where, "sample_ids", value)
    if len(set(ids)) != len(ids):
        repeated = [sample_id for sample_id, count in Counter(ids).items() if count > 1]
        raise DuplicateSampleError(
            f"{where}: {len(repeated)} ids are given more than once: {listed(repeated)}"
        )
    return ids


def checked_int(
    where: str, argument: str, value: object, *, least: int = 0, most: int = MAX_INT
) -> int:
    """``value`` as a plain int between ``least`` and ``most``.

    Integers of numpy and torch are taken; a bool, a float or a str is not.

    Raises:
        InvalidRequestError: (a ValueError) it is something else, or out of bounds.
    """
    expected = f"an int of at least {least}" if most == MAX_INT else f"an int of {least} to {most}"
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        raise refused(where, argument, value, expected)
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # whatever it is
    except (TypeError, ValueError, RuntimeError):  # torch raises any of them
        raise refused(where, argument, value, expected) from None
    if not least <= number <= most:
        raise InvalidRequestError(
            f"{where}: {argument} is {_brief.repr(number)}; expected {expected}"
        )
    return number


def checked_ints(where: str, argument: str, value: object, *, least: int = 0) -> list[int]:
    """``value`` as a list of its own of plain ints, each as `checked_int` has it.

    Args:
        where: names the call in the error.
        argument: names the argument.
        value: a list, another sequence, or an array or tensor of one dimension.
        least: the smallest.

    Raises:
        InvalidRequestError: (a ValueError) one is something else or smaller; names its place.
    """
    numbers: list[Any] = checked_items(where, argument, value, "a list of ints")
    if set(map(type, numbers)) <= {int} and (
        not numbers or (least <= min(numbers) and max(numbers) <= MAX_INT)
    ):
        return numbers
    return [
        checked_int(where, f"{argument}[{i}]", number, least=least)
        for i, number in enumerate(numbers)
    ]


def checked_seconds(where: str, argument: str, value: object) -> float:
    """``value`` as a duration: an int or float from 0 to `MAX_SECONDS`, so no NaN or infinity.

    Raises:
        InvalidRequestError: (a ValueError) it is something else.
    """
    number = scalar_of(value)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise refused(where, argument, value, "a number of seconds")
    if not 0 <= number <= MAX_SECONDS:  # NaN compares to nothing
        raise InvalidRequestError(
            f"{where}: {argument} is {number}; expected 0 to {MAX_SECONDS:g} seconds"
        )
    return float(number)


def checked_bool(where: str, argument: str, value: object) -> bool:
    """``value`` as a plain bool; numbers and text, whose truth says little, are refused.

    Raises:
        InvalidRequestError: (a ValueError) it is no bool, of Python, numpy or torch.
    """
    flag = scalar_of(value)
    if not isinstance(flag, bool):
        raise refused(where, argument, value, "True or False")
    return flag


def scalar_of(value: Any) -> object:
    """What a scalar of numpy or torch stands for; any other value as it is."""
    if getattr(value, "ndim", None) != 0:
        return value
    try:
        scalar: object = value.item()
    except (AttributeError, TypeError, ValueError, RuntimeError):  # one without data, or values
        return value
    return scalar


def checked_items(where: str, argument: str, value: Any, expected: str) -> list[Any]:
    """``value`` as a list of its own, if it is something in order: no str, set or scalar.

    Raises:
        InvalidTypeError: (a ValueError and a TypeError) it is not.
    """
    if type(value) is list:
        return value[:]
    if isinstance(value, Sequence | KeysView) and not isinstance(value, str | bytes | bytearray):
        return list(value)
    if getattr(value, "ndim", None) == 1 and not hasattr(value, "batch_size"):  # no TensorDict
        try:
            items: object = value.tolist()
        except (TypeError, ValueError, RuntimeError):  # a sparse tensor, for example
            items = None
        if isinstance(items, list):
            return items
    raise refused(where, argument, value, expected)


def checked_mapping(where: str, argument: str, value: Any, expected: str) -> Mapping[Any, Any]:
    """``value``, if it is a mapping and no TensorDict, whose items may be unwrapped.

    Raises:
        InvalidTypeError: (a ValueError and a TypeError) it is not.
    """
    if isinstance(value, Mapping) and not hasattr(value, "batch_size"):
        return value
    raise refused(where, argument, value, expected)


def is_utf8(text: str) -> bool:
    """Whether ``text`` has no half of a surrogate pair."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
