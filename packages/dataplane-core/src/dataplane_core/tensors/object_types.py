"""Types of Python values that object columns store beyond msgpack's own, without pickle.

Each type has a name and two functions. The name is stored with the value, and a process that reads
it needs the same registration. Types of Pillow, pydantic and transformers are registered here. This
module imports Pillow and transformers only to decode such a value, and never imports pydantic.
"""

from __future__ import annotations

import importlib
import numbers
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as fields_of
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


_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    kind.__name__: kind for kind in (dict, list, tuple, set, frozenset)
}


def _wrap(value: Any) -> Any:
    """Return a value with the types of its containers, which msgpack alone would lose."""
    kind = type(value).__name__
    if type(value) is not _CONTAINERS.get(kind):
        if isinstance(value, str):  # Pillow's subclass for a PNG text with its language
            return str(value)
        # Pillow's rational number compares equal to the float.
        rational = isinstance(value, numbers.Rational) and not isinstance(value, int)
        return float(value) if rational else value
    items = value.items() if kind == "dict" else value
    return {kind: [_wrap(item) for item in items]}


def _unwrap(stored: Any) -> Any:
    if not isinstance(stored, dict):
        return stored
    ((kind, items),) = stored.items()
    return _CONTAINERS[kind](_unwrap(item) for item in items)


def _encode_image(image: Any) -> list[Any]:
    if getattr(image, "is_animated", False):
        raise ValueError(
            f"an image of {image.n_frames} frames cannot be stored, because only one would be read "
            "back; store image.copy(), or a list of copies of its frames"
        )
    pixels = image.tobytes()  # loads the palette and info from the file, too
    palette = image.getpalette(None)
    colors = None if palette is None else [image.im.getpalettemode(), bytes(palette)]
    return [image.mode, image.size, pixels, colors, _wrap(dict(image.info)), image.format]


def _decode_image(stored: list[Any]) -> Any:
    mode, (width, height), pixels, colors, info, form = stored
    # Checked before Pillow allocates the image; mode "1" has 8 pixels per byte.
    if width * height > 8 * len(pixels):
        raise ValueError(f"{len(pixels)} bytes are too few for {width} x {height} pixels")
    image = importlib.import_module("PIL.Image").frombytes(mode, (width, height), pixels)
    if colors is not None:
        rawmode, palette = colors
        image.putpalette(palette, rawmode)
    image.info, image.format = _unwrap(info), form
    return image


def _encode_model(model: Any) -> list[Any]:
    path = f"{type(model).__module__}:{type(model).__qualname__}"
    try:
        text = model.model_dump_json(by_alias=True, round_trip=True)
        stored = [path, text, sorted(model.model_fields_set)]
        difference = _difference(model, _decode_model(stored))
        if difference is not None:
            raise ValueError(difference)
    except Exception as error:  # the model's own code can raise anything
        raise TypeError(
            f"the pydantic model {path!r} cannot be restored from its JSON: {error}; "
            "use register_object_type, put its model_dump(), or, for NaN and infinity, set "
            "ser_json_inf_nan='constants' in its config"
        ) from error
    return stored


def _difference(value: Any, restored: Any, where: str = "") -> str | None:
    """Describe the first part whose type or value differs; return None if there is none."""
    if type(value) is not type(restored):
        kinds = [type(each).__name__ for each in (value, restored)]
        return f"field {where!r} changes from {kinds[0]} to {kinds[1]}"
    parts = _parts(value)
    if parts is None:
        same = value == restored or (value != value and restored != restored)  # NaN
    else:
        others = _parts(restored) or []
        same = len(parts) == len(others)
        for (name, part), (_, other) in zip(parts, others, strict=False):
            difference = _difference(part, other, f"{where}{name}".removeprefix("."))
            if difference is not None:
                return difference
    return None if same else f"field {where!r} changes its value"


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a value with their names; None if it has none."""
    if hasattr(type(value), "__pydantic_private__"):
        fields = {name: value.__dict__.get(name) for name in type(value).model_fields}
        fields |= (value.__pydantic_extra__ or {}) | (value.__pydantic_private__ or {})
        return [(f".{name}", part) for name, part in fields.items()]
    if is_dataclass(value):
        return [(f".{each.name}", getattr(value, each.name)) for each in fields_of(value)]
    if isinstance(value, Mapping):
        keys = [("'s keys", list(value))]
        return keys + [(f"[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, set | frozenset):
        value = sorted(value, key=lambda each: (type(each).__name__, repr(each)))
    if isinstance(value, list | tuple | deque):
        return [(f"[{number}]", part) for number, part in enumerate(value)]
    return None


def _decode_model(stored: list[Any]) -> Any:
    path, text, fields_set = stored
    module, _, names = path.partition(":")
    # Do not import the stored module: that could run any module's code.
    model: Any = sys.modules.get(module)
    for name in names.split("."):
        model = getattr(model, "__dict__", {}).get(name)
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not isinstance(model, type) or not issubclass(model, pydantic.BaseModel):
        raise ValueError(
            f"stored value is a pydantic model {path!r}, which this process has not imported"
        )
    known: Any = model  # mypy narrows it to a type without pydantic's methods
    restored = known.model_validate_json(text)
    restored.model_fields_set.intersection_update(fields_set)
    return restored


def _encode_features(features: Any) -> list[Any]:
    if _path(type(features)) not in _by_class:  # a subclass would come back as its base
        raise TypeError(
            f"{type(features).__name__} cannot be stored; use register_object_type, or put its data"
        )
    encodings = getattr(features, "_encodings", None)
    if encodings is None:
        return [dict(features.data), None, None]
    states = [encoding.__getstate__() for encoding in encodings]  # JSON
    return [dict(features.data), states, features.n_sequences]


def _decode_features(kind: str) -> Callable[[list[Any]], Any]:
    def decode(stored: list[Any]) -> Any:
        data, states, sequences = stored
        make = getattr(importlib.import_module("transformers"), kind)
        if states is None:
            return make(data)
        encodings = []
        for state in states:
            encoding = importlib.import_module("tokenizers").Encoding()
            encoding.__setstate__(state)
            encodings.append(encoding)
        return make(data, encodings, n_sequences=sequences)

    return decode


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
    _add(_path_of, ObjectType(f"transformers.{_kind}", _encode_features, _decode_features(_kind)))
