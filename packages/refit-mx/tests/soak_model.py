"""Models, layouts and slices drawn from a seed, and a reference for what comes out of them.

The reference works on arrays of bytes, ``shape + (item size,)``, and shares no code with the
package: not its layouts, not its planner, and not torch's casts.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]  # Any: bytes, numbers or places, as the caller says
Bounds = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and shape of a box."""

WIRES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
LAYOUTS = ("full", "fsdp", "uneven", "tp", "mesh", "experts", "pieces")
HEAD_DIM = 4
NUMBERS = {"float32": np.float32, "int64": np.int64, "int8": np.int8}


@dataclass(frozen=True)
class Drawn:
    """A tensor of a model: what the trainer has, and what travels."""

    dtype: str
    shape: tuple[int, ...]
    wire: str


@dataclass(frozen=True)
class Slice:
    """What a receiver wants of some tensors.

    Attributes:
        name: of the target.
        kind: whole, tp, range, mesh, experts, qkv or gate_up.
        of: names of the tensors.
        args: of the kind.
    """

    name: str
    kind: str
    of: tuple[str, ...]
    args: tuple[Any, ...] = ()


def draw_model(rng: Random) -> dict[str, Drawn]:
    """A small model; one in five has a tensor of some megabytes."""
    hidden = rng.randint(3, 24)
    heads, kv_heads = rng.choice([4, 8]), rng.choice([1, 2, 4])
    middle = 4 * rng.randint(1, 8)
    large = (rng.randint(900, 1300), 700) if rng.random() < 0.2 else (rng.randint(1, 90), 33)
    shapes = {
        "embed": (rng.randint(5, 80), rng.randint(1, 40)),
        "q": (heads * HEAD_DIM, hidden),
        "k": (kv_heads * HEAD_DIM, hidden),
        "v": (kv_heads * HEAD_DIM, hidden),
        "gate": (middle, hidden),
        "up": (middle, hidden),
        "down": (rng.randint(2, 23), rng.randint(2, 17)),
        "experts": (rng.randint(2, 7), rng.randint(1, 6), rng.randint(1, 9)),
        "large": large,
        "norm": (hidden,),
        "scale": (),
    }
    one = rng.choice(WIRES)
    mixed = rng.random() < 0.3
    model = {
        name: Drawn("float32", shape, rng.choice(WIRES) if mixed else one)
        for name, shape in shapes.items()
    }
    for fused in ("k", "v"):
        model[fused] = Drawn("float32", shapes[fused], model["q"].wire)
    model["up"] = Drawn("float32", shapes["up"], model["gate"].wire)
    model["steps"] = Drawn("int64", (rng.randint(1, 9),), "int64")
    model["codes"] = Drawn("int8", (rng.randint(1, 30), 5), "int8")
    return model


def numbers(seed: int, version: str, model: Mapping[str, Drawn]) -> dict[str, Array]:
    """The weights of a version, as the trainer has them: the same in every process."""
    made: dict[str, Array] = {}
    for name, drawn in model.items():
        rng = np.random.default_rng([seed, zlib.crc32(version.encode()), zlib.crc32(name.encode())])
        if drawn.dtype == "float32":
            made[name] = rng.standard_normal(drawn.shape, dtype=np.float32)
        else:
            made[name] = rng.integers(-100, 100, drawn.shape).astype(NUMBERS[drawn.dtype])
        made[name] = np.asarray(made[name])
    return made


# What travels


def published(seed: int, version: str, model: Mapping[str, Drawn]) -> dict[str, Array]:
    """The bytes of every tensor in its wire dtype."""
    return {
        name: bytes_of(_cast(whole, model[name].wire))
        for name, whole in numbers(seed, version, model).items()
    }


def bytes_of(array: Array) -> Array:
    """``shape + (item size,)``."""
    flat = np.frombuffer(array.tobytes(), np.uint8)
    return flat.reshape(*array.shape, array.itemsize)


def widened(content: Array, wire: str) -> Array:
    """The bytes of the same numbers as float32."""
    codes = np.frombuffer(content.tobytes(), np.uint16).reshape(content.shape[:-1])
    if wire == "bfloat16":
        return bytes_of(np.asarray(codes.astype(np.uint32) << np.uint32(16)))
    return bytes_of(np.asarray(codes.view(np.float16).astype(np.float32)))


