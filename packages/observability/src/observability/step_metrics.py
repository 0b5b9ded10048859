"""Metrics of training steps, such as reward and loss: one point per step, as OTLP gauges.

docs/telemetry.md lists the names. Each point has the attribute ``rl.step``, so an SDK would retain
a time series per step. `observability.setup` therefore exports these metrics through a separate
provider, which discards each point once it is exported.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Mapping
from typing import SupportsFloat, cast

from opentelemetry.metrics import Meter, get_meter_provider

from dataplane_core.telemetry import RUN_ID, STEP
from observability.middleware.meters import has_sdk
from observability.setup.providers import step_meters

TIME = "rl.time"
REWARD_COMPONENT = "rl.reward.component"
COMPONENT = "rl.component"
NOT_FINITE = "rl.not_finite"
"""Gauge with the value 1 for each value that is NaN or infinite; the SDK would not export it."""
METRIC = "rl.metric"
"""Attribute of `NOT_FINITE`: the metric's name."""

UNITS: Mapping[str, str] = {
    "rl.entropy": "{nat}",
    "rl.generation.tokens_per_s": "{token}/s",
    "rl.kl": "{nat}",
    "rl.logprob_gap.mean": "{nat}",
    "rl.logprob_gap.p99": "{nat}",
    "rl.response.length": "{token}",
    "rl.samples": "{sample}",
    "rl.samples_per_s": "{sample}/s",
    "rl.staleness.max": "{version}",
    "rl.staleness.mean": "{version}",
    "rl.time": "s",
    "rl.tokens_per_s": "{token}/s",
}
"""Units by metric; all other metrics have the unit 1."""

_SCOPE = "rl-dataplane"
_MAX_NAME_LENGTH = 255
_VALIDATION_PREFIXES = ("eval_", "eval/", "val-")
"""Prefixes of a validation's metrics as TRL, SkyRL and verl name them."""
_INVALID_CHARACTER = re.compile(r"[^A-Za-z0-9_./-]")


def record_step_metrics(
    step: int,
    metrics: Mapping[str, object],
    *,
    components: Mapping[str, object] | None = None,
    names: Mapping[str, str] | None = None,
    run_id: str | None = None,
) -> None:
    """Record the metrics of a training step; without an SDK in this process, do nothing.

    The metric ``rl.time`` is added: the time of this call, in seconds since 1970. If a step is
    recorded again, for example after a resume, the admin service replaces its earlier values. For a
    value that is NaN or infinite, the metric ``rl.not_finite`` is recorded.

    Args:
        step: number of the step, from 0; equals ``rl.step`` of its spans.
        metrics: values by name. Values that are not numbers are skipped. Characters that the name
            of a metric must not contain are replaced by ``_``.
        components: mean reward by component, for example by reward function.
        names: documented name of a metric by its name in ``metrics``. Metrics that are absent here
            keep their names.
        run_id: id of the run. None takes the id in the process's resource.
    """
    if not has_sdk(get_meter_provider()):
        return
    meter = step_meters().get_meter(_SCOPE)
    attributes: dict[str, str | int] = {STEP: step}
    if run_id is not None:
        attributes[RUN_ID] = run_id
    numbers = {
        (names or {}).get(name) or exported_name(name): number
        for name, value in metrics.items()
        if (number := _number_or_none(value)) is not None
    }
    if numbers:
        numbers.setdefault(TIME, time.time())
    for name, number in numbers.items():
        _set(meter, name, number, attributes)
    for component, value in (components or {}).items():
        if (number := _number_or_none(value)) is not None:
            _set(meter, REWARD_COMPONENT, number, {**attributes, COMPONENT: component})


def record_trainer_metrics(
    completed: int,
    metrics: Mapping[str, object],
    names: Mapping[str, str],
    *,
    run_id: str,
    components: Mapping[str, object] | None = None,
) -> None:
    """Record the metrics that another trainer logs after ``completed`` steps.

    Metrics of a validation get the number of the next step, which starts with the validated
    weights. All others get the number of the last completed step.

    Args:
        completed: number of completed steps.
        metrics: values by the trainer's name.
        names: documented names by the trainer's name. Other metrics keep their names.
        run_id: id of the run.
        components: mean reward by component.
    """
    validation = {key: metrics[key] for key in metrics if key.startswith(_VALIDATION_PREFIXES)}
    training = {key: metrics[key] for key in metrics if key not in validation}
    record_step_metrics(completed, validation, names=names, run_id=run_id)
    if completed > 0:
        record_step_metrics(
            completed - 1, training, components=components, names=names, run_id=run_id
        )


def exported_name(name: str) -> str:
    """Return the name under which a trainer's metric is exported.

    The SDK accepts ASCII, a letter first, and at most 255 characters: other characters become
    ``_``, and the end of a longer name becomes a hash of it.
    """
    valid = _INVALID_CHARACTER.sub("_", name)
    valid = valid if valid[:1].isalpha() else f"m{valid}"
    if len(valid) <= _MAX_NAME_LENGTH:
        return valid
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=6).hexdigest()
    return f"{valid[: _MAX_NAME_LENGTH - len(digest) - 1]}-{digest}"


def _set(meter: Meter, name: str, number: float, attributes: Mapping[str, str | int]) -> None:
    if math.isfinite(number):
        meter.create_gauge(name, UNITS.get(name, "1")).set(number, attributes)
    else:
        meter.create_gauge(NOT_FINITE, "1").set(1.0, {**attributes, METRIC: name})


def _number_or_none(value: object) -> float | None:
    """Return a number of Python, numpy or torch as a float; None for any other value."""
    if value is None or isinstance(value, str | bytes):
        return None
    try:
        return float(cast("SupportsFloat", value))
    # RuntimeError: a tensor with several elements; OverflowError: a very large integer.
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
