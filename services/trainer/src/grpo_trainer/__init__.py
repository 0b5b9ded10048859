"""Synchronous GRPO on Ray, composed of the data-plane packages."""

from grpo_trainer.config import TrainerConfig, load_config
from grpo_trainer.errors import TrainerError
from grpo_trainer.run import RunResult, resume, train
from grpo_trainer.run_display import RunDisplay

__all__ = [
    "RunDisplay",
    "RunResult",
    "TrainerConfig",
    "TrainerError",
    "load_config",
    "resume",
    "train",
]