def _cast(whole: Array, wire: str) -> Array:
    if wire == "float16":
        return whole.astype(np.float16)
    if wire == "bfloat16":
        bits = np.ascontiguousarray(whole).view(np.uint32).reshape(whole.shape)
        # To the nearest; ties to the even one.
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        return np.asarray((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    if wire == "float8_e4m3fn":
        sized = np.abs(whole)
        # Codes count up with the numbers that they stand for, so ties to even are on the code.
        low = np.searchsorted(_E4M3, sized, side="right") - 1
        high = np.minimum(low + 1, len(_E4M3) - 1)
        under, over = sized - _E4M3[low], _E4M3[high] - sized
        up = (over < under) | ((over == under) & (low % 2 == 1))
        return np.asarray(np.where(up, high, low) | (np.signbit(whole) << 7)).astype(np.uint8)
    return whole


_E4M3 = np.array(
    [
        (code & 7) * 2.0**-9 if code < 8 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3) - 7)
        for code in range(127)
    ]
)
"""float8_e4m3fn's numbers of codes 0 to 126; 127 is no number."""


# Where the sources have it


def rows_of(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """As torch.chunk divides."""
    step = -(-size // ranks)
    return min(rank * step, size), min((rank + 1) * step, size)


def draw_held(
    rng: Random, layout: str, model: Mapping[str, Drawn], slots: int
) -> list[list[tuple[str, Bounds]]]:
    """What each of some slots holds; together at least all of it."""
    held: list[list[tuple[str, Bounds]]] = [[] for _ in range(slots)]
    for name, drawn in model.items():
        for slot, boxes in enumerate(_divided(rng, layout, drawn.shape, slots)):
            held[slot] += [(name, box) for box in boxes]
    for each in held:
        rng.shuffle(each)
    return held


def _divided(rng: Random, layout: str, shape: tuple[int, ...], slots: int) -> list[list[Bounds]]:
    whole: Bounds = ((0,) * len(shape), shape)
    if layout == "full":
        return [[whole] for _ in range(slots)]
    if not shape:
        first = rng.randrange(slots)
        return [[whole] if slot == first or slot == 0 else [] for slot in range(slots)]
    if layout == "uneven":
        return [[box] for box in _cut(whole, 0, _cuts(rng, shape[0], slots - 1))]
    if layout == "tp":
        return [[_chunk(whole, min(1, len(shape) - 1), slots, slot)] for slot in range(slots)]
    if layout == "mesh":
        down, across = {1: (1, 1), 2: rng.choice([(1, 2), (2, 1)]), 3: (3, 1), 4: (2, 2)}[slots]
        found = []
        for slot in range(slots):
            box = _chunk(whole, 0, down, slot // across)
            # A tensor of one axis is replicated along the mesh's other dimension.
            found.append([_chunk(box, 1, across, slot % across)] if len(shape) > 1 else [box])
        return found
    if layout == "experts" and len(shape) == 3:
        one = [_cut(whole, 0, list(range(1, shape[0])))[expert] for expert in range(shape[0])]
        return [one[slot::slots] for slot in range(slots)]
    if layout == "pieces":
        dealt: list[list[Bounds]] = [[] for _ in range(slots)]
        for box in _cut(whole, 0, _cuts(rng, shape[0], rng.randint(0, 4))):
            for slot in rng.sample(range(slots), rng.randint(1, min(2, slots))):
                dealt[slot].append(box)
        return dealt
    return [[_chunk(whole, 0, slots, slot)] for slot in range(slots)]


def _cuts(rng: Random, size: int, count: int) -> list[int]:
    return sorted(rng.randint(0, size) for _ in range(count))


def _cut(box: Bounds, axis: int, at: Sequence[int]) -> list[Bounds]:
    edges = [0, *at, box[1][axis]]
    return [_part(box, axis, a, b) for a, b in pairwise(edges)]


def _chunk(box: Bounds, axis: int, ranks: int, rank: int) -> Bounds:
    return _part(box, axis, *rows_of(box[1][axis], ranks, rank))


def _part(box: Bounds, axis: int, first: int, stop: int) -> Bounds:
    start, shape = list(box[0]), list(box[1])
    start[axis] += first
    shape[axis] = stop - first
    return tuple(start), tuple(shape)


# What the receivers want


def draw_slices(rng: Random, model: Mapping[str, Drawn]) -> list[Slice]:
    """What one receiver wants: of most tensors something."""
    found = []
    plain = [name for name in model if name not in ("q", "k", "v", "gate", "up")]
    if rng.random() < 0.6:
        tp = rng.choice([1, 2, 4])
        found.append(Slice("qkv", "qkv", ("q", "k", "v"), (tp, rng.randrange(tp))))
    else:
        plain += ["q", "k", "v"]
    if rng.random() < 0.6:
        tp = rng.choice([1, 2, 4])
        found.append(Slice("gate_up", "gate_up", ("gate", "up"), (tp, rng.randrange(tp))))
    else:
        plain += ["gate", "up"]
    for name in plain:
        if rng.random() < 0.9 or name == "large":
            found.append(_draw_slice(rng, name, model[name].shape))
    return found


def _draw_slice(rng: Random, name: str, shape: tuple[int, ...]) -> Slice:
    kinds = ["whole", "tp", "tp", "tp", "range", "mesh"] if shape else ["whole"]
    if name == "experts":
        kinds += ["experts"] * 6
    kind = rng.choice(kinds)
    axis = rng.randrange(len(shape)) if shape else 0
    args: tuple[Any, ...] = ()
    if kind == "tp":
        ranks = rng.randint(1, 4)
        args = (ranks, rng.randrange(ranks), axis)
    elif kind == "range":
        args = (axis, *_cuts(rng, shape[axis], 2))
    elif kind == "mesh":
        sizes = [(rng.randrange(len(shape)), rng.randint(1, 3)) for _ in range(2)]
        args = tuple((along, size, rng.randrange(size)) for along, size in sizes)
    elif kind == "experts":
        args = tuple(rng.sample(range(shape[0]), rng.randint(1, shape[0])))
    return Slice(name, kind, (name,), args)


def picked(wanted: Slice, content: Mapping[str, Array]) -> Array:
    """A slice of arrays that have one axis more than their tensors."""
    arrays = [content[name] for name in wanted.of]
    args = wanted.args
    if wanted.kind == "tp":
        ranks, rank, axis = args
        return _rows(arrays[0], axis, *rows_of(arrays[0].shape[axis], ranks, rank))
    if wanted.kind == "range":
        return _rows(arrays[0], *args)
    if wanted.kind == "mesh":
        found = arrays[0]
        for axis, size, rank in args:
            found = _rows(found, axis, *rows_of(found.shape[axis], size, rank))
        return found
    if wanted.kind == "experts":
        return np.stack([arrays[0][expert] for expert in args])
    if wanted.kind == "qkv":
        ranks, rank = args
        heads = arrays[1].shape[0] // HEAD_DIM
        first, own = rank * heads // ranks, max(1, heads // ranks)
        kept = [array[first * HEAD_DIM : (first + own) * HEAD_DIM] for array in arrays[1:]]
        return np.concatenate([np.split(arrays[0], ranks)[rank], *kept])
    if wanted.kind == "gate_up":
        ranks, rank = args
        return np.concatenate([np.split(array, ranks)[rank] for array in arrays])
    return arrays[0]


def _rows(array: Array, axis: int, first: int, stop: int) -> Array:
    index = [slice(None)] * array.ndim
    index[axis] = slice(first, stop)
    return array[tuple(index)]


def places(model: Mapping[str, Drawn]) -> dict[str, Array]:
    """For `picked`: the flat place of every element of every tensor, in order over the tensors, so
    that what is picked tells where it came from."""
    found, first = {}, 0
    for name, drawn in model.items():
        size = int(np.prod(drawn.shape, dtype=np.int64))
        found[name] = np.arange(first, first + size).reshape(*drawn.shape, 1)
        first += size
    return found


def held_places(
    model: Mapping[str, Drawn], held: Sequence[tuple[str, Bounds]], of: Mapping[str, Array]
) -> npt.NDArray[np.bool_]:
    """Which places some boxes hold."""
    total = sum(int(np.prod(drawn.shape, dtype=np.int64)) for drawn in model.values())
    mask = np.zeros(total, np.bool_)
    for name, (start, shape) in held:
        index = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
        mask[of[name][index].reshape(-1)] = True
    return mask
