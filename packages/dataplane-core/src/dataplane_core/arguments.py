"""Checks of single arguments: names, counts, durations and flags.

Checks of names, numbers and flags return plain Python values: no scalar of numpy or torch, no
subclass and no enum passes the boundary. The module imports neither numpy nor torch; it recognizes
their scalars by their attributes.

A value of a wrong type raises an `InvalidTypeError` (a ValueError and a TypeError). Any other
refused value raises an `InvalidRequestError` (a ValueError). The error names ``operation`` (the
method and its main arguments), ``argument``, what was found and what was expected.
"""

from __future__ import annotations

import operator
import reprlib
from collections import Counter
from collections.abc import Iterator, KeysView, Mapping, Sequence, Set
from typing import Any  # Any: callers may pass any type

from dataplane_core.errors import (
    DuplicateSampleError,
    InvalidRequestError,
    InvalidTypeError,
    listed,
)

MAX_INT = 2**63 - 1
"""Largest integer argument: it must fit the wire format and database columns."""

MIN_INT = -(2**63)
"""Smallest integer argument, for arguments that may be negative."""

MAX_SECONDS = 1e8
"""Longest deadline, about three years; far longer ones overflow the time-outs of locks."""

_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = _brief.maxlong = 60


def repr_with_type(value: object) -> str:
    """Return ``value`` and its type as short text for an error message, even if its repr raises."""
    return f"{_brief.repr(value)} of type {type(value).__name__}"


def argument_type_error(
    operation: str, argument: str, value: object, expected: str
) -> InvalidTypeError:
    """Return the error for an argument of a wrong type; it says what was found and expected."""
    return InvalidTypeError(
        f"{operation}: {argument} is {repr_with_type(value)}; expected {expected}"
    )


def checked_name(operation: str, argument: str, value: object, *, empty: bool = False) -> str:
    """Return ``value`` as a plain str that UTF-8 can encode; ``empty`` permits an empty one."""
    if not isinstance(value, str):
        raise argument_type_error(operation, argument, value, "a str")
    name = str.__str__(value)
    if not name and not empty:
        raise InvalidRequestError(f"{operation}: {argument} is empty; expected a name")
    if not is_utf8(name):
        raise InvalidRequestError(
            f"{operation}: {argument} {name!r} has a lone surrogate, which UTF-8 cannot encode"
        )
    return name


def checked_names(
    operation: str, argument: str, value: object, *, empty: bool = False
) -> list[str]:
    """Return ``value`` as a new list of names, each checked as by `checked_name`.

    ``value`` is a list, another sequence except a str, the keys of a dict, or an array of one
    dimension.
    """
    names: list[Any] = checked_items(operation, argument, value, "a list of str")
    # The fast path checks all names at once: a put of many ids pays one pass, not a call per id.
    if set(map(type, names)) <= {str} and (empty or all(names)) and is_utf8("".join(names)):
        return names
    return [
        checked_name(operation, f"{argument}[{i}]", name, empty=empty)
        for i, name in enumerate(names)
    ]


def checked_distinct_ids(operation: str, value: object) -> list[str]:
    """Return distinct sample ids, checked as by `checked_names`.

    Raises:
        DuplicateSampleError: (a ValueError) an id is given twice.
    """
    ids = checked_names(operation, "sample_ids", value)
    if len(set(ids)) != len(ids):
        repeated = [sample_id for sample_id, count in Counter(ids).items() if count > 1]
        raise DuplicateSampleError(
            f"{operation}: {len(repeated)} ids are given more than once: {listed(repeated)}"
        )
    return ids


def checked_int(
    operation: str, argument: str, value: object, *, minimum: int = 0, maximum: int = MAX_INT
) -> int:
    """Return ``value`` as a plain int between ``minimum`` and ``maximum``.

    Integers of numpy and torch are accepted; a bool, a float or a str is not.
    """
    expected = (
        f"an int of at least {minimum}"
        if maximum == MAX_INT
        else f"an int of {minimum} to {maximum}"
    )
    if minimum == MIN_INT and maximum == MAX_INT:
        expected = "an int of 64 bits"
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):
        raise argument_type_error(operation, argument, value, expected)
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # whatever it is
    except (TypeError, ValueError, RuntimeError):  # torch raises any of these
        raise argument_type_error(operation, argument, value, expected) from None
    if not minimum <= number <= maximum:
        raise InvalidRequestError(
            f"{operation}: {argument} is {_brief.repr(number)}; expected {expected}"
        )
    return number


