"""Removal of attributes that quote samples, unless the service is configured to keep them.

Spans and events of this project's packages quote no samples. But other instrumentation of a job may
quote them, and it changes faster than any list of names. So a rule decides, by key and length, in
this order:

1. Numbers and booleans are retained. Lists of numbers may be token ids, and count as text.
2. Text under a key longer than `MAX_TEXT` characters is removed. Any other key in `_RETAINED_KEYS`
   or `_RETAINED_NAMESPACES` is retained: it names a model, a process, a place in code.
3. Text under a key with a word for content ("prompt", "spanInputs", "tool.parameters") is removed,
   and so is all text in the namespaces of model instrumentation, whatever its key.
4. Text longer than `MAX_TEXT` characters is removed, and so are JSON and data URIs of any length.

The rule applies to all attributes: of resource, scope, span, event, link, log record, data point.
It misses short text under a neutral key, and text within a name. Of exceptions, it keeps the types
and the frames of a Python stack trace, not the messages.
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
"""Maximum characters of text under a key that no rule names, and of a span's or event's name."""


def _words_of(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Facts about a process, its machine, its code and the operation, not about samples.
_RETAINED_NAMESPACES = _words_of(
    """
    cloud. code. container. dataplane. deployment. host. k8s. messaging. network. os. process.
    refit. rl. server. service. telemetry. thread.
    """
)
_RETAINED_KEYS = _words_of(
    """
    ai.model.id ai.model.provider ai.operationId ai.response.finishReason ai.response.id
    ai.response.model exception.type gen_ai.agent.id gen_ai.agent.name gen_ai.conversation.id
    gen_ai.operation.name gen_ai.output.type gen_ai.provider.name gen_ai.request.id
    gen_ai.request.model gen_ai.response.finish_reasons gen_ai.response.id gen_ai.response.model
    gen_ai.system gen_ai.token.type gen_ai.tool.call.id gen_ai.tool.name gen_ai.tool.type
    input.mime_type langfuse.environment langfuse.observation.model.name
    langfuse.observation.type langfuse.release langfuse.version llm.model_name llm.provider
    llm.request.type llm.system mlflow.spanType mlflow.traceRequestId openinference.span.kind
    output.mime_type system.memory.state tool.id tool.name traceloop.entity.name
    traceloop.span.kind traceloop.workflow.name
    """
)
_MODEL_NAMESPACES = _words_of(
    """
    ai. document. embedding. gen_ai. input. langfuse. langsmith. llm. logfire. message. mlflow.
    openinference. output. pydantic_ai. reranker. retrieval. tool. tool_ traceloop.
    """
)
_CONTENT_WORDS = _words_of(
    """
    answer answers args arguments backstory body choice choices chunk chunks completion
    completions content contents context conversation description dialog dialogue doc docs
    document documents feedback generated generation goal history input inputs instruction
    instructions memory message messages output outputs parameters passage passages payload
    prompt prompts query question reasoning response result results sentence sentences snippet
    statement summary text texts thought thoughts token tokens trajectory transcript turns
    utterance
    """
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_NUMBERS = ("int_value", "double_value")
_DOCUMENT_PREFIXES = ("{", "[", "data:")
_STACKTRACE = "exception.stacktrace"
_TYPE = re.compile(r"[A-Za-z_][\w.]*(?=:|\Z)")
_FRAME = re.compile(r' *File "[^"]*", line \d+')
_TRACE_HEADERS = (
    "Traceback (most recent call last):",
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)


def remove_sample_text(request: TracesData | LogsData | MetricsData) -> bool:
    """Remove text that may quote samples; return whether anything changed.

    Removed attributes are counted as dropped.
    """
    return _Removal().run(request)


class _Removal:
    """The removal from one request.

    Most records of a request have the same keys in the same order. So the decision by keys is
    cached per list of keys, and only the remaining values are inspected.
    """

    def __init__(self) -> None:
        # Per request, so that senders with changing keys do not fill the memory.
        self._bounded: dict[tuple[str, ...], tuple[tuple[int, int], ...]] = {}

    def run(self, request: TracesData | LogsData | MetricsData) -> bool:
        """Remove sample text; return whether anything changed."""
        changed = False
        if isinstance(request, TracesData):
            for resource_spans in request.resource_spans:
                changed |= self._remove(resource_spans.resource)
                for scope_spans in resource_spans.scope_spans:
                    changed |= self._remove(scope_spans.scope)
                    for span in scope_spans.spans:
                        changed |= self._remove_from_span(span)
            return changed
        for record in attributed(request):
            changed |= self._remove(record)
        return changed

    def _remove_from_span(self, span: Span) -> bool:
        changed = self._remove(span)
        if len(span.name) > MAX_TEXT:
            span.name = span.name[:MAX_TEXT]
            changed = True
        # Most spans have neither; the test is cheaper than starting an iteration.
        if span.events:
            for event in span.events:
                changed |= self._remove(event)
                if len(event.name) > MAX_TEXT:
                    event.name = event.name[:MAX_TEXT]
                    changed = True
        if span.links:
            for link in span.links:
                changed |= self._remove(link)
        if span.HasField("status") and (message := span.status.message):
            # The SDK writes the exception's type and its text here.
            match = _TYPE.match(message)
            kept = match.group() if match else ""
            changed |= kept != message
            span.status.message = kept
        return changed

    def _remove(self, record: Attributed) -> bool:
        attributes = record.attributes
        pairs = attributes[:]  # one copy is faster than two reads of the field
        keys = tuple([pair.key for pair in pairs])
        bounded = self._bounded.get(keys)
        if bounded is None:
            bounds = enumerate(map(_max_text, keys))
            bounded = tuple((place, maximum) for place, maximum in bounds if maximum is not None)
            self._bounded[keys] = bounded
        changed = False
        places = []
        for place, max_text in bounded:
            value = pairs[place].value
            text = value.string_value
            if text and keys[place] == _STACKTRACE:
                frames = _frames(text)
                changed |= frames != text
                value.string_value = frames
            elif text:
                # JSON and data URIs, of any length, often hold a conversation or an image.
                if len(text) > max_text or text.lstrip().startswith(_DOCUMENT_PREFIXES):
                    places.append(place)
            elif _length(value) > max_text:
                places.append(place)
        if not places:
            return changed
        for place in reversed(places):
            del attributes[place]
        if hasattr(record, "dropped_attributes_count"):  # data points have none
            add_dropped(record, len(places))
        return True


def attributed(request: TracesData | LogsData | MetricsData) -> Iterator[Attributed]:
    """Yield everything with attributes, outermost first."""
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


@lru_cache(maxsize=4096)
def _max_text(key: str) -> int | None:
    """Return the maximum characters of text under a key; None for the service's general limit."""
    if len(key) > MAX_TEXT:
        return 0
    if key in _RETAINED_KEYS or key.startswith(_RETAINED_NAMESPACES):
        return None
    if key == _STACKTRACE or key.startswith(_MODEL_NAMESPACES):
        return 0
    words = {word.lower() for word in _WORD.findall(key)}
    return MAX_TEXT if words.isdisjoint(_CONTENT_WORDS) else 0


