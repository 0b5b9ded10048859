"""What all models share: text that JSON can carry, and fields that do not change."""

from __future__ import annotations

from typing import Annotated, Any  # Any: values of attributes and tags

from pydantic import BaseModel, BeforeValidator, ConfigDict


def whole_text(value: object) -> object:
    """``value``; in a text, surrogates without their other half are written as escapes.

    UTF-8, and so JSON on the wire, has no form for them, yet a sample id may hold one.
    """
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return value


def whole_texts(value: object) -> object:
    """`whole_text` of every text in what an attribute or a tag may hold."""
    if isinstance(value, dict):
        return {whole_text(str(name)): whole_texts(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [whole_texts(held) for held in value]
    if value is None or isinstance(value, str | bool | float):
        return whole_text(value)
    if isinstance(value, int):
        # Larger ones are not numbers to the readers of JSON that matter, a browser above all.
        return value if abs(value) < 2**63 else str(value)
    return whole_text(str(value))


Text = Annotated[str, BeforeValidator(whole_text)]
Values = Annotated[dict[str, Any], BeforeValidator(whole_texts)]


class Model(BaseModel):
    """What all answers are: they do not change, and their fields are all there are."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