def checked_ints(operation: str, argument: str, value: object, *, minimum: int = 0) -> list[int]:
    """Return ``value`` as a new list of plain ints, each checked as by `checked_int`.

    ``value`` is a list, another sequence, or an array or tensor of one dimension. The error names
    the index of an invalid item.
    """
    numbers: list[Any] = checked_items(operation, argument, value, "a list of ints")
    if set(map(type, numbers)) <= {int} and (
        not numbers or (minimum <= min(numbers) and max(numbers) <= MAX_INT)
    ):
        return numbers
    return [
        checked_int(operation, f"{argument}[{i}]", number, minimum=minimum)
        for i, number in enumerate(numbers)
    ]


def checked_indices(operation: str, value: object, rows: int) -> list[int]:
    """Return ``value`` as a new list of row indices; negative ones count from the end.

    Args:
        value: as for `checked_ints`, or a set or an iterator.
        rows: number of rows.

    Returns:
        The indices, each from 0 to ``rows - 1``.

    Raises:
        InvalidRequestError: (a ValueError) an index is not an int; 1.9 and True are refused too.
        IndexError: an index is outside the rows.
    """
    ordered = list(value) if isinstance(value, Set | Iterator) else value
    indices = checked_ints(operation, "indices", ordered, minimum=MIN_INT)
    for index in indices:
        if not -rows <= index < rows:
            raise IndexError(f"{operation}: index {index} outside a batch of {rows} samples")
    return [index % rows for index in indices]


def checked_slice(operation: str, start: object, stop: object) -> slice:
    """Return the slice ``[start, stop)`` with Python's rules; None leaves a side open."""
    start, stop = (
        None if bound is None else checked_int(operation, name, bound, minimum=MIN_INT)
        for name, bound in (("start", start), ("stop", stop))
    )
    return slice(start, stop)


def checked_seconds(operation: str, argument: str, value: object) -> float:
    """Return ``value`` as a duration in seconds, from 0 to `MAX_SECONDS`; NaN is refused."""
    number = scalar_of(value)
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise argument_type_error(operation, argument, value, "a number of seconds")
    if not 0 <= number <= MAX_SECONDS:  # False for NaN
        raise InvalidRequestError(
            f"{operation}: {argument} is {number}; expected 0 to {MAX_SECONDS:g} seconds"
        )
    return float(number)


def checked_period(operation: str, argument: str, value: object) -> float:
    """Return ``value`` as seconds between two calls: above 0, up to `MAX_SECONDS`."""
    seconds = checked_seconds(operation, argument, value)
    if not seconds:
        raise InvalidRequestError(f"{operation}: {argument} is 0; expected more than 0 seconds")
    return seconds


def checked_bool(operation: str, argument: str, value: object) -> bool:
    """Return a bool of Python, numpy or torch as a plain bool; numbers and text are refused."""
    flag = scalar_of(value)
    if not isinstance(flag, bool):
        raise argument_type_error(operation, argument, value, "True or False")
    return flag


def scalar_of(value: Any) -> object:
    """Return a scalar of numpy or torch as a Python value; return any other value unchanged."""
    if getattr(value, "ndim", None) != 0:
        return value
    try:
        scalar: object = value.item()
    except (AttributeError, TypeError, ValueError, RuntimeError):  # a meta tensor, for example
        return value
    return scalar


def checked_items(operation: str, argument: str, value: Any, expected: str) -> list[Any]:
    """Return the items of an ordered ``value`` as a new list; a str, set or scalar is refused."""
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
    raise argument_type_error(operation, argument, value, expected)


def checked_mapping(operation: str, argument: str, value: Any, expected: str) -> Mapping[Any, Any]:
    """Return ``value`` if it is a mapping; a TensorDict, which may unwrap its items, is refused."""
    if isinstance(value, Mapping) and not hasattr(value, "batch_size"):
        return value
    raise argument_type_error(operation, argument, value, expected)


def is_utf8(text: str) -> bool:
    """Return whether UTF-8 can encode ``text``: it has no lone surrogate."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
