"""Lifecycle events of samples and runs, as OpenTelemetry log records.

docs/telemetry.md lists them. A batch operation emits one record, or several parts if one record
would exceed a collector's limit. The body of a record is the sample ids as one JSON string: an
array of OTLP values would take the SDK a thousand times as long to encode.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Literal

import msgspec
from opentelemetry import context as otel_context
from opentelemetry._logs import (
    Logger,
    LoggerProvider,
    NoOpLogger,
    SeverityNumber,
    get_logger_provider,
)
from opentelemetry.context import Context
from opentelemetry.util.types import AnyValue

from dataplane_core import DataPlaneClient, telemetry
from observability.middleware.observed_client import ObservedClient
from observability.middleware.operation import Observer, Op, Operation
from observability.middleware.waits import PendingCall, waits

EventName = Literal[
    "registered",
    "waiting",
    "answered",
    "put",
    "claimed",
    "claim_failed",
    "read",
    "acknowledged",
    "released",
    "cleared",
    "trained",
    "dropped",
    "refit_installed",
    "generator_joined",
    "generator_left",
    "policy_rank_left",
    "run_started",
    "run_finished",
    "run_stopped",
    "run_failed",
]

MAX_IDS = 4096
"""Maximum number of sample ids in one record."""

_SCOPE = "rl-dataplane"
_EVENTS: dict[Op, EventName] = {
    "register": "registered",
    "put": "put",
    "get": "read",
    "get_data": "read",
    "acknowledge": "acknowledged",
    "release": "released",
    "clear": "cleared",
}


def emit(
    event: EventName,
    partition_id: str | None = None,
    sample_ids: Sequence[str] = (),
    *,
    samples: int | None = None,
    context: Context | None = None,
    error: BaseException | None = None,
    **facts: AnyValue,
) -> None:
    """Emit a lifecycle event; without an SDK in this process, do nothing.

    Args:
        event: name of the event.
        partition_id: the partition; None for an event without one.
        sample_ids: ids of the samples.
        samples: number of samples, if it differs from the length of ``sample_ids``.
        context: trace context of the event; None is the current context.
        error: the exception of a failed operation, whose class is recorded.
        facts: further attributes, which get the prefix "dataplane.". None values are omitted.
    """
    logger = logger_of(get_logger_provider())
    current = otel_context.get_current() if context is None else context
    name = f"dataplane.{event}"
    if not logger.enabled(context=current, severity_number=SeverityNumber.INFO, event_name=name):
        return
    attributes: dict[str, AnyValue] = dict(telemetry.step_facts(current))
    if partition_id is not None:
        attributes["dataplane.partition"] = partition_id
        attributes["dataplane.samples"] = len(sample_ids) if samples is None else samples
    attributes |= {f"dataplane.{key}": value for key, value in facts.items() if value is not None}
    if error is not None:
        attributes[telemetry.ERROR_TYPE] = type(error).__qualname__
    time_ns = time.time_ns()
    parts = max(1, -(-len(sample_ids) // MAX_IDS))
    for part in range(parts):
        if parts > 1:
            attributes["dataplane.part"], attributes["dataplane.parts"] = part, parts
        logger.emit(
            event_name=name,
            timestamp=time_ns,
            observed_timestamp=time_ns,
            severity_number=SeverityNumber.INFO,
            context=current,
            attributes=dict(attributes),
            body=_as_json(sample_ids[part * MAX_IDS : (part + 1) * MAX_IDS]),
        )


def logger_of(provider: LoggerProvider) -> Logger:
    """Return the logger with which this package emits its log records."""
    global _cached
    if provider is not _cached[0]:
        _cached = provider, provider.get_logger(_SCOPE)
    return _cached[1]


# The last provider and its logger. Creating a logger takes as long as the rest of `emit`.
_cached: tuple[LoggerProvider | None, Logger] = None, NoOpLogger(_SCOPE)


def _as_json(sample_ids: Sequence[str]) -> str:
    try:
        return msgspec.json.encode(sample_ids).decode()
    except (UnicodeEncodeError, TypeError):  # an id has a lone surrogate or is a `numpy.str_`
        return json.dumps(sample_ids)


class LifecycleDataPlaneClient(ObservedClient):
    """A client that emits a lifecycle event for each batch operation.

    Args:
        inner: the wrapped client.
    """

    def __init__(self, inner: DataPlaneClient) -> None:
        super().__init__(inner, [Lifecycle()])


class Lifecycle(Observer):
    """An observer that emits lifecycle events of operations."""

    def begin(self, call: Operation) -> PendingCall | None:
        if call.op != "claim_meta" or not call.options.get("blocking"):
            return None
        context = otel_context.get_current()

        def report(wait: PendingCall) -> None:
            emit(
                "waiting",
                call.partition_id,
                samples=call.options.get("batch_size"),
                context=context,
                wait=wait.name,
                since_ns=wait.since_ns,
                report_every_s=wait.report_every_s,
                task=call.tasks[0],
                fields=list(call.fields),
            )

        return waits.begin(report)

    def end(self, call: Operation, state: PendingCall | None) -> None:
        if state is not None:
            waits.end(state)
        if call.op == "claim_meta":
            self._emit_claim(call, state)
        elif call.error is None and (event := _EVENTS.get(call.op)) is not None:
            if call.op == "clear" and call.sample_ids is not None and not call.sample_ids:
                return  # an event without ids would mean that the partition was cleared
            moves_data = call.op in ("put", "get", "get_data")
            emit(
                event,
                call.partition_id,
                call.sample_ids or (),
                samples=call.n_keys,
                fields=list(call.fields) or None,
                bytes=call.n_bytes if moves_data else None,
                tasks=list(call.tasks) if call.op == "register" else None,
                task=call.tasks[0] if call.tasks and call.op != "register" else None,
                withdrawn=call.options.get("withdrawn"),
            )

    @staticmethod
    def _emit_claim(call: Operation, wait: PendingCall | None) -> None:
        # The event that names a reported wait ends it. A wait without reports needs no end.
        wait_name = wait.name if wait is not None and wait.reported else None
        if call.error is not None:
            emit(
                "claim_failed",
                call.partition_id,
                task=call.tasks[0],
                fields=list(call.fields),
                wait=wait_name,
                error=call.error,
            )
        elif call.sample_ids or wait_name:
            emit(
                "claimed",
                call.partition_id,
                call.sample_ids or (),
                task=call.tasks[0],
                fields=list(call.fields),
                wait_s=call.wall_s,
                wait=wait_name,
                leased=call.leased or None,
            )
