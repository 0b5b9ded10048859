"""What a source server and its clients say to each other over TCP.

Everything is a frame: four bytes of length, little-endian, then a message in msgpack, typed on
decoding. The answer to a READ is instead chunks: four bytes of length and that many raw bytes,
until a length of 0, behind which a frame says whether the version was held to the last byte.
A client begins with HELLO, which names the life of the process it expects to meet.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec
import numpy as np

from refit_mx.errors import ProtocolError
from refit_mx.reads import COLUMNS, ReadTable

FORMAT: Literal["refit-mx-source/1"] = "refit-mx-source/1"
MOST_READS = 1 << 15
"""Reads of one request; a client splits larger tables."""
MOST_READ_BYTES = 1 << 28
"""Bytes of one request, unless a single read has more, which may be the whole arena."""
MOST_HELLO_FRAME = 4096
MOST_FRAME = MOST_READS * len(COLUMNS) * 8 + MOST_HELLO_FRAME
LENGTH = struct.Struct("<I")
ROW_BYTES = len(COLUMNS) * 8

Status = Literal["ok", "gone", "incarnation", "refused", "full", "changed"]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First of every connection.

    Attributes:
        incarnation: that the server must have.
    """

    incarnation: str
    format: Literal["refit-mx-source/1"] = FORMAT


class Read(msgspec.Struct, frozen=True, tag=True):
    """Send the bytes of reads, in the order of rows, j, i.

    Attributes:
        version_id: that must be held all the while.
        rows: of a `ReadTable`, little-endian.
    """

    version_id: str
    rows: bytes


class Digest(msgspec.Struct, frozen=True, tag=True):
    """Send `refit_mx.digests.digest_of_reads` of the arena, in `Answer.data`."""

    version_id: str
    rows: bytes


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Say whether a version is held."""

    version_id: str


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Send the `refit_mx.manifest.Structure` of a version, encoded, in `Answer.data`."""

    version_id: str


class Tell(msgspec.Struct, frozen=True, tag=True):
    """Send the `refit_mx.manifest.Manifest` of a version, encoded as the control plane has its
    digest, in `Answer.data`."""

    version_id: str


Request = Hello | Read | Digest | Ping | Describe | Tell


class Answer(msgspec.Struct, frozen=True, tag=True):
    """To every request; behind the chunks, if there are any.

    Attributes:
        status: ``ok``; ``gone``, the version is not held or was dropped meanwhile; ``incarnation``,
            this is another process or a later one; ``refused``, what was asked is not allowed;
            ``full``, too many connections; ``changed``, to DIGEST, the memory is not as it was
            published.
        message: says what was wrong.
        data: digests, a structure or a manifest.
    """

    status: Status
    message: str = ""
    data: bytes = b""


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


def frame(message: Request | Answer) -> bytes:
    """As it travels, with its length."""
    data = _encoder.encode(message)
    return LENGTH.pack(len(data)) + data


def decode_request(data: bytes | bytearray) -> Request:
    """Without its length.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _requests.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"request: {error}; expected {FORMAT}") from None


def decode_answer(data: bytes | bytearray) -> Answer:
    """Without its length.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _answers.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"answer: {error}; expected {FORMAT}") from None


def encode_reads(reads: ReadTable) -> bytes:
    """``rows`` of a request."""
    return reads.rows.astype("<i8", copy=False).tobytes()


def decode_reads(rows: bytes) -> ReadTable:
    """What `encode_reads` made.

    Raises:
        ProtocolError: it is not whole rows, or there are too many.
    """
    if len(rows) % ROW_BYTES or len(rows) > MOST_READS * ROW_BYTES:
        raise ProtocolError(
            f"reads: {len(rows)} bytes; expected a multiple of {ROW_BYTES}, "
            f"at most {MOST_READS} reads"
        )
    table = np.frombuffer(rows, "<i8").reshape(-1, len(COLUMNS))
    return ReadTable(table.astype(np.int64, copy=False))
