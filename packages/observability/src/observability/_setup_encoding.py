"""OTLP messages of spans and events, of which most attributes are the same few again and again.

An attribute is encoded once and its bytes are used from then on: protobuf reads messages written
one after the other as one message with the fields of all. That is ten times as fast as what the
SDK's exporters do, which make objects of every attribute of every span. What is not plain, or not
within the SDK's limits, is left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import (
    Any,
    TypeAlias,
    TypeVar,
)  # Any: attribute values, of which the plain ones are found here

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope as ScopeMessage
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord as EventMessage
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage
from opentelemetry.proto.trace.v1.trace_pb2 import Span as SpanMessage
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

Plain: TypeAlias = str | bool | int | float
_Holder: TypeAlias = Callable[..., SpanMessage | EventMessage | ResourceMessage | ScopeMessage]

_LONG = 256
"""Texts of more characters are hardly told twice, and are not kept."""
_MOST_ITEMS = 16
"""Nor are longer arrays."""
_KEPT = 2048


class Unusual(Exception):
    """Only the SDK knows what to do with it."""


def attribute_bytes(holder: _Holder, attributes: Mapping[str, Any]) -> bytes:
    """Encode a holder's attributes.

    Args:
        holder: the class of messages that they are of.
        attributes: to plain values, and to lists or tuples of plain values of one type.

    Raises:
        Unusual: an attribute is something else.
        ValueError: it does not fit into OTLP: an integer of more than 64 bits, half a surrogate.
    """
    parts = []
    for key, value in attributes.items():
        kind = type(value)
        if (kind is str and len(value) <= _LONG) or kind is int or kind is bool:
            parts.append(_kept_plain(holder, key, value))
        elif kind is float or kind is str:
            parts.append(_plain(holder, key, value))
        elif kind is tuple or kind is list:
            keep = len(value) <= _MOST_ITEMS and all(
                type(item) is str and len(item) <= _LONG for item in value
            )
            parts.append((_kept_array if keep else _array)(holder, key, *value))
        else:
            raise Unusual(f"attribute {key!r} is of type {kind.__name__}")
    return b"".join(parts)


def encodable(text: str) -> str:
    """A text that UTF-8 has bytes for: half a surrogate pair is replaced, two halves are joined."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


Item = TypeVar("Item")
Request = TypeVar("Request", ExportTraceServiceRequest, ExportLogsServiceRequest)


def encoded_by_sdk(
    items: Sequence[Item], encode: Callable[[Sequence[Item]], Request], empty: Request
) -> tuple[Request, int]:
    """A request of what only the SDK encodes, without what it cannot encode either.

    Args:
        items: spans or log records.
        encode: the SDK's.
        empty: is filled where the items have to be encoded one by one.

    Returns:
        The request, and how many items it lacks.
    """
    try:
        return encode(items), 0
    except Exception:  # noqa: BLE001  # one of them, and the others are not to be lost with it
        lacking = 0
    for item in items:
        try:
            empty.MergeFrom(encode([item]))
        except Exception:  # noqa: BLE001
            lacking += 1
    return empty, lacking


def resource_message(resource: Resource) -> ResourceMessage | None:
    """OTLP's form of a resource; None if only the SDK knows what to do with it."""
    try:
        resource.schema_url.encode()  # goes beside it
        return ResourceMessage.FromString(attribute_bytes(ResourceMessage, resource.attributes))
    except Exception:  # noqa: BLE001  # a user's own attributes may be anything
        return None


def scope_message(scope: InstrumentationScope) -> ScopeMessage | None:
    """OTLP's form of a scope; None as `resource_message`."""
    try:
        (scope.schema_url or "").encode()  # goes beside it
        message = ScopeMessage(name=scope.name, version=scope.version or "")
        message.MergeFromString(attribute_bytes(ScopeMessage, scope.attributes or {}))
    except Exception:  # noqa: BLE001
        return None
    return message


def sender_of(exporter: object) -> Callable[[bytes], bool] | None:
    """What an exporter of the SDK sends a request with that is encoded already.

    That is no public part of it; None if this release of the SDK has it elsewhere.
    """
    export = getattr(getattr(exporter, "_client", None), "export", None)
    if export is None:
        return None

    def send(request: bytes) -> bool:
        return bool(export(request).success)

    return send


def send_what_can_be(
    send: Callable[[bytes], bool],
    request: ExportTraceServiceRequest | ExportLogsServiceRequest,
    *,
    items: int,
    lacking: int,
    leave_out: Callable[[int], object] | None,
) -> bool:
    """Send a request that lacks some of its items, which nobody can encode; whether it was sent.

    If it lacks all of them there is nothing to send, which is no failure.
    """
    if lacking and leave_out is not None:
        leave_out(lacking)
    return 0 < lacking == items or send(request.SerializeToString())


def _plain(holder: _Holder, key: str, value: Plain) -> bytes:
    return _attribute(holder, key, _value(value))


# Typed, since 1, 1.0 and True are one key else.
_kept_plain = lru_cache(maxsize=_KEPT, typed=True)(_plain)


def _array(holder: _Holder, key: str, *values: Plain) -> bytes:
    kinds = {type(value) for value in values}
    if len(kinds) > 1 or not kinds <= {str, bool, int, float}:
        raise Unusual(f"attribute {key!r} is a sequence of {sorted(map(str, kinds))}")
    array = ArrayValue(values=[_value(value) for value in values])
    return _attribute(holder, key, AnyValue(array_value=array))


_kept_array = lru_cache(maxsize=_KEPT, typed=True)(_array)


def _attribute(holder: _Holder, key: str, value: AnyValue) -> bytes:
    if type(key) is not str or not key:
        raise Unusual(f"the key {key!r}")
    encoded: bytes = holder(attributes=[KeyValue(key=key, value=value)]).SerializeToString()
    return encoded


def _value(value: Plain) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    return AnyValue(double_value=value)
