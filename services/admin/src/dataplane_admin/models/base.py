"""Base of all models, with text that JSON can encode."""

from __future__ import annotations

from typing import Annotated, Any, Self  # Any: values of attributes and tags

from pydantic import BaseModel, BeforeValidator, ConfigDict


def encodable_text(value: object) -> object:
    """Return ``value``; in a text, write lone surrogates as escapes.

    UTF-8, and so JSON, cannot encode them, yet a sample id may contain them.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return value


def encodable_values(value: object) -> object:
    """Apply `encodable_text` to all text in the value of an attribute or tag."""
    if isinstance(value, dict):
        return {encodable_text(str(name)): encodable_values(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [encodable_values(held) for held in value]
    if value is None or isinstance(value, str | bool | float):
        return encodable_text(value)
    if isinstance(value, int):
        # Many JSON readers refuse larger integers; browsers round those above 2**53.
        return value if abs(value) < 2**63 else str(value)
    return encodable_text(str(value))


Text = Annotated[str, BeforeValidator(encodable_text)]
Values = Annotated[dict[str, Any], BeforeValidator(encodable_values)]


class Model(BaseModel):
    """Base of all answers: immutable, without additional fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @classmethod
    def of(cls, source: object, **values: Any) -> Self:
        """Return a model with ``values``, and with attributes of ``source`` as its other fields."""
        read = {name: getattr(source, name) for name in cls.model_fields if name not in values}
        return cls(**read, **values)
