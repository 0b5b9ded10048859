"""Prompts as the batch that a rollout actor takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: columns of a batch

import torch

from column_io import BatchedDataDict
from grpo_trainer.prompts import Prompt

TASK = "verified"
"""Name of the one environment that the trainer runs."""


def rollout_batch(prompts: Sequence[Prompt], *, group_size: int) -> BatchedDataDict[Any]:
    """What `SyncRolloutActor.rollout_to_tq` takes, each prompt ``group_size`` times in a row."""
    batch: BatchedDataDict[Any] = BatchedDataDict(
        {
            "message_log": [
                [
                    {
                        "role": "user",
                        "content": prompt.record.prompt,
                        "token_ids": torch.tensor(prompt.token_ids, dtype=torch.int64),
                    }
                ]
                for prompt in prompts
            ],
            "length": torch.tensor([len(prompt.token_ids) for prompt in prompts]),
            "loss_multiplier": torch.ones(len(prompts)),
            "task_name": [TASK for _ in prompts],
            "extra_env_info": [
                {"questions": prompt.record.questions, "answers": prompt.record.answers, "turn": 0}
                for prompt in prompts
            ],
            "idx": list(range(len(prompts))),
        }
    )
    return batch.repeat_interleave(group_size)
