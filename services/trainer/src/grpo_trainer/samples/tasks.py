"""Stages of the policy workers, each a task of the partition whose samples the ranks claim."""

from __future__ import annotations

from grpo_trainer.config.sections import GRPOSection

PREV_LOGPROBS, REFERENCE_LOGPROBS = "prev_logprobs", "reference_policy_logprobs"
"""Columns of the scoring stages."""

TASK_OF_COLUMN = {PREV_LOGPROBS: "prev_lp", REFERENCE_LOGPROBS: "ref_lp"}
TRAIN_TASK = "train"


def stage_tasks(grpo: GRPOSection) -> list[str]:
    """Return the tasks that claim a step's samples, in the order of the stages."""
    scoring = {
        PREV_LOGPROBS: grpo.recompute_prev_logprobs,
        REFERENCE_LOGPROBS: grpo.kl_coefficient > 0,
    }
    return [*(TASK_OF_COLUMN[column] for column, wanted in scoring.items() if wanted), TRAIN_TASK]
