"""Types of Python values that object columns store beyond msgpack's own, without pickle.

Each type has a name and two functions. The name is stored with the value, and a process that reads
it needs the same registration. Types of Pillow, pydantic and transformers are registered here, but
their libraries are imported only when such a value is read.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar  # Any: values are the caller's own

T = TypeVar("T")


@dataclass(frozen=True)
class ObjectType:
    """A type of values of object columns.

    Attributes:
        name: name that is stored with each value.
        encode: returns the stored form of a value, made of msgpack's types, numpy arrays, tensors,
            or values of other registered types.
        decode: returns the value for what ``encode`` returned.
    """

    name: str
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def register_object_type(
    name: str, cls: type[T], encode: Callable[[T], Any], decode: Callable[[Any], T]
) -> None:
    """Let object columns store values of ``cls`` and its subclasses.

    Call it in every process that writes or reads such values, for example where ``cls`` is defined.

    Args:
        name: name that is stored with each value; choose one that other libraries do not use.
        cls: the type; a registration of a subclass takes precedence over its base's.
        encode: see `ObjectType`.
        decode: see `ObjectType`; it must be safe with data that anyone wrote.

    Raises:
        ValueError: the name is registered for another type.
    """
    other = _registered.get(name)
    if other is not None and other is not _by_class.get(_path(cls)):
        raise ValueError(f"register_object_type: the name {name!r} is registered for another type")
    _add(_path(cls), ObjectType(name, encode, decode))


def type_of(value: object) -> ObjectType | None:
    """Return the registration for a value's class or its nearest registered base."""
    for cls in type(value).__mro__:
        registered = _by_class.get(_path(cls))
        if registered is not None:
            return registered
    return None


def type_named(name: str) -> ObjectType:
    """Return a registration; raise ValueError if this process has none of that name."""
    try:
        return _registered[name]
    except KeyError:
        raise ValueError(
            f"stored value has the type {name!r}, which is not registered in this process: call "
            "dataplane_core.tensors.object_types.register_object_type, or import a module that does"
        ) from None


_by_class: dict[str, ObjectType] = {}
_registered: dict[str, ObjectType] = {}


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _add(path: str, registered: ObjectType) -> None:
    _by_class[path] = registered
    _registered[registered.name] = registered


def _encode_image(image: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        image.save(buffer, format="PNG")
    except OSError:
        raise TypeError(
            f"an image of mode {image.mode} cannot be stored as PNG; convert it, for example to RGB"
        ) from None
    return buffer.getvalue()


def _decode_image(png: bytes) -> Any:
    image = importlib.import_module("PIL.Image").open(io.BytesIO(png), formats=["PNG"])
    image.load()
    return image.copy()


def _encode_model(model: Any) -> list[Any]:
    cls = type(model)
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _model_class(name) is None:
        raise TypeError(
            f"a pydantic model of {name!r} cannot be stored, because no reader can look up its "
            "class by that name; define the class in a module, not in a function"
        )
    return [name, model.model_dump_json()]


def _decode_model(stored: list[Any]) -> Any:
    name, text = stored
    model: Any = _model_class(name)
    if model is None:
        raise ValueError(
            f"stored value is a pydantic model {name!r}, which this process has not imported"
        )
    return model.model_validate_json(text)


def _model_class(name: str) -> type | None:
    """Return the pydantic model ``module:qualified.name``; None if this process has none."""
    # Nothing is imported or called by a stored name: that could run any module's code.
    module, _, path = name.partition(":")
    value: Any = sys.modules.get(module)
    for part in path.split("."):
        value = vars(value).get(part) if isinstance(value, ModuleType | type) else None
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not isinstance(value, type):
        return None
    return value if issubclass(value, pydantic.BaseModel) else None


def _decode_features(kind: str) -> Callable[[dict[str, Any]], Any]:
    return lambda data: getattr(importlib.import_module("transformers"), kind)(data)


_add(
    "builtins.complex",
    ObjectType("complex", lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
)
_add(
    "builtins.slice",
    ObjectType(
        "slice", lambda value: [value.start, value.stop, value.step], lambda parts: slice(*parts)
    ),
)
_add("PIL.Image.Image", ObjectType("PIL.Image", _encode_image, _decode_image))
_add("pydantic.main.BaseModel", ObjectType("pydantic", _encode_model, _decode_model))
for _path_of, _kind in (
    ("transformers.feature_extraction_utils.BatchFeature", "BatchFeature"),
    ("transformers.tokenization_utils_base.BatchEncoding", "BatchEncoding"),
):
    _name, _encode = f"transformers.{_kind}", lambda features: dict(features.data)
    _add(_path_of, ObjectType(_name, _encode, _decode_features(_kind)))
