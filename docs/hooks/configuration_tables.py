"""Tables of the configuration reference, generated from the models and commands."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, get_args, get_origin

import typer
import yaml
from pydantic import BaseModel

from dataplane_core.json_schema import attribute_descriptions
from grpo_trainer import DEMO_CONFIG, TrainerConfig

NAMES: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "integer",
    float: "number",
    Path: "path",
    type(None): "null",
}


def typed_dict_table(path: str) -> str:
    """Return the keys of the TypedDict ``module:Class`` as a table."""
    typed_dict = load(path)
    hints = typing.get_type_hints(typed_dict, include_extras=True)
    meanings = attributes_of(typed_dict)
    rows = [
        [
            code(name),
            type_text(hints[name]),
            "" if get_origin(hints[name]) is NotRequired else "yes",
            meanings[name],
        ]
        for name in typed_dict.__annotations__
    ]
    return table(["key", "type", "required", "meaning"], rows)


def trainer_table() -> str:
    """Return every section of the trainer's YAML with the demo's values."""
    demo = yaml.safe_load(DEMO_CONFIG.read_text(encoding="utf-8"))
    notes = notes_of(DEMO_CONFIG.read_text(encoding="utf-8"))
    parts = []
    for name, field in TrainerConfig.model_fields.items():
        parts += section(name, field.annotation, demo[name], notes)
    return "\n".join(parts)


def settings_table(path: str) -> str:
    """Return the fields and defaults of the dataclass ``module:Class`` as a table."""
    settings = load(path)
    hints = typing.get_type_hints(settings)
    meanings = attributes_of(settings)
    rows = [
        [
            code(field.name),
            type_text(hints[field.name]),
            shown(default_of(field)),
            meanings[field.name],
        ]
        for field in dataclasses.fields(settings)
    ]
    return table(["field", "type", "default", "meaning"], rows)


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a dataclass's field."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def command_table(path: str) -> str:
    """Return the commands and options of the Typer application ``module:app`` as tables."""
    parts = []
    for words, command in commands_of(load(path)).items():
        if words:
            parts.append(f"\n#### {words}\n\n{first_paragraph(command)}\n")
        rows = [option.row() for option in options_of(command)]
        if rows:
            parts.append(table(["option", "type", "default", "meaning"], rows))
    return "\n".join(parts)


def commands_of(app: typer.Typer) -> dict[str, Callable[..., None]]:
    """Return the function of each command, and the callback under ""."""
    functions: dict[str, Callable[..., None]] = {}
    callback = app.registered_callback
    if callback is not None and callback.callback is not None:
        functions[""] = callback.callback
    for each in app.registered_commands:
        assert each.callback is not None
        functions[each.name or each.callback.__name__.replace("_", "-")] = each.callback
    return functions


@dataclasses.dataclass(frozen=True)
class Option:
    """A parameter of a command.

    Attributes:
        names: its spellings; for an argument the placeholder.
        annotation: the type.
        default: the value if it is omitted.
        info: Typer's declaration.
    """

    names: list[str]
    annotation: Any
    default: Any
    info: Any

    @property
    def is_flag(self) -> bool:
        return bool in alternatives(self.annotation)

    @property
    def is_argument(self) -> bool:
        return not self.names[0].startswith("-")

    def row(self) -> list[str]:
        kinds = [each for each in alternatives(self.annotation) if each is not type(None)]
        kind = "flag" if self.is_flag else type_text(kinds[0])
        kind = kind.replace("list of text", "text, can be repeated")
        for words, bound in (("at least", self.info.min), ("at most", self.info.max)):
            kind += "" if bound is None else f", {words} {bound}"
        if self.is_argument:
            default = "required"
        elif self.default is None or self.default is False:
            default = "off" if self.default is False else ""
        else:
            default = code(self.default.name if isinstance(self.default, Path) else self.default)
        meaning = cell(self.info.help or "")
        if self.info.envvar:
            meaning += f" Also {code(self.info.envvar)}."
        return [", ".join(code(name) for name in self.names), kind, default, meaning]


def options_of(command: Callable[..., None]) -> list[Option]:
    """Return the command-line parameters of a command."""
    hints = typing.get_type_hints(command, include_extras=True)
    options = []
    for name, parameter in inspect.signature(command).parameters.items():
        if get_origin(hints[name]) is not Annotated:
            continue  # Typer's own context
        annotation, info = get_args(hints[name])[:2]
        # In Annotated the first name takes the place of the default.
        written = [info.default] if isinstance(info.default, str) else []
        written += info.param_decls or ()
        if isinstance(info, typer.models.ArgumentInfo):
            names = [info.metavar or name.upper()]
        elif written:
            names = [each for part in written for each in part.split("/")]
        else:
            word = name.strip("_").replace("_", "-")
            names = [f"--{word}"] + ([f"--no-{word}"] if annotation is bool else [])
        options.append(Option(names, annotation, parameter.default, info))
    return options


def section(
    path: str, annotation: Any, demo: Mapping[str, Any], notes: Mapping[str, str]
) -> list[str]:
    """Return the parts of a section, then those of its subsections."""
    models = [each for each in alternatives(annotation) if is_model(each)]
    parts: list[str] = []
    inner: list[str] = []
    for model in models:
        key, kind = kind_of(model)
        fits = kind is None or kind == demo.get(key)
        title = path + (f", {key} {kind}" if kind else "")
        parts.append(f"\n### {title}\n\n{first_paragraph(model)}\n")
        meanings = attributes_of(model)
        rows = []
        for name, field in fields_of(model):
            key = f"{path}.{name}"
            if any(is_model(each) for each in alternatives(field)):
                inner += section(key, field, demo.get(name) or {}, notes)
                continue
            value = shown(demo[name]) if fits and name in demo else ""
            rows.append([code(name), type_text(field), value, meanings[name] or notes.get(key, "")])
        if rows:
            parts.append(table(["key", "type", "in demo.yaml", "meaning"], rows))
    return parts + inner


def fields_of(model: Any) -> Iterable[tuple[str, Any]]:
    hints = typing.get_type_hints(model, include_extras=True)
    names = getattr(model, "model_fields", None) or model.__annotations__
    return [(name, hints[name]) for name in names]


def kind_of(model: Any) -> tuple[str, str | None]:
    """Return the discriminating key and this model's value, or "" and None."""
    fields = getattr(model, "model_fields", {})
    key = next((name for name in ("kind", "backend") if name in fields), "")
    return key, get_args(fields[key].annotation)[0] if key else None


