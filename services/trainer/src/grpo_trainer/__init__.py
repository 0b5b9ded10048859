"""GRPO on Ray, built from the data-plane packages."""

from dataplane_core.shadowing import require_package
from grpo_trainer.config.loading import DEMO_CONFIG, TrainerConfig, check_config, load_config
from grpo_trainer.errors import TrainerError
from grpo_trainer.report.display import RunDisplay
from grpo_trainer.run.runs import RunResult, resume, train
from grpo_trainer.run.signals import GracefulStop

require_package("observability", "views")

__all__ = [
    "DEMO_CONFIG",
    "GracefulStop",
    "RunDisplay",
    "RunResult",
    "TrainerConfig",
    "TrainerError",
    "check_config",
    "load_config",
    "resume",
    "train",
]
