"""OTLP as JSON: protobuf's mapping, but ids of traces and spans are hexadecimal.

https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding
"""

from __future__ import annotations

import base64
import json
from typing import Any, TypeVar  # Any: JSON values

from google.protobuf import json_format
from google.protobuf.message import Message

_IDS = ("traceId", "spanId", "parentSpanId", "trace_id", "span_id", "parent_span_id")
_DEEPEST = 60

_M = TypeVar("_M", bound=Message)


class NotOtlp(ValueError):
    """A body that is no request of its kind."""


def parse_json(body: bytes, message: _M) -> _M:
    """Fill a message from JSON; names that it does not have are passed over.

    Raises:
        NotOtlp: it is no JSON, or not of this message.
    """
    try:
        told = json.loads(body)
        if not isinstance(told, dict):
            raise NotOtlp("expected a JSON object")
        _hex_to_base64(told, 0)
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
        raise NotOtlp(f"not OTLP in JSON: {type(error).__name__}: {str(error)[:200]}") from error
    return message


def write_json(message: Message) -> bytes:
    """A message as OTLP's JSON."""
    return json_format.MessageToJson(message, indent=None).encode()


def _hex_to_base64(told: Any, depth: int) -> None:
    if depth > _DEEPEST:
        raise NotOtlp(f"nested deeper than {_DEEPEST} levels")
    if isinstance(told, dict):
        for name in _IDS:
            value = told.get(name)
            if isinstance(value, str) and value:
                told[name] = base64.b64encode(bytes.fromhex(value)).decode()
        for value in told.values():
            if isinstance(value, dict | list):
                _hex_to_base64(value, depth + 1)
    elif isinstance(told, list):
        for value in told:
            if isinstance(value, dict | list):
                _hex_to_base64(value, depth + 1)
