"""Messages between a source server and its clients over TCP.

Everything is a frame: four bytes of length, little-endian, then a msgpack message of a known type.
Only the answer to READ starts with chunks: each has four bytes of length and that many raw bytes. A
length of 0 ends them, and a frame follows that says whether the version was held throughout.

    frame             | length, 4 bytes | message |
    answer to READ    | length | bytes | length | bytes | ... | 0 | frame of an Answer |

A client begins with HELLO, which has the incarnation of the process that it expects.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec
import numpy as np

from refit_mx.errors import ProtocolError
from refit_mx.manifest.format import decoded
from refit_mx.manifest.reads import COLUMNS, ReadTable

FORMAT: Literal["refit-mx-source/1"] = "refit-mx-source/1"
MAX_READS = 1 << 15
"""Reads in one request; a client splits larger tables."""
MAX_READ_BYTES = 1 << 28
"""Bytes of one request, unless a single read has more, up to the complete arena."""
MAX_HELLO_FRAME = 4096
MAX_FRAME = MAX_READS * len(COLUMNS) * 8 + MAX_HELLO_FRAME
LENGTH = struct.Struct("<I")
ROW_BYTES = len(COLUMNS) * 8

Stored = Literal["nothing", "manifest", "structure"]
Status = Literal["ok", "gone", "incarnation", "refused", "full", "changed"]


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message on every connection.

    Attributes:
        incarnation: incarnation that the server must have.
    """

    incarnation: str
    format: Literal["refit-mx-source/1"] = FORMAT


class Read(msgspec.Struct, frozen=True, tag=True):
    """Request for the bytes of reads, row by row, each in the order of `ReadTable`: j, then i."""

    version_id: str  # version that the source must hold throughout
    rows: bytes  # rows of a `ReadTable`, little-endian


class Digest(msgspec.Struct, frozen=True, tag=True):
    """Request for `refit_mx.manifest.digests.digest_of_reads` over the arena, in `Answer.data`."""

    version_id: str
    rows: bytes


class Get(msgspec.Struct, frozen=True, tag=True):
    """Request for what the source stores with a version, in `Answer.data`."""

    version_id: str  # version that the source must hold
    # Encoded `refit_mx.manifest.format.Manifest` or `refit_mx.manifest.format.Structure`;
    # ``nothing`` only checks that the version is held.
    what: Stored = "nothing"


Request = Hello | Read | Digest | Get


class Answer(msgspec.Struct, frozen=True, tag=True):
    """Answer to every request, after the chunks if there are any.

    Attributes:
        status: ``ok``; ``gone``, the version is not held or was dropped meanwhile; ``incarnation``,
            another process answers; ``refused``, the request is not allowed; ``full``, too many
            connections; ``changed``, on DIGEST, the memory differs from what was published.
        message: description of the error.
        data: digests, a structure or a manifest.
    """

    status: Status
    message: str = ""
    data: bytes = b""


_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_answers = msgspec.msgpack.Decoder(Answer)


def frame(message: Request | Answer) -> bytes:
    """Encode a message for sending, with its length."""
    data = _encoder.encode(message)
    return LENGTH.pack(len(data)) + data


def decode_request(data: bytes | bytearray) -> Request:
    """Decode a request without its length.

    Raises:
        ProtocolError: the data is not a request.
    """
    return decoded(_requests, data, "request", FORMAT)


def decode_answer(data: bytes | bytearray) -> Answer:
    """Decode an answer without its length.

    Raises:
        ProtocolError: the data is not an answer.
    """
    return decoded(_answers, data, "answer", FORMAT)


def encode_reads(reads: ReadTable) -> bytes:
    """Encode a table as ``rows`` of a request."""
    return reads.rows.astype("<i8", copy=False).tobytes()


def decode_reads(rows: bytes) -> ReadTable:
    """Decode the result of `encode_reads`.

    Raises:
        ProtocolError: the length is no multiple of a row, or there are too many rows.
    """
    if len(rows) % ROW_BYTES or len(rows) > MAX_READS * ROW_BYTES:
        raise ProtocolError(
            f"reads: {len(rows)} bytes; expected a multiple of {ROW_BYTES}, "
            f"at most {MAX_READS} reads"
        )
    table = np.frombuffer(rows, "<i8").reshape(-1, len(COLUMNS))
    return ReadTable(table.astype(np.int64, copy=False))
