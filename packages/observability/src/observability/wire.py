"""The bytes of OTLP over HTTP: decompression and parsing of requests, encoding of responses.

See https://opentelemetry.io/docs/specs/otlp/#otlphttp. If a string is not UTF-8, U+FFFD replaces
its invalid bytes; the rest of the request is unchanged.
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

OtlpSignal = Literal["traces", "logs", "metrics"]
"""OTLP signal: traces, logs or metrics; also the last part of a request's URL path."""

PROTOBUF = "application/x-protobuf"
"""Media type of protobuf in OTLP over HTTP."""

INVALID_ARGUMENT, RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE = 3, 8, 13, 14
"""Values of ``google.rpc.Code``, the error code in a response."""

_GZIP_WBITS = 31  # 16 selects gzip's header and trailer, 15 the largest window


class BodyTooLong(ValueError):
    """The decompressed body exceeds the limit."""


def gunzip(body: bytes, max_bytes: int) -> bytes:
    """Decompress gzip of one or several members (RFC 1952).

    Raises:
        BodyTooLong: the decompressed body is longer than ``max_bytes``.
        ValueError: the body is not gzip, or its stream is truncated.
    """
    decompressed = bytearray()
    remaining = body
    try:
        while remaining:
            member = zlib.decompressobj(wbits=_GZIP_WBITS)
            # Decompress up to one byte more than the limit, to detect a body that exceeds it. The
            # argument is never 0, which zlib reads as no limit.
            decompressed += member.decompress(remaining, max_bytes + 1 - len(decompressed))
            if len(decompressed) > max_bytes:
                raise BodyTooLong(f"the decompressed body is longer than {max_bytes} bytes")
            if not member.eof:
                raise ValueError("the gzip stream is truncated")
            remaining = member.unused_data
    except zlib.error as error:
        raise ValueError(f"the body is not gzip: {error}") from error
    return bytes(decompressed)


_RESPONSES: dict[OtlpSignal, tuple[type[Any], str]] = {
    "traces": (ExportTraceServiceResponse, "rejected_spans"),
    "logs": (ExportLogsServiceResponse, "rejected_log_records"),
    "metrics": (ExportMetricsServiceResponse, "rejected_data_points"),
}
"""Message class of each response, and its field that counts rejected records."""


def export_response(signal: OtlpSignal, rejected: int = 0, reason: str = "") -> Message:
    """Return the response to a request of which ``rejected`` records were not accepted."""
    message_class, count_field = _RESPONSES[signal]
    response: Message = message_class()
    if rejected:
        setattr(response.partial_success, count_field, rejected)  # type: ignore[attr-defined]
        response.partial_success.error_message = reason  # type: ignore[attr-defined]
    return response


def rejected_records(signal: OtlpSignal, response: bytes) -> tuple[int, str]:
    """Return the number of records that an encoded response rejects, and its message.

    Raises:
        google.protobuf.message.DecodeError: ``response`` is not such a response.
    """
    message_class, count_field = _RESPONSES[signal]
    partial_success = message_class.FromString(response).partial_success
    return getattr(partial_success, count_field), partial_success.error_message


def status_response(code: int, message: str) -> bytes:
    """Return an encoded ``google.rpc.Status``.

    It is encoded by hand, because two fields are not worth a dependency. Each field begins with its
    tag: 8 times the field number, plus 0 for a varint or 2 for bytes preceded by their length.

        08 code              field 1; a code is below 128, so its varint has one byte
        12 length message    field 2; the length is a varint
    """
    text = message.encode(errors="replace")
    return b"\x08" + bytes([code]) + b"\x12" + _varint(len(text)) + text


def _varint(number: int) -> bytes:
    """Return a number of at least 0 as a varint.

    Each byte holds 7 bits, the lowest first. The top bit is set in all bytes but the last.
    """
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def parse(message: _M, body: bytes) -> bool:
    """Parse protobuf into an empty message.

    Returns:
        True if a string was not UTF-8. U+FFFD replaces its invalid bytes.

    Raises:
        google.protobuf.message.DecodeError: ``body`` is not such a message.
    """
    try:
        message.ParseFromString(body)
    except DecodeError:
        # Strings and bytes have the same wire format. Parse again with strings declared as bytes,
        # which are not checked for UTF-8. If this fails too, the body is malformed.
        lenient = _class_without_strings(message.DESCRIPTOR)()
        lenient.ParseFromString(body)
        _replace_invalid_bytes(lenient, message.DESCRIPTOR)
        message.ParseFromString(lenient.SerializeToString())
        return True
    return False


@cache
def _class_without_strings(descriptor: Descriptor) -> type[Message]:
    """Return a message class with the same fields, except that strings are declared as bytes."""
    pool = DescriptorPool()
    _add_without_strings(pool, descriptor.file, set())
    return GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def _add_without_strings(pool: DescriptorPool, file: FileDescriptor, added: set[str]) -> None:
    """Add a file and its dependencies to a pool, with strings declared as bytes.

    Args:
        pool: the pool.
        file: the file.
        added: names of the files that are in the pool; new names are added.
    """
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add_without_strings(pool, dependency, added)
    copy = FileDescriptorProto()
    file.CopyToProto(copy)
    pending = list(copy.message_type)
    while pending:
        message = pending.pop()
        pending += message.nested_type
        for field in message.field:
            if field.type == FieldDescriptorProto.TYPE_STRING:
                field.type = FieldDescriptorProto.TYPE_BYTES
    pool.Add(copy)


def _replace_invalid_bytes(lenient: Any, strict: Any) -> None:
    """Make the strings of a message valid UTF-8.

    Args:
        lenient: the message, with strings declared as bytes.
        strict: descriptor of the same message with strings.
    """
    for field, value in lenient.ListFields():
        declared = strict.fields_by_number[field.number]
        if declared.type == FieldDescriptor.TYPE_MESSAGE:
            for item in value if declared.is_repeated else (value,):
                _replace_invalid_bytes(item, declared.message_type)
        elif declared.type == FieldDescriptor.TYPE_STRING:
            if declared.is_repeated:
                value[:] = [_valid_utf8(item) for item in value]
            else:
                setattr(lenient, field.name, _valid_utf8(value))


def _valid_utf8(value: bytes) -> bytes:
    return value.decode("utf-8", "replace").encode()
