"""Log records of a trace, with times on the clock of its root."""

from __future__ import annotations

from collections.abc import Iterator

from opentelemetry.proto.logs.v1.logs_pb2 import LogsData

from dataplane_admin import models
from observability.records import event_of, process_and_run, value_of
from observability.views import Step

# https://opentelemetry.io/docs/specs/otel/logs/data-model/#field-severitynumber: four numbers each
_SEVERITIES = ("TRACE", "DEBUG", "INFO", "WARN", "ERROR", "FATAL")


def trace_logs(step: Step, data: LogsData) -> list[models.TraceLog]:
    """Return the log records by time; those without a time come first."""
    return sorted(_logs(step, data), key=lambda log: (log.time_s is not None, log.time_s or 0.0))


def _logs(step: Step, data: LogsData) -> Iterator[models.TraceLog]:
    for resource_logs in data.resource_logs:
        process, _ = process_and_run(resource_logs.resource)
        ahead_ns = step.clock_offsets.get(process.host, 0)
        for scope_logs in resource_logs.scope_logs:
            scope = scope_logs.scope
            for record in scope_logs.log_records:
                event = event_of(record, process, None)
                time_ns = event.time_ns
                yield models.TraceLog(
                    time_s=(time_ns - ahead_ns - step.start_ns) / 1e9 if time_ns else None,
                    process=step.labels.get(process, process.label),
                    span_id=event.span_id,
                    severity=_severity(record.severity_number, record.severity_text),
                    name=record.event_name,
                    body=_text(value_of(record.body)),
                    scope=f"{scope.name} {scope.version}".strip(),
                    attributes=dict(event.attributes),
                )


def _severity(number: int, text: str) -> str:
    place = (number - 1) // 4
    return _SEVERITIES[place] if 0 <= place < len(_SEVERITIES) else text


def _text(body: object) -> str:
    return "" if body is None else str(body)
