"""The learning rate over a run."""

from __future__ import annotations

from grpo_trainer.config.sections import OptimizerSection


def learning_rate(optimizer: OptimizerSection, step: int, num_steps: int) -> float:
    """Return the learning rate of step ``step``, counted from 0, of a run of ``num_steps`` steps.

    The rate grows linearly over ``warmup_steps``. It is also multiplied by a factor that falls
    linearly from 1 at the start to ``final_lr_fraction`` at the end of the run.
    """
    warmup = min(1.0, (step + 1) / max(1, optimizer.warmup_steps))
    decay = 1 - (1 - optimizer.final_lr_fraction) * step / num_steps
    return optimizer.learning_rate * warmup * decay