def is_model(annotation: Any) -> bool:
    return inspect.isclass(annotation) and (
        issubclass(annotation, BaseModel) or typing.is_typeddict(annotation)
    )


def alternatives(annotation: Any) -> list[Any]:
    """Return the types that a value may have."""
    origin = get_origin(annotation)
    if origin is Annotated or origin is NotRequired:
        return alternatives(get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [kind for each in get_args(annotation) for kind in alternatives(each)]
    return [annotation]


def type_text(annotation: Any) -> str:
    """Describe a type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is NotRequired:
        return type_text(arguments[0])
    if origin is Annotated:
        return type_text(arguments[0]) + "".join(bound_text(each) for each in arguments[1:])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_text(each) for each in arguments)
    if origin is Literal:
        return " or ".join(
            code(str(each).lower() if isinstance(each, bool) else each) for each in arguments
        )
    if origin is tuple:
        return "list of " + ", ".join(type_text(each) for each in arguments)
    if origin in (dict, Mapping):
        return "mapping of " + " to ".join(type_text(each) for each in arguments)
    if origin is list:
        return f"list of {type_text(arguments[0])}"
    if origin in (Callable, getattr(typing, "Callable", None)) or annotation is Callable:
        return "function"
    if is_model(annotation):
        return "section"
    return NAMES.get(annotation) or getattr(annotation, "__name__", str(annotation))


def bound_text(constraint: Any) -> str:
    """Describe the bounds of a field in words."""
    phrases = {
        "gt": ", above {}",
        "ge": ", at least {}",
        "lt": ", below {}",
        "le": ", at most {}",
        "multiple_of": ", a multiple of {}",
        "min_length": ", not empty",
    }
    metadata = getattr(constraint, "metadata", None) or [constraint]
    text = ""
    for each in metadata:
        for name, words in phrases.items():
            value = getattr(each, name, None)
            if value is not None:
                text += words.format(value)
    return text


def attributes_of(documented: Any) -> Mapping[str, str]:
    """Return the meanings under ``Attributes:`` of a docstring, by name."""
    meanings = attribute_descriptions(documented)
    return _Meanings({name: cell(meaning) for name, meaning in meanings.items()})


class _Meanings(dict[str, str]):
    def __missing__(self, name: str) -> str:
        return ""


def notes_of(text: str) -> dict[str, str]:
    """Return the comments behind the keys of a YAML file, by dotted key."""
    notes: dict[str, str] = {}
    path: list[str] = []
    for line in text.splitlines():
        match = re.match(r"( *)([\w]+):(.*)", line)
        if match is None:
            continue
        path[len(match[1]) // 2 :] = [match[2]]
        _, separator, note = match[3].partition(" # ")
        if separator:
            notes[".".join(path)] = cell(note.strip())
    return notes


def first_paragraph(documented: Any) -> str:
    text = inspect.cleandoc(documented.__doc__ or "").split("\n\n")[0]
    return cell(" ".join(text.split()))


def shown(value: Any) -> str:
    """Format a value as YAML."""
    if isinstance(value, bool) or value is None:
        return code({True: "true", False: "false", None: "null"}[value])
    if isinstance(value, str):
        return code(f'"{value}"') if not value or " " in value or value[-1] in ";:" else code(value)
    return code(str(value))


def code(text: Any) -> str:
    return f"`{text!s}`".replace("|", "\\|")


def cell(text: str) -> str:
    """Escape docstring text for a Markdown table cell."""
    return text.replace("``", "`").replace("|", "\\|").replace("<", "&lt;")


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def load(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
