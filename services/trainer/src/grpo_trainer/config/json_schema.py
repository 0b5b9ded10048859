"""JSON schema of a configuration, for editors that check and complete YAML."""

from __future__ import annotations

from typing import Any  # Any: JSON

from dataplane_core.json_schema import json_schema
from grpo_trainer.config.loading import REQUIRED_DATA_PLANE_KEYS, TrainerConfig


def configuration_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a run's YAML, with docstrings as descriptions.

    It has the keys, types and bounds. Rules between keys are checked only by `check_config`.
    """
    schema = json_schema(TrainerConfig)
    schema["$defs"]["DataPlaneConfig"]["required"] += REQUIRED_DATA_PLANE_KEYS
    return schema
