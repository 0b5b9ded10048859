"""Batch of prompts for a rollout actor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # Any: columns of a batch

import torch

from column_io import BatchedDataDict
from grpo_trainer.rollout.prompts import Prompt

TASK = "verified"
"""Name of the one environment that the trainer runs."""


def rollout_batch(prompts: Sequence[Prompt], *, group_size: int) -> BatchedDataDict[Any]:
    """Return a batch for `SyncRolloutActor.rollout_to_tq`, with ``group_size`` rows per prompt.

    The rows of a group are adjacent and share one message log and one info, which are sent once.
    """
    logs = [
        [
            {
                "role": "user",
                "content": prompt.record.prompt,
                "token_ids": torch.tensor(prompt.token_ids, dtype=torch.int64),
            }
        ]
        for prompt in prompts
    ]
    infos = [
        {"questions": prompt.record.questions, "answers": prompt.record.answers, "turn": 0}
        for prompt in prompts
    ]
    rows = [number for number in range(len(prompts)) for _ in range(group_size)]
    return BatchedDataDict(
        {
            "message_log": [logs[number] for number in rows],
            "length": torch.tensor([len(prompts[number].token_ids) for number in rows]),
            "loss_multiplier": torch.ones(len(rows)),
            "task_name": [TASK for _ in rows],
            "extra_env_info": [infos[number] for number in rows],
            "idx": rows,
        }
    )
