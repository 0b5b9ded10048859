"""Attributes that quote what samples say, which are not kept unless somebody asked for it.

The packages here never tell any. But a job may be instrumented by others as well, whose spans of
calls to a model carry prompts and completions: under the names of OpenTelemetry's conventions for
generative AI, and under those of OpenInference and OpenLLMetry.
"""

from __future__ import annotations

from opentelemetry.proto.logs.v1.logs_pb2 import LogsData
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from dataplane_admin.ingest.values import Attributed

_NAMES = (
    "gen_ai.completion",
    "gen_ai.input.messages",
    "gen_ai.output.messages",
    "gen_ai.prompt",
    "gen_ai.retrieval.documents",
    "gen_ai.system_instructions",
    "gen_ai.tool.call.arguments",
    "gen_ai.tool.call.result",
    "input.value",
    "llm.completions",
    "llm.input_messages",
    "llm.output_messages",
    "llm.prompts",
    "message.content",
    "output.value",
    "traceloop.entity.input",
    "traceloop.entity.output",
)
_WITH_PARTS = tuple(f"{name}." for name in _NAMES)  # gen_ai.prompt.0.content
_BYTES = tuple(name.encode() for name in _NAMES)


def may_quote(body: bytes) -> bool:
    """Whether protobuf of a request may hold such an attribute, by a look at its bytes."""
    return any(name in body for name in _BYTES)


def forget_sample_text(request: TracesData | LogsData) -> bool:
    """Take such attributes out of a request, counted as dropped; whether there was any."""
    changed = False
    if isinstance(request, LogsData):
        for resource_logs in request.resource_logs:
            for scope_logs in resource_logs.scope_logs:
                for record in scope_logs.log_records:
                    changed |= _forget(record)
        return changed
    for resource_spans in request.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                changed |= _forget(span)
                for event in span.events:
                    changed |= _forget(event)
    return changed


def _forget(record: Attributed) -> bool:
    quoting = [place for place, pair in enumerate(record.attributes) if _quotes(pair.key)]
    for place in reversed(quoting):
        del record.attributes[place]
    if quoting:
        dropped = record.dropped_attributes_count + len(quoting)
        record.dropped_attributes_count = min(dropped, 0xFFFF_FFFF)
    return bool(quoting)


def _quotes(key: str) -> bool:
    return key in _NAMES or key.startswith(_WITH_PARTS)
