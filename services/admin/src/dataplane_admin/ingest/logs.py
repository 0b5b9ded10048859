"""Log records of traces, other than lifecycle events, reduced to what is stored.

A body often quotes samples. So it is treated like an attribute whose key names content, see
`sample_text`: without a `Redaction`, only a number or boolean is stored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord

from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.redaction import Redaction
from dataplane_admin.ingest.refusal import RecordRefused
from dataplane_admin.ingest.sample_text import MAX_TEXT
from dataplane_admin.ingest.values import add_dropped, cut
from dataplane_admin.store.batch import TraceLog
from dataplane_admin.store.compressed import compress
from observability.records import SPAN_ID_BYTES, TRACE_ID_BYTES, valid_id, value_of

_MAX_ATTRIBUTES = 32
_MAX_SEVERITY = 16
_MAX_RECORD_BYTES = 1 << 16
_PLAIN = ("bool_value", "int_value", "double_value")


def names_trace(record: LogRecord) -> bool:
    """Return whether a log record belongs to a trace."""
    return bool(valid_id(record.trace_id, TRACE_ID_BYTES))


def trace_log(
    record: LogRecord,
    encode: Callable[[LogRecord], bytes],
    limits: Limits,
    redaction: Redaction | None,
) -> TraceLog:
    """Return a log record for the store.

    Args:
        record: a record of a trace, whose attributes are redacted; it is changed.
        encode: returns OTLP LogsData with a record.
        limits: limits of attributes; ``attribute_length`` also limits the body.
        redaction: applied to the body; None removes its text.

    Raises:
        RecordRefused: the record, with its resource, is too long.
    """
    _reduce_body(record, limits.attribute_length, redaction)
    record.event_name = record.event_name[:MAX_TEXT]
    record.severity_text = record.severity_text[:_MAX_SEVERITY]
    record.span_id = valid_id(record.span_id, SPAN_ID_BYTES)
    over = len(record.attributes) - _MAX_ATTRIBUTES
    if over > 0:
        del record.attributes[_MAX_ATTRIBUTES:]
        add_dropped(record, over)
    cut(record, limits)
    encoded = encode(record)
    if len(encoded) > _MAX_RECORD_BYTES:
        raise RecordRefused(
            f"a log record with its resource has {len(encoded)} bytes; expected at most "
            f"{_MAX_RECORD_BYTES}"
        )
    return TraceLog(
        trace_id=record.trace_id,
        digest=hashlib.blake2b(encoded, digest_size=16).digest(),
        record=compress(encoded),
    )


def _reduce_body(record: LogRecord, max_length: int, redaction: Redaction | None) -> None:
    """Replace a body by its text, or remove it."""
    kind = record.body.WhichOneof("value")
    if redaction is None:
        if kind not in _PLAIN:
            record.ClearField("body")
        return
    if kind is None:
        return
    redaction.value(record.body)
    value = value_of(record.body)
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    record.body.string_value = text[:max_length]
