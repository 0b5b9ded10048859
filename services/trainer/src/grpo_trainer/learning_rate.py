"""The learning rate over a run."""

from __future__ import annotations

from grpo_trainer.sections import OptimizerSection


def learning_rate(optimizer: OptimizerSection, step: int, num_steps: int) -> float:
    """The rate of the step that follows ``step`` completed ones, of ``num_steps``.

    Grows linearly over ``warmup_steps``; falls linearly from the start, towards
    ``final_lr_fraction`` at the end of the run.
    """
    warmup = min(1.0, (step + 1) / max(1, optimizer.warmup_steps))
    decay = 1 - (1 - optimizer.final_lr_fraction) * step / num_steps
    return optimizer.learning_rate * warmup * decay
