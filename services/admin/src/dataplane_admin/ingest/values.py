"""Limits of OTLP attributes and of sample ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol  # Any: repeated fields have no common type

from google.protobuf.message import Message
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.refusal import RecordRefused
from dataplane_admin.store.texts import bytes_of_id

MAX_COUNT = (1 << 32) - 1
"""Maximum value of a field that counts dropped items."""


class Attributed(Protocol):
    """A record with attributes: a span, an event, a link or a log record."""

    dropped_attributes_count: int

    @property
    def attributes(self) -> Any:
        """Key-value pairs, from which items can be deleted."""


def digest_of(record: Message) -> bytes:
    """Return eight bytes that are the same for equal records."""
    encoded = record.SerializeToString(deterministic=True)
    return hashlib.blake2b(encoded, digest_size=8).digest()


def ids_within(sample_ids: Sequence[str], limits: Limits) -> tuple[bytes, ...]:
    """Return the sample ids of a record as bytes.

    Raises RecordRefused if there are too many, or one is too long.
    """
    if len(sample_ids) > limits.ids:
        raise RecordRefused(f"the record has more than {limits.ids} samples")
    ids = tuple([bytes_of_id(sample_id) for sample_id in sample_ids])
    if ids and max(map(len, ids)) > limits.id_bytes:
        raise RecordRefused(f"a sample id is longer than {limits.id_bytes} bytes")
    return ids


def add_dropped(record: Attributed, count: int) -> None:
    """Count attributes as dropped, up to the field's maximum."""
    record.dropped_attributes_count = min(record.dropped_attributes_count + count, MAX_COUNT)


def cut(record: Attributed, limits: Limits) -> bool:
    """Cut the attributes of a record to the limits; return whether anything changed."""
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
            return sum(_cut_value(item, length) for item in value.array_value.values) > 0
        case "kvlist_value":
            return sum(_cut_value(item.value, length) for item in value.kvlist_value.values) > 0
    return False
