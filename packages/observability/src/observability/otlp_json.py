"""OTLP in protobuf's JSON mapping, except that trace and span ids are hexadecimal.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
"""

from __future__ import annotations

import base64
import json
from typing import Any, TypeVar  # Any: JSON values and descriptors

from google.protobuf import json_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_IDS = frozenset({"trace_id", "span_id", "parent_span_id"})
# Replaces an id that is not hexadecimal. No id has this length, so only the record with this id is
# rejected.
_NO_ID = base64.b64encode(b"?").decode()

_M = TypeVar("_M", bound=Message)


class NotOtlp(ValueError):
    """The JSON is not an OTLP message."""


def parse_json(message: _M, body: bytes) -> _M:
    """Fill a message from JSON; see `fill`.

    Raises:
        NotOtlp: the body is not JSON, or does not match the message.
    """
    return fill(message, read_object(body))


def read_object(body: bytes) -> dict[str, Any]:
    """Return a JSON object; U+FFFD replaces invalid UTF-8.

    Raises:
        NotOtlp: the body is not a JSON object.
    """
    try:
        data = json.loads(body.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError) as error:
        raise _not_otlp(error) from error
    if not isinstance(data, dict):
        raise NotOtlp("expected a JSON object")
    return data


def fill(message: _M, data: dict[str, Any]) -> _M:
    """Fill a message from a JSON object, which is modified; ignore unknown names.

    U+FFFD replaces lone surrogates. An id that is not hexadecimal becomes an invalid one-byte id.

    Raises:
        NotOtlp: the object does not match the message.
    """
    try:
        _prepare(data, message.DESCRIPTOR)
        json_format.ParseDict(data, message, ignore_unknown_fields=True)
    # Requests are untrusted, and the parser fails in several ways.
    except (
        json_format.ParseError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        raise _not_otlp(error) from error
    return message


def _not_otlp(error: Exception) -> NotOtlp:
    reason = str(error).encode(errors="replace").decode()[:200]
    return NotOtlp(f"not OTLP in JSON: {type(error).__name__}: {reason}")


def write_json(message: Message) -> bytes:
    """Return a message as OTLP's JSON."""
    return json_format.MessageToJson(message, indent=None).encode()


def _prepare(data: dict[str, Any], descriptor: Any) -> None:
    """Remove fields that the message does not have, and convert ids and texts for protobuf."""
    for name in list(data):
        field = descriptor.fields_by_camelcase_name.get(name) or descriptor.fields_by_name.get(name)
        if field is None:
            del data[name]
        elif isinstance(data[name], list):
            data[name] = [_value(item, field) for item in data[name]]
        else:
            data[name] = _value(data[name], field)


def _value(value: Any, field: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_MESSAGE and isinstance(value, dict):
        _prepare(value, field.message_type)
    elif isinstance(value, str):
        if field.type == FieldDescriptor.TYPE_STRING:
            return _text(value)
        if field.type == FieldDescriptor.TYPE_BYTES and field.name in _IDS:
            return _id(value)
    return value


def _text(value: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value


def _id(value: str) -> str:
    try:
        return base64.b64encode(bytes.fromhex(value)).decode()
    except ValueError:
        return _NO_ID
