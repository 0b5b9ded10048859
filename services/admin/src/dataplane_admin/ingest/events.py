"""Decoding of export requests of logs: lifecycle events, facts and text of samples, other records.

Other records are stored if they name a trace, see `logs`, and dropped if not. The body of a
lifecycle event has the sample ids, which are removed from the record. An event with an unreadable
body is rejected: without ids it would mean something else, such as a clear of the entire partition.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from itertools import islice
from typing import Literal

from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, LogsData, ResourceLogs, ScopeLogs

from dataplane_admin.ingest.limits import Limits
from dataplane_admin.ingest.logs import names_trace, trace_log
from dataplane_admin.ingest.redaction import Redaction
from dataplane_admin.ingest.refusal import RecordRefused
from dataplane_admin.ingest.samples import samples_of
from dataplane_admin.ingest.values import cut, digest_of, ids_within
from dataplane_admin.store import Batch, LifecycleEvent
from dataplane_admin.store.batch import (
    RunChange,
    SampleFacts,
    SampleText,
    TraceLog,
    wait_digest,
)
from dataplane_admin.store.chunk import MAX_INT
from dataplane_admin.store.compressed import compress
from dataplane_admin.store.texts import bounded, storable
from observability.records import (
    EVENT_PREFIX,
    Process,
    event_of,
    process_and_run,
    sample_ids_of,
)
from observability.samples import FACTS, TEXT
from observability.views import attributes

_RUN_STATES: Mapping[str, Literal["running", "finished", "stopped", "failed"]] = {
    "run_started": "running",
    "run_finished": "finished",
    "run_stopped": "stopped",
    "run_failed": "failed",
}
# Limits of a configuration, the same as in `observability.record_run`.
_MAX_KEYS, _MAX_KEY = 1000, 200
_EVENT_ATTRIBUTES = frozenset(
    f"dataplane.{name}" for name in ("partition", "task", "samples", "wait", "report_every_s")
) | {"rl.run_id", "rl.step", "rl.weight_version"}
_RUN_EVENT_ATTRIBUTES = _EVENT_ATTRIBUTES | {
    "dataplane.config",
    "dataplane.reason",
    "dataplane.resumed_from",
    "error.type",
}


def batch_of_logs(
    request: LogsData, limits: Limits, now_ns: int, *, redaction: Redaction | None = None
) -> Batch:
    """Return the lifecycle events, facts and text of samples, and logs of a request as a batch.

    Args:
        request: the decoded request; it is changed.
        now_ns: the time of events that report no time, in nanoseconds since 1970.
        redaction: applied to turns and tokens of samples and to bodies of other records; None
            removes their text.
    """
    samples: list[SampleFacts | SampleText] = []
    sample_records = 0
    events: list[LifecycleEvent] = []
    logs: list[TraceLog] = []
    reasons: Counter[str] = Counter()
    refused: list[bytes] = []
    ignored: list[bytes] = []
    for resource_logs in request.resource_logs:
        process, run = process_and_run(resource_logs.resource)
        for scope_logs in resource_logs.scope_logs:
            encoder = _Encoder(resource_logs, scope_logs)
            for record in scope_logs.log_records:
                name = record.event_name
                try:
                    if name == FACTS or (name == TEXT and redaction is not None):
                        _check_count(sample_records, limits)
                        sample_records += 1
                        facts = event_of(record, process, run, only=_EVENT_ATTRIBUTES).attributes
                        samples += samples_of(record, facts, limits, now_ns, redaction)
                    elif name.startswith(EVENT_PREFIX):
                        _check_count(len(events), limits)
                        events.append(_event(record, process, run, encoder, limits, now_ns))
                    elif name == TEXT or not names_trace(record):
                        ignored.append(digest_of(record))
                    else:
                        _check_count(len(logs), limits)
                        logs.append(trace_log(record, encoder.encode, limits, redaction))
                except RecordRefused as reason:
                    refused.append(digest_of(record))
                    reasons[str(reason)] += 1
    return Batch(
        events=tuple(events),
        logs=tuple(logs),
        samples=tuple(samples),
        refused=tuple(refused),
        ignored=tuple(ignored),
        reasons=tuple(f"{count} log records: {reason}" for reason, count in reasons.items()),
    )


def _check_count(taken: int, limits: Limits) -> None:
    if taken >= limits.events:
        raise RecordRefused(f"more than {limits.events} in a request")


class _Encoder:
    """Encoder of single records with their resource and scope."""

    def __init__(self, resource_logs: ResourceLogs, scope_logs: ScopeLogs) -> None:
        self._data = LogsData()
        outer = self._data.resource_logs.add(schema_url=resource_logs.schema_url)
        outer.resource.CopyFrom(resource_logs.resource)
        self._scope = outer.scope_logs.add(schema_url=scope_logs.schema_url)
        self._scope.scope.CopyFrom(scope_logs.scope)

    def encode(self, record: LogRecord) -> bytes:
        """Return OTLP LogsData with this record."""
        del self._scope.log_records[:]
        self._scope.log_records.append(record)
        return self._data.SerializeToString(deterministic=True)


def _event(
    record: LogRecord,
    process: Process,
    run: object,
    encoder: _Encoder,
    limits: Limits,
    now_ns: int,
) -> LifecycleEvent:
    time_ns = record.time_unix_nano or record.observed_time_unix_nano
    if time_ns > MAX_INT:
        raise RecordRefused("the time is after the year 2262")
    sample_ids = _ids(record.body, limits)
    record.ClearField("body")
    cut(record, limits)
    blob = encoder.encode(record)
    digest = hashlib.blake2b(blob, digest_size=16)
    for sample_id in sample_ids:
        digest.update(len(sample_id).to_bytes(4, "little") + sample_id)
    if not time_ns:
        # Not in the digest: a resent event gets another receive time.
        time_ns = record.observed_time_unix_nano = now_ns
        blob = encoder.encode(record)
    state = _RUN_STATES.get(record.event_name.removeprefix(EVENT_PREFIX))
    event = event_of(
        record, process, run, only=_EVENT_ATTRIBUTES if state is None else _RUN_EVENT_ATTRIBUTES
    )

    def text(name: str) -> str:
        return attributes.text(event.attributes, name)

    def integer(name: str) -> int | None:
        number = attributes.integer(event.attributes, name)
        return number if number is None or number <= MAX_INT else None

    change = None
    if state is not None:
        error = [text("error.type"), text("dataplane.reason")] if state == "failed" else []
        change = RunChange(
            state=state,
            error=": ".join(part for part in error if part),
            resumed_from=integer("dataplane.resumed_from"),
            config=_config(event.attributes.get("dataplane.config")),
        )
    wait = text("dataplane.wait")
    samples = integer("dataplane.samples")
    return LifecycleEvent(
        digest=digest.digest(),
        record=compress(blob),
        sample_ids=sample_ids,
        name=event.name,
        run_id=text("rl.run_id"),
        partition=text("dataplane.partition"),
        task=text("dataplane.task"),
        step=integer("rl.step"),
        weight_version=integer("rl.weight_version"),
        samples=len(sample_ids) if samples is None else samples,
        time_ns=time_ns,
        trace_id=bytes.fromhex(event.trace_id) or None,
        span_id=bytes.fromhex(event.span_id) or None,
        wait=wait_digest(process, wait) if wait else None,
        process=process.full_label,
        process_id=bytes.fromhex(process.identity),
        is_periodic=event.attributes.get("dataplane.report_every_s") is not None,
        run=change,
    )


def _config(value: object) -> dict[str, str] | None:
    if not isinstance(value, Mapping):
        return None
    texts = {
        key: text if isinstance(text, str) else json.dumps(text, default=str)
        for key, text in islice(value.items(), _MAX_KEYS)
    }
    return {storable(bounded(key, _MAX_KEY)): storable(text) for key, text in texts.items()}


def _ids(body: AnyValue, limits: Limits) -> tuple[bytes, ...]:
    named = sample_ids_of(body)
    if named is None:
        raise RecordRefused("the body is not a JSON list of sample ids")
    return ids_within(named, limits)
