"""Remove what quotes samples from requests, unless the service was started to keep it.

Spans and events of this project's packages quote no sample. But a job may be instrumented by others
as well, and new instrumentation appears faster than a list of its names. So a rule decides, by key
and by length, in this order:

1. Numbers and booleans are kept.
2. A key that `_KEYS` or `_NAMESPACES` names is kept: it names a model, a process, a place in code.
3. Text under a key that speaks of content ("prompt", "spanInputs", "tool.parameters") is removed,
   and so is all text in the namespaces of instrumentation of models, whatever its key.
4. Text longer than `MAX_TEXT` characters is removed.

The rule holds wherever an attribute can stand: resource, scope, span, event, link, log record, data
point. What it cannot catch is short text under a key that says nothing of it, and what is part of a
name. Of exceptions, the types and the frames of a Python stack trace are kept, not the messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.metrics.v1.metrics_pb2 import MetricsData
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

from dataplane_admin.ingest.values import Attributed, add_dropped

MAX_TEXT = 128
"""Characters of text under a key that no rule names, and of a span's or event's name."""

# Facts about a process, its machine, its code and the operation; nothing of a sample.
_NAMESPACES = (
    "cloud.",
    "code.",
    "container.",
    "dataplane.",
    "deployment.",
    "host.",
    "k8s.",
    "messaging.",
    "network.",
    "os.",
    "process.",
    "refit.",
    "rl.",
    "server.",
    "service.",
    "telemetry.",
    "thread.",
)
_KEYS = frozenset(
    {
        "ai.model.id",
        "ai.model.provider",
        "ai.operationId",
        "ai.response.finishReason",
        "ai.response.id",
        "ai.response.model",
        "exception.type",
        "gen_ai.agent.id",
        "gen_ai.agent.name",
        "gen_ai.conversation.id",
        "gen_ai.operation.name",
        "gen_ai.output.type",
        "gen_ai.provider.name",
        "gen_ai.request.id",
        "gen_ai.request.model",
        "gen_ai.response.finish_reasons",
        "gen_ai.response.id",
        "gen_ai.response.model",
        "gen_ai.system",
        "gen_ai.token.type",
        "gen_ai.tool.call.id",
        "gen_ai.tool.name",
        "gen_ai.tool.type",
        "input.mime_type",
        "langfuse.environment",
        "langfuse.observation.model.name",
        "langfuse.observation.type",
        "langfuse.release",
        "langfuse.version",
        "llm.model_name",
        "llm.provider",
        "llm.request.type",
        "llm.system",
        "mlflow.spanType",
        "mlflow.traceRequestId",
        "openinference.span.kind",
        "output.mime_type",
        "tool.id",
        "tool.name",
        "traceloop.entity.name",
        "traceloop.span.kind",
        "traceloop.workflow.name",
    }
)
_OF_MODELS = (
    "ai.",
    "document.",
    "embedding.",
    "gen_ai.",
    "input.",
    "langfuse.",
    "langsmith.",
    "llm.",
    "logfire.",
    "message.",
    "mlflow.",
    "openinference.",
    "output.",
    "pydantic_ai.",
    "reranker.",
    "retrieval.",
    "tool.",
    "tool_",
    "traceloop.",
)
_CONTENT = frozenset(
    word
    for line in (
        "answer answers args arguments body choice choices completion completions content contents",
        "document documents input inputs instruction instructions message messages output outputs",
        "parameters prompt prompts query question reasoning response result results statement text",
        "texts thought thoughts transcript utterance",
    )
    for word in line.split()
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_STACKTRACE = "exception.stacktrace"
_TYPE = re.compile(r"[A-Za-z_][\w.]*(?=:|\Z)")
_FRAME = re.compile(r' *File "[^"]*", line \d+')
_HEADERS = (
    "Traceback (most recent call last):",
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


def remove_sample_text(request: TracesData | LogsData | MetricsData) -> bool:
    """Remove attributes that may quote samples, count them as dropped; return whether any was."""
    changed = False
    for record in _records(request):
        changed |= _remove(record)
        if isinstance(record, Span):
            changed |= _shorten_names(record)
    return changed


def _records(request: TracesData | LogsData | MetricsData) -> Iterator[Attributed]:
    """All that has attributes, outermost first."""
    if isinstance(request, TracesData):
        for resource_spans in request.resource_spans:
            yield resource_spans.resource
            for scope_spans in resource_spans.scope_spans:
                yield scope_spans.scope
                for span in scope_spans.spans:
                    yield span
                    yield from span.events
                    yield from span.links
    elif isinstance(request, LogsData):
        for resource_logs in request.resource_logs:
            yield resource_logs.resource
            for scope_logs in resource_logs.scope_logs:
                yield scope_logs.scope
                yield from scope_logs.log_records
    else:
        for resource_metrics in request.resource_metrics:
            yield resource_metrics.resource
            for scope_metrics in resource_metrics.scope_metrics:
                yield scope_metrics.scope
                for metric in scope_metrics.metrics:
                    if kind := metric.WhichOneof("data"):
                        yield from getattr(metric, kind).data_points


def _remove(record: Attributed) -> bool:
    attributes = record.attributes
    changed = False
    places = []
    for place, pair in enumerate(attributes):
        max_text = _max_text(pair.key)
        # A value is no longer than its pair is in bytes.
        if max_text is None or pair.ByteSize() <= max_text:
            continue
        if pair.key == _STACKTRACE:
            frames = _frames(pair.value.string_value)
            changed |= frames != pair.value.string_value
            pair.value.string_value = frames
        elif _length(pair.value) > max_text:
            places.append(place)
    for place in reversed(places):
        del attributes[place]
    if places and hasattr(record, "dropped_attributes_count"):  # data points have none
        add_dropped(record, len(places))
    return changed or bool(places)


@lru_cache(maxsize=4096)
def _max_text(key: str) -> int | None:
    """How many characters of text a key may have; None: as many as the service stores."""
    if len(key) > MAX_TEXT:
        return 0
    if key in _KEYS or key.startswith(_NAMESPACES):
        return None
    if key == _STACKTRACE or key.startswith(_OF_MODELS):
        return 0
    words = {word.lower() for word in _WORD.findall(key)}
    return 0 if words & _CONTENT else MAX_TEXT


def _length(value: AnyValue) -> int:
    """Characters, or bytes, of all text in a value."""
    match value.WhichOneof("value"):
        case "string_value":
            return len(value.string_value)
        case "bytes_value":
            return len(value.bytes_value)
        case "array_value":
            return sum(map(_length, value.array_value.values))
        case "kvlist_value":
            return sum(map(_length_of_pair, value.kvlist_value.values))
    return 0


def _length_of_pair(pair: KeyValue) -> int:
    return len(pair.key) + _length(pair.value)


def _frames(stacktrace: str) -> str:
    """Return a Python stack trace with the types of its exceptions in place of their messages."""
    kept: list[str] = []
    in_frames = follows_frame = False
    for line in stacktrace.splitlines():
        if line.startswith(_HEADERS):
            kept.append(line)
            in_frames = True
        elif in_frames and _FRAME.match(line):
            kept.append(line)
            follows_frame = True
            continue
        elif follows_frame and line.startswith("    "):
            kept.append(line)  # the line of source
        elif in_frames and not line.startswith(" "):
            if found := _TYPE.match(line):
                kept.append(found.group())
            in_frames = False  # what follows is the message
        follows_frame = False
    return "\n".join(kept)


def _shorten_names(span: Span) -> bool:
    changed = False
    if len(span.name) > MAX_TEXT:
        span.name = span.name[:MAX_TEXT]
        changed = True
    for event in span.events:
        if len(event.name) > MAX_TEXT:
            event.name = event.name[:MAX_TEXT]
            changed = True
    if message := span.status.message:
        # The SDK writes the exception's type and its text here.
        found = _TYPE.match(message)
        kept = found.group() if found else ""
        changed |= kept != message
        span.status.message = kept
    return changed
