"""Assignment of RL-Insight's spans to steps.

RL-Insight 0.3.0 sends each span as a separate trace. `join_steps` joins the spans of a step into
one trace. Each span has ``project`` and ``experiment_name``, the arguments of RL-Insight's `init`.
RL-Insight adds the step only to spans of agent sessions, as ``global_steps``. A program may add
``global_steps`` or ``global_step`` to other spans.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span

SCOPE = "rl_insight.utils.opentelemetry_utils"
"""Instrumentation scope of RL-Insight's spans."""

_RUN_ID, _STEP = "rl.run_id", "rl.step"
_RUN_KEYS = ("project", "experiment_name")
_STEP_KEYS = ("global_steps", "global_step")
_MAX_DIGITS = 18


def join_steps(spans: Iterable[ResourceSpans]) -> bool:
    """Add run and step to RL-Insight's spans, and give all spans of a step the same trace id.

    Spans of other programs do not change, nor do spans that already have ``rl.run_id``. The trace
    id also depends on the resource: programs with different resources never share a trace.

    Returns:
        True if a span was changed.
    """
    changed = False
    for resource_spans in spans:
        for scope_spans in resource_spans.scope_spans:
            if scope_spans.scope.name == SCOPE:
                resource = resource_spans.resource.SerializeToString(deterministic=True)
                for span in scope_spans.spans:
                    changed |= _set_step(span, resource)
    return changed


def _set_step(span: Span, resource: bytes) -> bool:
    """Set run, step and trace id of a span; return whether the span was changed."""
    values = {pair.key: pair.value for pair in span.attributes}
    names = [values[key].string_value for key in _RUN_KEYS if key in values]
    run_id = "/".join(filter(None, names))
    if not run_id or _RUN_ID in values:
        return False
    span.attributes.add(key=_RUN_ID).value.string_value = run_id
    step = _step(values)
    if step is not None:
        span.attributes.add(key=_STEP).value.int_value = step
        key = resource + json.dumps([run_id, step]).encode()
        span.trace_id = hashlib.blake2b(key, digest_size=16).digest()
    return True


def _step(values: Mapping[str, AnyValue]) -> int | None:
    """Return the step, an integer or decimal text; None if it is absent or invalid."""
    for key in _STEP_KEYS:
        value = values.get(key, AnyValue())
        if value.HasField("int_value") and value.int_value >= 0:
            return value.int_value
        digits = value.string_value
        if digits.isascii() and digits.isdecimal() and len(digits) <= _MAX_DIGITS:
            return int(digits)
    return None
