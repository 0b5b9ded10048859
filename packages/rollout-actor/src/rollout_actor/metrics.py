"""Numbers about a rollout, computed from what its conversations recorded.

All values are plain ints and floats, so that they go to a logger and through a meta as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from rollout_actor.conversation import Conversation


def rollout_metrics(rows: Sequence[Conversation]) -> dict[str, float | int]:
    """The metrics of a rollout.

    Args:
        rows: finished conversations.

    Returns:
        Over the batch: ``total_turns``, ``avg_turns_per_sample``, ``max_turns_per_sample``;
        ``mean_gen_tokens_per_sample``, ``max_gen_tokens_per_sample``,
        ``mean_env_tokens_per_sample``, ``mean_total_tokens_per_sample``, in tokens;
        ``mean_total_reward``, ``min_total_reward``, ``max_total_reward``; and the shares of rows
        ``truncation_rate`` (a response ran into its token budget), ``natural_termination_rate``
        (ended by their environment, no response truncated), ``sequence_full_rate`` (ended by an
        observation that left no room for a response) and ``max_turns_reached_rate`` (ended by
        nothing but the number of turns).
        Per turn n from 1, over the rows that played it: ``turn_<n>/active_samples``,
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
    for place in range(max(turns, default=0)):
        played = [row.history[place] for row in rows if len(row.history) > place]
        name = f"turn_{place + 1}"
        metrics[f"{name}/active_samples"] = len(played)
        metrics[f"{name}/mean_gen_tokens"] = _mean(turn.generated for turn in played)
        metrics[f"{name}/mean_env_tokens"] = _mean(turn.observed for turn in played)
        metrics[f"{name}/mean_reward"] = _mean(turn.reward for turn in played)
    return metrics


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return fmean(found) if found else 0.0
