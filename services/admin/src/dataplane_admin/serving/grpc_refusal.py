"""Refusal of OTLP over gRPC, with one sentence as the status of the call.

gRPC is HTTP/2 with prior knowledge. This implements just enough of it to answer the first call with
UNIMPLEMENTED (https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md, "Trailers-Only").
Exporters log its text and do not retry.
"""

from __future__ import annotations

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SENTENCE = (
    b"OTLP over gRPC is not served; keep the port, set OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
)

_HEAD_BYTES = 9
_HEADERS, _SETTINGS, _GOAWAY = 1, 4, 7
_END_STREAM_AND_HEADERS = 0x05
_ACK = 0x01
_MAX_UNREAD_BYTES = 1 << 16


class GrpcRefusal:
    """Answers to one connection of a gRPC client. `greeting` is sent first."""

    def __init__(self) -> None:
        self.greeting = _frame(_SETTINGS, 0, 0, b"")
        self._unread = b""
        self._is_answered = False

    def receive(self, data: bytes) -> bytes:
        """Return the answer to ``data``, which starts with the preface on the first call."""
        if self._is_answered:
            return b""
        self._unread = (self._unread + data).removeprefix(PREFACE)[:_MAX_UNREAD_BYTES]
        answer = b""
        while len(self._unread) >= _HEAD_BYTES:
            end = _HEAD_BYTES + int.from_bytes(self._unread[:3], "big")
            kind, flags = self._unread[3], self._unread[4]
            stream = int.from_bytes(self._unread[5:_HEAD_BYTES], "big") & 0x7FFF_FFFF
            if kind == _HEADERS:
                self._is_answered = True
                last = stream.to_bytes(4, "big")
                return (
                    answer
                    + _frame(_HEADERS, _END_STREAM_AND_HEADERS, stream, _TRAILERS)
                    + _frame(_GOAWAY, 0, 0, last + b"\0\0\0\0" + SENTENCE)
                )
            if len(self._unread) < end:
                break
            if kind == _SETTINGS and not flags & _ACK:
                answer += _frame(_SETTINGS, _ACK, 0, b"")
            self._unread = self._unread[end:]
        return answer


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """Return a header field without indexing or Huffman coding (RFC 7541, section 6.2.2)."""
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


# 0x88 is ":status: 200" of HPACK's static table.
_TRAILERS = (
    b"\x88"
    + _literal(b"content-type", b"application/grpc")
    + _literal(b"grpc-status", b"12")
    + _literal(b"grpc-message", SENTENCE)
)
