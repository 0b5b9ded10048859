"""JSON schemas of settings, for editors that check and complete a configuration."""

from __future__ import annotations

import inspect
import re
from typing import Any  # Any: JSON, and pydantic's own schemas

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue


def json_schema(settings: Any) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a class, with docstrings as descriptions.

    Args:
        settings: a TypedDict, dataclass or pydantic model; its docstring may describe the keys
            under ``Attributes:``.
    """
    return TypeAdapter(settings).json_schema(schema_generator=_DescribedSchema)


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


class _DescribedSchema(GenerateJsonSchema):
    """Generator that splits the docstring of each class into the descriptions of its keys."""

    def typed_dict_schema(self, schema: Any) -> JsonSchemaValue:
        return _describe(super().typed_dict_schema(schema), schema.get("cls"))

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        return _describe(super().dataclass_schema(schema), schema["cls"])

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        return _describe(super().model_schema(schema), schema["cls"])


def _describe(schema: JsonSchemaValue, documented: type | None) -> JsonSchemaValue:
    if documented is None or not documented.__doc__:
        return schema
    summary = inspect.cleandoc(documented.__doc__).partition("\n\nAttributes:")[0]
    schema["description"] = " ".join(summary.split())
    for name, description in attribute_descriptions(documented).items():
        if name in schema["properties"]:  # the schema leaves out what only code can set
            schema["properties"][name]["description"] = description
    return schema
