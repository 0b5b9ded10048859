"""Calls of models within a trace, from the ``gen_ai.*`` attributes of spans.

The attribute names are those of OpenTelemetry's semantic conventions, older versions included, and
of vLLM: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/ and
``vllm/tracing/utils.py``.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from dataplane_admin import models
from dataplane_admin.service.span_totals import quantile
from observability.records import Attributes, Span
from observability.views import Step, attributes

MAX_ROWS = 100
_MAX_REASONS = 10
_MAX_REASON = 60

_PREFIX = "gen_ai."
# Of each tuple, the first attribute that is present is used.
_PROVIDER = ("gen_ai.provider.name", "gen_ai.system")
_MODEL = ("gen_ai.request.model", "gen_ai.response.model")
_INPUT = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens")
_OUTPUT = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens")
_LATENCY_S = "gen_ai.latency.e2e"
_FIRST_TOKEN_S = "gen_ai.latency.time_to_first_token"  # noqa: S105  # no password


def model_calls_of(step: Step) -> list[models.ModelCalls]:
    """Return the calls by service, operation, provider and model, most calls first."""
    calls: defaultdict[tuple[str, str, str, str], list[Span]] = defaultdict(list)
    for span in step.spans:
        held = span.attributes
        if any(name.startswith(_PREFIX) for name in held):
            operation = attributes.text(held, "gen_ai.operation.name") or span.name
            key = span.process.service, operation, _text(held, _PROVIDER), _text(held, _MODEL)
            calls[key].append(span)
    ranked = sorted(calls.items(), key=lambda item: -len(item[1]))
    return [_row(*key, spans) for key, spans in ranked[:MAX_ROWS]]


def _row(
    service: str, operation: str, provider: str, model: str, spans: Sequence[Span]
) -> models.ModelCalls:
    latencies = {span.span_id: _latency_s(span) for span in spans}
    seconds = sorted(latency for latency in latencies.values() if latency is not None)
    first = sorted(_numbers(span.attributes.get(_FIRST_TOKEN_S) for span in spans))
    output = {span.span_id: _tokens(span.attributes, _OUTPUT) for span in spans}
    # Only calls with tokens and latency: a call that reports no tokens must not lower the rate.
    timed = [
        (tokens, latency)
        for span_id, tokens in output.items()
        if tokens is not None and (latency := latencies[span_id]) is not None
    ]
    duration_s = sum(latency for _, latency in timed)
    return models.ModelCalls(
        service=service,
        operation=operation,
        provider=provider,
        model=model,
        calls=len(spans),
        errors=sum(span.outcome == "error" for span in spans),
        input_tokens=_sum(_tokens(span.attributes, _INPUT) for span in spans),
        output_tokens=_sum(output.values()),
        p50_s=quantile(seconds, 0.5),
        p95_s=quantile(seconds, 0.95),
        first_token_p50_s=quantile(first, 0.5),
        tokens_per_s=sum(tokens for tokens, _ in timed) / duration_s if duration_s > 0 else None,
        finish_reasons=_finish_reasons(spans),
    )


def _text(held: Attributes, names: Iterable[str]) -> str:
    return next(filter(None, (attributes.text(held, name) for name in names)), "")


def _tokens(held: Attributes, names: Iterable[str]) -> int | None:
    for name in names:
        if (number := attributes.integer(held, name)) is not None:
            return max(0, number)
    return None


def _latency_s(span: Span) -> float | None:
    return next(_numbers([span.attributes.get(_LATENCY_S)]), span.reported_seconds)


def _numbers(values: Iterable[object]) -> Iterator[float]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if 0 <= value < math.inf:
            yield float(value)


def _sum(numbers: Iterable[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


def _finish_reasons(spans: Iterable[Span]) -> dict[str, int]:
    reasons = Counter(
        reason[:_MAX_REASON]
        for span in spans
        for reason in attributes.names(span.attributes, "gen_ai.response.finish_reasons")
    )
    return dict(reasons.most_common(_MAX_REASONS))
