"""JSON schema of a configuration, for editors that check and complete YAML."""

from __future__ import annotations

import inspect
import re
from typing import Any  # Any: JSON

from dataplane_core import DataPlaneConfig
from dataplane_core.config import ObservabilityConfig
from grpo_trainer.config.loading import REQUIRED_DATA_PLANE_KEYS, TrainerConfig
from grpo_trainer.config.sections import Section


def configuration_schema() -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a run's YAML, with docstrings as descriptions.

    It has the keys, types and bounds. Rules between keys are checked only by `check_config`.
    """
    schema = TrainerConfig.model_json_schema()
    for section in (DataPlaneConfig, ObservabilityConfig, *Section.__subclasses__()):
        _describe(
            schema if section is TrainerConfig else schema["$defs"][section.__name__], section
        )
    schema["$defs"]["DataPlaneConfig"]["required"] += REQUIRED_DATA_PLANE_KEYS
    return schema


def attribute_descriptions(documented: type) -> dict[str, str]:
    """Return the entries below ``Attributes:`` in the docstring of a class, by name."""
    text = inspect.cleandoc(documented.__doc__ or "")
    _, _, block = text.partition("Attributes:\n")
    descriptions: dict[str, str] = {}
    name = ""
    for line in block.partition("\n\n")[0].splitlines():
        entry = re.match(r"    (\w+): (.*)", line)
        if entry:
            name = entry[1]
            descriptions[name] = entry[2]
        else:
            descriptions[name] += " " + line.strip()
    return descriptions


def _describe(schema: dict[str, Any], documented: type) -> None:
    summary = inspect.cleandoc(documented.__doc__ or "").partition("\n\nAttributes:")[0]
    schema["description"] = " ".join(summary.split())
    for name, description in attribute_descriptions(documented).items():
        if name in schema["properties"]:  # the schema leaves out what only code can set
            schema["properties"][name]["description"] = description
