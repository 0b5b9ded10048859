"""OTLP as JSON: protobuf's mapping, but ids of traces and spans are hexadecimal.

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
# Of an id that is no hexadecimal text: its length is wrong, so that its record alone is refused.
_NO_ID = base64.b64encode(b"?").decode()

_M = TypeVar("_M", bound=Message)


class NotOtlp(ValueError):
    """A body that is no request of its kind."""


def parse_json(body: bytes, message: _M) -> _M:
    """Fill a message from JSON; names that it does not have are passed over.

    What is no UTF-8, and half a pair of surrogates, is U+FFFD in the message.

    Raises:
        NotOtlp: it is no JSON, or not of this message.
    """
    try:
        told = json.loads(body.decode("utf-8-sig", "replace"))
        if not isinstance(told, dict):
            raise NotOtlp("expected a JSON object")
        _prepare(told, message.DESCRIPTOR)
        json_format.ParseDict(told, message, ignore_unknown_fields=True)
    except NotOtlp:
        raise
    # A request decides what stands where, and the parser trips over it in several ways.
    except (
        json_format.ParseError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        reason = str(error).encode(errors="replace").decode()[:200]
        raise NotOtlp(f"not OTLP in JSON: {type(error).__name__}: {reason}") from error
    return message


def write_json(message: Message) -> bytes:
    """A message as OTLP's JSON."""
    return json_format.MessageToJson(message, indent=None).encode()


def _prepare(told: dict[str, Any], descriptor: Any) -> None:
    """Take out what a message does not have, and write ids and texts as protobuf expects them."""
    for name in list(told):
        field = descriptor.fields_by_camelcase_name.get(name) or descriptor.fields_by_name.get(name)
        if field is None:
            del told[name]
        elif isinstance(told[name], list):
            told[name] = [_value(one, field) for one in told[name]]
        else:
            told[name] = _value(told[name], field)


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
