"""Attributes of OTLP: looked up, and cut to the limits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol  # Any: repeated fields have no common type

from google.protobuf.message import Message
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from dataplane_admin.ingest.limits import Limits

RUN_ID = "rl.run_id"
STEP = "rl.step"
WEIGHT_VERSION = "rl.weight_version"

MOST_INT = (1 << 63) - 1
"""That a database holds."""

MOST_COUNT = (1 << 32) - 1
"""That a field of what was dropped holds."""


class Attributed(Protocol):
    """A span, one of its events or links, a log record: what has attributes."""

    dropped_attributes_count: int

    @property
    def attributes(self) -> Any:
        """Key-value pairs, which can be deleted."""


def text_of(value: AnyValue) -> str:
    """Text of an attribute; empty of another value."""
    return value.string_value


def int_of(value: AnyValue) -> int | None:
    """A whole number, also one told as decimal text (baggage is text); else None."""
    kind = value.WhichOneof("value")
    if kind == "int_value":
        return value.int_value
    if kind == "string_value":
        text = value.string_value
        if len(text) < 20 and text.isascii() and text.isdigit() and int(text) <= MOST_INT:
            return int(text)
    return None


def find(pairs: Iterable[KeyValue], names: frozenset[str]) -> Mapping[str, AnyValue]:
    """The attributes of these names that have a value; of two of a name the later one."""
    found: dict[str, AnyValue] = {}
    for pair in pairs:
        key = pair.key
        if key in names and pair.value.WhichOneof("value") is not None:
            found[key] = pair.value
    return found


def digest_of(record: Message) -> bytes:
    """Eight bytes that are equal for equal records."""
    encoded = record.SerializeToString(deterministic=True)
    return hashlib.blake2b(encoded, digest_size=8).digest()


def add_dropped(record: Attributed, count: int) -> None:
    """Count attributes as dropped, up to the greatest number that the field holds."""
    record.dropped_attributes_count = min(record.dropped_attributes_count + count, MOST_COUNT)


def cut(record: Attributed, limits: Limits) -> bool:
    """Cut the attributes of a record to the limits; whether anything was changed."""
    changed = False
    attributes = record.attributes
    over = len(attributes) - limits.attributes
    if over > 0:
        del attributes[limits.attributes :]
        add_dropped(record, over)
        changed = True
    for pair in attributes:
        changed |= _cut_value(pair.value, limits.attribute_length)
    return changed


def _cut_value(value: AnyValue, length: int) -> bool:
    match value.WhichOneof("value"):
        case "string_value" if len(value.string_value) > length:
            value.string_value = value.string_value[:length]
            return True
        case "bytes_value" if len(value.bytes_value) > length:
            value.bytes_value = value.bytes_value[:length]
            return True
        case "array_value":
            return sum(_cut_value(one, length) for one in value.array_value.values) > 0
        case "kvlist_value":
            return sum(_cut_value(one.value, length) for one in value.kvlist_value.values) > 0
    return False
