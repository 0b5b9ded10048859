"""From an export request of logs to what is stored: its lifecycle events and nothing else.

Log records of others are taken and dropped: they may hold the text of samples, which is not kept.
Of lifecycle events the body is the ids; it is taken out of the record. One of which the body cannot
be read is refused: without ids it would say something else, as that a whole partition was cleared.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter

from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, LogsData, ResourceLogs, ScopeLogs

from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.values import (
    MOST_INT,
    RUN_ID,
    STEP,
    WEIGHT_VERSION,
    cut,
    digest_of,
    find,
    int_of,
    text_of,
)
from dataplane_admin.store import Batch, LifecycleEvent
from dataplane_admin.store.batch import wait_digest
from dataplane_admin.store.texts import bytes_of_id
from observability.records import (
    EVENT_PREFIX,
    SPAN_ID_BYTES,
    TRACE_ID_BYTES,
    Process,
    process_of,
    valid_id,
)

_PARTITION = "dataplane.partition"
_TASK = "dataplane.task"
_SAMPLES = "dataplane.samples"
_WAIT = "dataplane.wait"
_AGAIN = "dataplane.again_s"
_TOLD = frozenset({RUN_ID, STEP, WEIGHT_VERSION, _PARTITION, _TASK, _SAMPLES, _WAIT, _AGAIN})
_NOTHING = AnyValue()


class _Refused(Exception):
    """A record that is not kept; says why."""


def batch_of_logs(request: LogsData, limits: Limits, now_ns: int) -> Batch:
    """What a request brings.

    Args:
        request: decoded; it is changed.
        limits: of a request.
        now_ns: the present, in nanoseconds since 1970: the time of an event that reports none.
    """
    events: list[LifecycleEvent] = []
    reasons: Counter[str] = Counter()
    refused: list[bytes] = []
    ignored: list[bytes] = []
    for resource_logs in request.resource_logs:
        process = process_of(resource_logs.resource)
        told = find(resource_logs.resource.attributes, _TOLD)
        run_id = text_of(told[RUN_ID]) if RUN_ID in told else ""
        for scope_logs in resource_logs.scope_logs:
            frame = _Frame(resource_logs, scope_logs)
            for record in scope_logs.log_records:
                if not record.event_name.startswith(EVENT_PREFIX):
                    ignored.append(digest_of(record))
                    continue
                try:
                    if len(events) >= limits.events:
                        raise _Refused(f"a request may bring {limits.events}")
                    events.append(_event(record, process, run_id, frame, limits, now_ns))
                except _Refused as reason:
                    refused.append(digest_of(record))
                    reasons[str(reason)] += 1
    return Batch(
        events=tuple(events),
        refused=tuple(refused),
        ignored=tuple(ignored),
        reasons=tuple(f"{count} log records: {reason}" for reason, count in reasons.items()),
    )


class _Frame:
    """Wraps single records in the resource and scope that they came in."""

    def __init__(self, resource_logs: ResourceLogs, scope_logs: ScopeLogs) -> None:
        self._data = LogsData()
        outer = self._data.resource_logs.add(schema_url=resource_logs.schema_url)
        outer.resource.CopyFrom(resource_logs.resource)
        self._scope = outer.scope_logs.add(schema_url=scope_logs.schema_url)
        self._scope.scope.CopyFrom(scope_logs.scope)

    def encode(self, record: LogRecord) -> bytes:
        """An OTLP LogsData with the one record."""
        del self._scope.log_records[:]
        self._scope.log_records.append(record)
        return self._data.SerializeToString(deterministic=True)


def _event(
    record: LogRecord,
    process: Process,
    run_id: str,
    frame: _Frame,
    limits: Limits,
    now_ns: int,
) -> LifecycleEvent:
    time_ns = record.time_unix_nano or record.observed_time_unix_nano
    if time_ns > MOST_INT:
        raise _Refused("its time is after the year 2262")
    sample_ids = _ids(record.body, limits)
    record.ClearField("body")
    cut(record, limits)
    told = find(record.attributes, _TOLD)
    blob = frame.encode(record)
    digest = hashlib.blake2b(blob, digest_size=16)
    for sample_id in sample_ids:
        digest.update(len(sample_id).to_bytes(4, "little") + sample_id)
    if not time_ns:
        # Not in the digest: sent again it comes at another time.
        time_ns = record.observed_time_unix_nano = now_ns
        blob = frame.encode(record)
    name = record.event_name.removeprefix(EVENT_PREFIX)
    wait = text_of(told.get(_WAIT, _NOTHING))
    samples = int_of(told.get(_SAMPLES, _NOTHING))
    return LifecycleEvent(
        digest=digest.digest(),
        record=blob,
        sample_ids=sample_ids,
        name=name,
        run_id=(text_of(told[RUN_ID]) if RUN_ID in told else "") or run_id,
        partition=text_of(told.get(_PARTITION, _NOTHING)),
        task=text_of(told.get(_TASK, _NOTHING)),
        step=int_of(told.get(STEP, _NOTHING)),
        weight_version=int_of(told.get(WEIGHT_VERSION, _NOTHING)),
        samples=len(sample_ids) if samples is None else samples,
        time_ns=time_ns,
        trace_id=valid_id(record.trace_id, TRACE_ID_BYTES) or None,
        span_id=valid_id(record.span_id, SPAN_ID_BYTES) or None,
        wait=wait_digest(process, wait) if wait else None,
        process=process.full_label,
        process_id=bytes.fromhex(process.identity),
        again=_AGAIN in told,
    )


def _ids(body: AnyValue, limits: Limits) -> tuple[bytes, ...]:
    """The ids of a record; none of an empty body."""
    if body.WhichOneof("value") not in (None, "string_value"):
        raise _Refused("its body is no text")
    if not body.string_value:
        return ()
    try:
        found = json.loads(body.string_value)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise _Refused("its body is no JSON list of sample ids")
    if len(found) > limits.ids:
        raise _Refused(f"it names more than {limits.ids} samples")
    ids = tuple([bytes_of_id(one) for one in found])
    if ids and max(map(len, ids)) > limits.id_bytes:
        raise _Refused(f"a sample id is longer than {limits.id_bytes} bytes")
    return ids
