"""Lifecycle events: what happened to which samples, as OpenTelemetry log records.

docs/telemetry.md lists them. One record per batch operation, in parts where a batch is so large
that one record would not pass a collector. The ids are one JSON text: as an array of OTLP values
they would take the SDK a thousand times as long to encode.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
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
from observability.lane import later
from observability.operations import ObservedClient, Observer, Op, Operation
from observability.waits import Wait, waits

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
]

MOST_IDS = 4096
"""Sample ids in one record."""

_SCOPE = "rl-dataplane"
_DONE: dict[Op, EventName] = {
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
    """Tell what happened. Does nothing in a process without an SDK.

    Args:
        event: what.
        partition_id: where, None if it concerns none.
        sample_ids: the samples.
        samples: their number, if it is not that of ``sample_ids``.
        context: of the span that it belongs to; the current one if None.
        error: what it failed by; its class is told.
        facts: further attributes, "dataplane." is put before their names; None ones are left out.
    """
    provider = get_logger_provider()
    logger = _logger(provider)
    current = otel_context.get_current() if context is None else context
    name = f"dataplane.{event}"
    if not logger.enabled(context=current, severity_number=SeverityNumber.INFO, event_name=name):
        return
    if error is not None:
        facts[telemetry.ERROR_TYPE] = type(error).__qualname__
    told = partial(
        _tell,
        logger,
        name,
        current,
        time.time_ns(),
        partition_id,
        tuple(sample_ids),  # a copy: the list is the caller's
        len(sample_ids) if samples is None else samples,
        facts,
    )
    later(provider, told)


def _tell(
    logger: Logger,
    name: str,
    context: Context,
    time_ns: int,
    partition_id: str | None,
    sample_ids: Sequence[str],
    samples: int,
    facts: Mapping[str, AnyValue],
) -> None:
    attributes: dict[str, AnyValue] = dict(telemetry.step_facts(context))
    if partition_id is not None:
        attributes["dataplane.partition"] = partition_id
        attributes["dataplane.samples"] = samples
    for key, value in facts.items():
        if value is not None:
            attributes[key if key == telemetry.ERROR_TYPE else f"dataplane.{key}"] = value
    parts = max(1, -(-len(sample_ids) // MOST_IDS))
    for part in range(parts):
        if parts > 1:
            attributes["dataplane.part"], attributes["dataplane.parts"] = part, parts
        logger.emit(
            event_name=name,
            timestamp=time_ns,
            observed_timestamp=time_ns,
            severity_number=SeverityNumber.INFO,
            context=context,
            attributes=dict(attributes),
            body=_as_json(sample_ids[part * MOST_IDS : (part + 1) * MOST_IDS]),
        )


def _logger(provider: LoggerProvider) -> Logger:
    """Ours, of the provider that is set now."""
    global _made
    if provider is not _made[0]:
        _made = provider, provider.get_logger(_SCOPE)
    return _made[1]


# Kept with its provider: making one takes as long as the rest of an event.
_made: tuple[LoggerProvider | None, Logger] = None, NoOpLogger(_SCOPE)


def _as_json(sample_ids: Sequence[str]) -> str:
    try:
        return msgspec.json.encode(sample_ids).decode()
    except UnicodeEncodeError:  # half a surrogate pair: JSON has an escape for it
        return json.dumps(sample_ids)


class LifecycleDataPlaneClient(ObservedClient):
    """A client whose batch operations are lifecycle events.

    Args:
        inner: the client that does the work.
    """

    def __init__(self, inner: DataPlaneClient) -> None:
        super().__init__(inner, [Lifecycle()])


class Lifecycle(Observer):
    """Emits the events of operations."""

    def begin(self, call: Operation) -> Wait | None:
        """See `Observer.begin`."""
        if call.op != "claim_meta" or not call.options.get("blocking"):
            return None
        context = otel_context.get_current()

        def tell(wait: Wait) -> None:
            emit(
                "waiting",
                call.partition_id,
                samples=call.options.get("batch_size"),
                context=context,
                wait=wait.name,
                since_ns=wait.since_ns,
                again_s=wait.again_s,
                task=call.tasks[0],
                fields=list(call.fields),
            )

        return waits.begin(tell)

    def end(self, call: Operation, state: Wait | None) -> None:
        """See `Observer.end`."""
        if state is not None:
            waits.end(state)
        if call.op == "claim_meta":
            self._claimed(call, state)
        elif call.error is None and (event := _DONE.get(call.op)) is not None:
            if call.op == "clear" and call.sample_ids is not None and not call.sample_ids:
                return  # without ids the event would speak of the whole partition
            moves = call.op in ("put", "get", "get_data")
            emit(
                event,
                call.partition_id,
                call.sample_ids or (),
                samples=call.n_keys,
                fields=list(call.fields) or None,
                bytes=call.n_bytes if moves else None,
                tasks=list(call.tasks) if call.op == "register" else None,
                task=call.tasks[0] if call.tasks and call.op != "register" else None,
                withdrawn=call.options.get("withdrawn"),
            )

    @staticmethod
    def _claimed(call: Operation, wait: Wait | None) -> None:
        told = wait.name if wait is not None and wait.told else None
        if call.error is not None:
            emit(
                "claim_failed",
                call.partition_id,
                task=call.tasks[0],
                fields=list(call.fields),
                wait=told,
                error=call.error,
            )
        elif call.sample_ids or told:
            emit(
                "claimed",
                call.partition_id,
                call.sample_ids or (),
                task=call.tasks[0],
                fields=list(call.fields),
                wait_s=call.wall_s,
                wait=told,
                leased=call.leased or None,
            )
