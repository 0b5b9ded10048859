"""Metrics that verl logs, with the names of docs/telemetry.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from numbers import Real
from statistics import fmean

NAMES = {
    "critic/score/mean": "rl.reward.mean",
    "actor/loss": "rl.loss",
    "actor/kl_loss": "rl.kl",
    "actor/entropy": "rl.entropy",
    "actor/pg_clipfrac": "rl.clip_fraction",
    "actor/grad_norm": "rl.grad_norm",
    "actor/lr": "rl.learning_rate",
    "response_length/mean": "rl.response.length",
    "response_length/clip_ratio": "rl.response.truncated",
    "training/off_policy/trajectory_staleness/mean": "rl.staleness.mean",
    "training/off_policy/trajectory_staleness/max": "rl.staleness.max",
    "val-reward": "rl.validation.reward",  # this and the next are of `with_means`
    "val-acc": "rl.validation.pass_rate",
}
"""Names by verl's metric."""
_VALIDATION = re.compile(r"val-(?:core|aux)/(.+)/(reward|acc)/mean@(\d+)")


def with_means(data: Mapping[str, object]) -> dict[str, object]:
    """Add the means over data sources of a validation's rewards and accuracies.

    If the prompts of a source have different numbers of responses, verl logs a mean for each
    number. Then that of the largest number counts.
    """
    matches = [match for match in map(_VALIDATION.fullmatch, data) if match]
    means: dict[str, dict[str, Real]] = {}
    for match in sorted(matches, key=lambda each: int(each[3])):
        value = data[match[0]]
        if isinstance(value, Real):  # numpy's, too
            means.setdefault(f"val-{match[2]}", {})[match[1]] = value
    return {**data, **{name: fmean(of_source.values()) for name, of_source in means.items()}}
