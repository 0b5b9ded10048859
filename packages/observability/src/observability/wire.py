"""OTLP over HTTP as bytes: requests, their compression, and responses.

https://opentelemetry.io/docs/specs/otlp/#otlphttp. If a string is not UTF-8, only its invalid bytes
are lost.
"""

from __future__ import annotations

import zlib
from functools import cache
from typing import Any, Literal, TypeVar  # Any: messages made at run time, and their descriptors

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

_M = TypeVar("_M", bound=Message)

Kind = Literal["traces", "logs", "metrics"]
"""The signal of a request; also the last part of the path it is posted to."""

PROTOBUF = "application/x-protobuf"

INVALID_ARGUMENT, RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE = 3, 8, 13, 14
"""Values of google.rpc.Code, the error code in a response."""

_GZIP = 31  # zlib's number for the gzip format


class TooLong(ValueError):
    """An inflated body exceeds the limit."""


def gunzip(body: bytes, max_bytes: int) -> bytes:
    """Inflate gzip of one or several members (RFC 1952), up to ``max_bytes``.

    Raises:
        TooLong: the inflated body is longer.
        ValueError: the body is not gzip, or its stream is truncated.
    """
    plain = bytearray()
    rest = body
    try:
        while rest:
            gzip = zlib.decompressobj(wbits=_GZIP)
            plain += gzip.decompress(rest, max_bytes + 1 - len(plain))
            if len(plain) > max_bytes:
                raise TooLong(f"the inflated body is longer than {max_bytes} bytes")
            if not gzip.eof:
                raise ValueError("the gzip stream is truncated")
            rest = gzip.unused_data
    except zlib.error as error:
        raise ValueError(f"the body is not gzip: {error}") from error
    return bytes(plain)


_ANSWERS: dict[Kind, tuple[type[Any], str]] = {
    "traces": (ExportTraceServiceResponse, "rejected_spans"),
    "logs": (ExportLogsServiceResponse, "rejected_log_records"),
    "metrics": (ExportMetricsServiceResponse, "rejected_data_points"),
}
"""Class of the response to a request, and its field that counts rejected records."""


def export_answer(kind: Kind, refused: int = 0, reason: str = "") -> Message:
    """Return the response to a request of which ``refused`` records were rejected."""
    message, count = _ANSWERS[kind]
    answer: Message = message()
    if refused:
        setattr(answer.partial_success, count, refused)  # type: ignore[attr-defined]
        answer.partial_success.error_message = reason  # type: ignore[attr-defined]
    return answer


def rejected_of(kind: Kind, answer: bytes) -> int:
    """Return how many records a response reports as rejected.

    Raises:
        google.protobuf.message.DecodeError: ``answer`` is not such a response.
    """
    message, count = _ANSWERS[kind]
    rejected: int = getattr(message.FromString(answer).partial_success, count)
    return rejected


def status_answer(code: int, message: str) -> bytes:
    """Encode a ``google.rpc.Status`` by hand: two fields are not worth a dependency.

    Field 1 is the code, a varint. Field 2 is the message: its length as a varint, then its bytes.
    """
    text = message.encode(errors="replace")
    return b"\x08" + bytes([code]) + b"\x12" + _varint(len(text)) + text


def _varint(number: int) -> bytes:
    """Encode a varint: 7 bits per byte, lowest first; the top bit marks all bytes but the last."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def parse(message: _M, body: bytes) -> bool:
    """Fill an empty message from protobuf.

    Returns:
        True if a string was not UTF-8; U+FFFD replaces its invalid bytes.

    Raises:
        google.protobuf.message.DecodeError: ``body`` is not such a message.
    """
    try:
        message.ParseFromString(body)
    except DecodeError:
        # Strings and bytes have one wire format: parse again with bytes in place of strings.
        lenient = _with_bytes(message.DESCRIPTOR)()
        lenient.ParseFromString(body)
        _replace_wrong_bytes(lenient, message.DESCRIPTOR)
        message.ParseFromString(lenient.SerializeToString())
        return True
    return False


@cache
def _with_bytes(descriptor: Descriptor) -> type[Message]:
    """Return a message class with the same fields, but bytes in place of strings."""
    pool = DescriptorPool()
    _add(pool, descriptor.file, set())
    return GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def _add(pool: DescriptorPool, file: FileDescriptor, known: set[str]) -> None:
    if file.name in known:
        return
    known.add(file.name)
    for other in file.dependencies:
        _add(pool, other, known)
    copy = FileDescriptorProto()
    file.CopyToProto(copy)
    waiting = list(copy.message_type)
    while waiting:
        message = waiting.pop()
        waiting += message.nested_type
        for field in message.field:
            if field.type == FieldDescriptorProto.TYPE_STRING:
                field.type = FieldDescriptorProto.TYPE_BYTES
    pool.Add(copy)


def _replace_wrong_bytes(lenient: Any, strict: Any) -> None:
    for field, value in lenient.ListFields():
        declared = strict.fields_by_number[field.number]
        if declared.type == FieldDescriptor.TYPE_MESSAGE:
            for item in value if declared.is_repeated else (value,):
                _replace_wrong_bytes(item, declared.message_type)
        elif declared.type == FieldDescriptor.TYPE_STRING:
            if declared.is_repeated:
                value[:] = [_text(item) for item in value]
            else:
                setattr(lenient, field.name, _text(value))


def _text(value: bytes) -> bytes:
    return value.decode("utf-8", "replace").encode()
