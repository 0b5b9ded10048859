"""OpenTelemetry log records of samples: facts, such as reward and advantage, and text.

docs/telemetry.md lists them. The body of a record is JSON. A record of facts has one column per
fact, for up to 4,096 samples. A record of text has the turns and tokens of one sample. The admin
service drops records of text unless it is started with ``--keep-sample-text``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence

from opentelemetry import context as otel_context
from opentelemetry._logs import SeverityNumber, get_logger_provider
from opentelemetry.util.types import AnyValue

from dataplane_core import telemetry
from dataplane_core.arguments import scalar_of
from observability.middleware.lifecycle import logger_of

FACTS = "rl.sample.facts"
TEXT = "rl.sample.text"
MAX_SAMPLES = 4096
"""Maximum number of samples in a record of facts."""
MAX_TOKENS = 4096
"""Maximum number of tokens in a record of text."""
MAX_CONTENT = 32_768
"""Maximum length of the content of a turn in a record of text, in characters."""


def record_samples(
    sample_ids: Sequence[str],
    columns: Mapping[str, Sequence[object]],
    *,
    run_id: str | None = None,
    step: int | None = None,
) -> None:
    """Record facts of samples; without an SDK in this process, do nothing.

    A fact that is recorded again replaces its earlier value. Other facts of the sample remain.

    Args:
        sample_ids: ids of the samples.
        columns: values by name of the fact, one value per sample: ``group`` (text), ``reward``,
            ``advantage``, ``length`` (response tokens), ``truncated``, ``first_version`` and
            ``last_version`` (of the weights that generated the sample), ``state`` (text), ``tags``
            (name to text, number or boolean; the admin service stores at most 16). None is an
            unknown value. An infinite or NaN value, or one of an unlisted type, is recorded as
            None.
        run_id: id of the run. None takes the id in the context, or in the process's resource.
        step: number of the step. None takes the number in the context.

    Raises:
        ValueError: a column does not have one value per sample.
    """
    for name, column in columns.items():
        if len(column) != len(sample_ids):
            raise ValueError(
                f"column '{name}' has {len(column)} values; expected {len(sample_ids)}, "
                "one per sample"
            )
    for start in range(0, len(sample_ids), MAX_SAMPLES):
        rows = slice(start, start + MAX_SAMPLES)
        facts = {
            name: [_json_value(value) for value in column[rows]] for name, column in columns.items()
        }
        _emit(FACTS, {"ids": [str(each) for each in sample_ids[rows]], **facts}, run_id, step)


def record_sample_text(
    sample_id: str,
    *,
    turns: Sequence[Mapping[str, str]] = (),
    tokens: Mapping[str, Sequence[object]] | None = None,
    run_id: str | None = None,
    step: int | None = None,
) -> None:
    """Record the conversation and the tokens of a sample; without an SDK, do nothing.

    Args:
        sample_id: id of the sample.
        turns: ``role`` and ``content`` of each message.
        tokens: values by name, one value per token: ``text``, ``generator`` and ``trainer``
            (log-probabilities), ``mask`` (whether the token is trained on), ``version`` (of the
            weights that generated the token). The first 4,096 tokens are recorded, and the
            number of the others.
        run_id: as in `record_samples`.
        step: as in `record_samples`.
    """
    token_columns = {
        name: [_json_value(value) for value in column[:MAX_TOKENS]]
        for name, column in (tokens or {}).items()
    }
    length = max(map(len, (tokens or {}).values()), default=0)
    messages = [{key: str(text)[:MAX_CONTENT] for key, text in turn.items()} for turn in turns]
    body = {
        "id": sample_id,
        "turns": messages,
        "tokens": token_columns,
        "tokens_omitted": max(0, length - MAX_TOKENS),
    }
    _emit(TEXT, body, run_id, step)


def _json_value(value: object) -> object:
    """Return a mapping, text, finite number or boolean for a record; None for any other value.

    Scalars of numpy and torch are converted.
    """
    if isinstance(value, Mapping):
        return {str(key): _json_value(each) for key, each in value.items()}
    plain = scalar_of(value)
    if isinstance(plain, float) and not math.isfinite(plain):
        return None
    return plain if isinstance(plain, str | int | float) else None


def _emit(name: str, body: object, run_id: str | None, step: int | None) -> None:
    logger = logger_of(get_logger_provider())
    current = otel_context.get_current()
    severity = SeverityNumber.INFO
    if not logger.enabled(context=current, severity_number=severity, event_name=name):
        return
    attributes: dict[str, AnyValue] = dict(telemetry.step_facts(current))
    arguments = {telemetry.RUN_ID: run_id, telemetry.STEP: step}
    attributes |= {key: value for key, value in arguments.items() if value is not None}
    time_ns = time.time_ns()
    logger.emit(
        event_name=name,
        timestamp=time_ns,
        observed_timestamp=time_ns,
        severity_number=severity,
        context=current,
        attributes=attributes,
        body=json.dumps(body),
    )
