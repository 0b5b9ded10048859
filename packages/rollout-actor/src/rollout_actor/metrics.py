"""Metrics of a rollout, computed from the records of its conversations.

All values are plain ints and floats, for loggers and for ``extra_info`` of a meta.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from rollout_actor.conversation import Conversation
from rollout_actor.environment_return import REWARD_PREFIX


def rollout_metrics(rows: Sequence[Conversation]) -> dict[str, float | int]:
    """Return the metrics of a rollout.

    Args:
        rows: finished conversations.

    Returns:
        Metric to number.

        - Turns: ``total_turns``, ``avg_turns_per_sample``, ``max_turns_per_sample``.
        - Tokens: ``mean_gen_tokens_per_sample``, ``max_gen_tokens_per_sample``,
            ``mean_env_tokens_per_sample``, ``mean_total_tokens_per_sample``.
        - Rewards: ``mean_total_reward``, ``min_total_reward``, ``max_total_reward``, and
            ``reward/<component>``: mean of each reward component whose name begins with "reward/",
            over all rows; a row without it counts as 0.
        - ``truncation_rate``: fraction of rows with a response that reached its token budget.
        - ``natural_termination_rate``: fraction of rows that their environment ended, without a
            truncated response.
        - ``sequence_full_rate``: fraction of rows that ended because an observation left no space
            for a response.
        - ``max_turns_reached_rate``: fraction of rows that the maximum number of turns ended.
        - ``mixed_weight_version_rate``: fraction of rows that more than one version generated, if
            the backend reported weight versions for every row.
        - Per turn n from 1, over the rows that had this turn: ``turn_<n>/active_samples``,
            ``turn_<n>/mean_gen_tokens``, ``turn_<n>/mean_env_tokens``, ``turn_<n>/mean_reward``.
    """
    turns = [len(row.history) for row in rows]
    generated = [sum(turn.generated for turn in row.history) for row in rows]
    rewards = [row.total_reward for row in rows]
    metrics: dict[str, float | int] = {
        "total_turns": sum(turns),
        "avg_turns_per_sample": _mean(turns),
        "max_turns_per_sample": max(turns, default=0),
        "mean_gen_tokens_per_sample": _mean(generated),
        "max_gen_tokens_per_sample": max(generated, default=0),
        "mean_env_tokens_per_sample": _mean(
            sum(turn.observed for turn in row.history) for row in rows
        ),
        "mean_total_tokens_per_sample": _mean(row.length for row in rows),
        "mean_total_reward": _mean(rewards),
        "min_total_reward": min(rewards, default=0.0),
        "max_total_reward": max(rewards, default=0.0),
        "truncation_rate": _mean(row.truncated for row in rows),
        "natural_termination_rate": _mean(row.terminated and not row.truncated for row in rows),
        "sequence_full_rate": _mean(row.full for row in rows),
        "max_turns_reached_rate": _mean(row.active for row in rows),
    }
    components = sorted({name for row in rows for name in row.rewards})
    for name in components:
        if name.startswith(REWARD_PREFIX):
            metrics[name] = _mean(row.rewards.get(name, 0.0) for row in rows)
    versions = [row.weight_versions for row in rows if row.weight_versions is not None]
    if rows and len(versions) == len(rows):
        metrics["mixed_weight_version_rate"] = _mean(
            len({span["version"] for span in spans}) > 1 for spans in versions
        )
    for index in range(max(turns, default=0)):
        records = [row.history[index] for row in rows if len(row.history) > index]
        name = f"turn_{index + 1}"
        metrics[f"{name}/active_samples"] = len(records)
        metrics[f"{name}/mean_gen_tokens"] = _mean(turn.generated for turn in records)
        metrics[f"{name}/mean_env_tokens"] = _mean(turn.observed for turn in records)
        metrics[f"{name}/mean_reward"] = _mean(turn.reward for turn in records)
    return metrics


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return fmean(numbers) if numbers else 0.0
