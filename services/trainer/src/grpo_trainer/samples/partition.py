"""The partitions of a run, the fields and tags that rollouts write into them, and their tasks."""

from __future__ import annotations

from grpo_trainer.config.sections import GRPOSection

TRAIN, VALIDATION = "train", "val"


def sample_id(position: int, number: int) -> str:
    """Return the id of sample ``number`` of the prompt at ``position``, in an asynchronous run."""
    return f"{position:09d}_g{number}"


def position_of(sample_id: str) -> int:
    """Return the position of a sample's prompt in the stream."""
    return int(sample_id.partition("_")[0])


PROMPT = "prompt"
"""Field of asynchronous runs with the prompt of a sample that is to be generated."""

GENERATE_TASK = "generate"
"""Task of asynchronous runs whose consumers generate the responses to prompts."""

WEIGHT_VERSION = "weight_version"
"""Tag with the number of the weights that drew the oldest token of a sample's group."""

WEIGHT_VERSIONS = "weight_versions"
"""Field with the spans of weight versions of a response, if the generation backend reports them."""

IS_FILLER = "is_filler"
"""Tag of an asynchronous run: whether a sample only fills a step, excluded from the loss."""

PREV_LOGPROBS, REFERENCE_LOGPROBS = "prev_logprobs", "reference_policy_logprobs"
"""Columns of the scoring stages."""

TASK_OF_COLUMN = {PREV_LOGPROBS: "prev_lp", REFERENCE_LOGPROBS: "ref_lp"}
TRAIN_TASK = "train"
"""The tasks of the policy workers' stages; the ranks claim the samples of each."""


def stage_tasks(grpo: GRPOSection) -> list[str]:
    """Return the tasks that claim a step's samples, in the order of the stages."""
    scoring = {
        PREV_LOGPROBS: grpo.recompute_prev_logprobs,
        REFERENCE_LOGPROBS: grpo.kl_coefficient > 0,
    }
    return [*(TASK_OF_COLUMN[column] for column, wanted in scoring.items() if wanted), TRAIN_TASK]