def _length(value: AnyValue) -> int:
    """Return the characters, or bytes, of all text in a value, plus the numbers in its lists."""
    match value.WhichOneof("value"):
        case "string_value":
            return len(value.string_value)
        case "bytes_value":
            return len(value.bytes_value)
        case "array_value":
            return sum(map(_length_in_list, value.array_value.values))
        case "kvlist_value":
            return sum(map(_length_of_pair, value.kvlist_value.values))
    return 0


def _length_in_list(value: AnyValue) -> int:
    return 1 if value.WhichOneof("value") in _NUMBERS else _length(value)


def _length_of_pair(pair: KeyValue) -> int:
    return len(pair.key) + _length(pair.value)


def _frames(stacktrace: str) -> str:
    """Return a Python stack trace with the types of its exceptions in place of their messages."""
    kept: list[str] = []
    in_frames = follows_frame = False
    for line in stacktrace.splitlines():
        if line.startswith(_TRACE_HEADERS):
            kept.append(line)
            in_frames = True
        elif in_frames and _FRAME.match(line):
            kept.append(line)
            follows_frame = True
            continue
        elif follows_frame and line.startswith("    "):
            kept.append(line)  # the line of source
        elif in_frames and not line.startswith(" "):
            if match := _TYPE.match(line):
                kept.append(match.group())
            in_frames = False  # what follows is the message
        follows_frame = False
    return "\n".join(kept)
