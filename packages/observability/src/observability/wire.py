"""OTLP messages from protobuf, of which a string that is not UTF-8 costs that string only."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar  # Any: messages that are made at run time, and their descriptors

from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

_M = TypeVar("_M", bound=Message)


def parse(message: _M, body: bytes) -> bool:
    """Fill an empty message from protobuf.

    Returns:
        Whether a string was no UTF-8: its wrong bytes are U+FFFD in the message.

    Raises:
        google.protobuf.message.DecodeError: ``body`` is no such message.
    """
    try:
        message.ParseFromString(body)
    except DecodeError:
        # Strings and bytes look alike on the wire: read again with bytes in the place of strings.
        lenient = _with_bytes(message.DESCRIPTOR)()
        lenient.ParseFromString(body)
        _replace_wrong_bytes(lenient, message.DESCRIPTOR)
        message.ParseFromString(lenient.SerializeToString())
        return True
    return False


@cache
def _with_bytes(descriptor: Descriptor) -> type[Message]:
    """A class of messages with the same fields, of which the strings are bytes."""
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
        meant = strict.fields_by_number[field.number]
        if meant.type == FieldDescriptor.TYPE_MESSAGE:
            for one in value if meant.is_repeated else (value,):
                _replace_wrong_bytes(one, meant.message_type)
        elif meant.type == FieldDescriptor.TYPE_STRING:
            if meant.is_repeated:
                value[:] = [_text(one) for one in value]
            else:
                setattr(lenient, field.name, _text(value))


def _text(value: bytes) -> bytes:
    return value.decode("utf-8", "replace").encode()
