"""Models, layouts and slices drawn from a seed, and a reference for their contents.

The reference copies the parts of a target one by one, on arrays of bytes ``shape + (item size,)``.
It shares no code with the planner. Casts are torch's, as the package promises.
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
import torch
from refit_processes import rows_of

from refit_mx import (
    SliceRange,
    TargetTensor,
    TargetTPLayout,
    TensorSpec,
    fused_gate_up_target,
    fused_qkv_target,
    mesh_target,
    replicated_target,
    stacked_experts_target,
    tp_target,
)

Array = npt.NDArray[Any]  # Any: bytes, numbers or places, which depends on the caller
Bounds = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and shape of a box."""

WIRES = ("float32", "bfloat16", "float16", "float8_e4m3fn")
LAYOUTS = ("full", "fsdp", "uneven", "tp", "mesh", "experts", "pieces")
HEAD_DIM = 4
NUMBERS = {"float32": np.float32, "int64": np.int64, "int8": np.int8}


@dataclass(frozen=True)
class Drawn:
    """A tensor of a model: the trainer's dtype, its shape, and its dtype on the wire."""

    dtype: str
    shape: tuple[int, ...]
    wire: str


def draw_model(rng: Random) -> dict[str, Drawn]:
    """Draw a small model; one in five has a tensor of a few megabytes."""
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
    wire = rng.choice(WIRES)
    mixed = rng.random() < 0.3
    model = {
        name: Drawn("float32", shape, rng.choice(WIRES) if mixed else wire)
        for name, shape in shapes.items()
    }
    for fused in ("k", "v"):
        model[fused] = Drawn("float32", shapes[fused], model["q"].wire)
    model["up"] = Drawn("float32", shapes["up"], model["gate"].wire)
    model["steps"] = Drawn("int64", (rng.randint(1, 9),), "int64")
    model["codes"] = Drawn("int8", (rng.randint(1, 30), 5), "int8")
    return model


def numbers(seed: int, version: str, model: Mapping[str, Drawn]) -> dict[str, Array]:
    """Return the trainer's weights of a version: the same in every process."""
    weights: dict[str, Array] = {}
    for name, drawn in model.items():
        rng = np.random.default_rng([seed, zlib.crc32(version.encode()), zlib.crc32(name.encode())])
        if drawn.dtype == "float32":
            weights[name] = rng.standard_normal(drawn.shape, dtype=np.float32)
        else:
            weights[name] = rng.integers(-100, 100, drawn.shape).astype(NUMBERS[drawn.dtype])
        weights[name] = np.asarray(weights[name])
    return weights


# Bytes on the wire


def published(seed: int, version: str, model: Mapping[str, Drawn]) -> dict[str, Array]:
    """Return the bytes of every tensor in its wire dtype."""
    return {
        name: bytes_of(torch.from_numpy(values).to(getattr(torch, model[name].wire)))
        for name, values in numbers(seed, version, model).items()
    }


def bytes_of(tensor: torch.Tensor) -> Array:
    """Return a tensor's bytes as an array of ``shape + (item size,)``."""
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return flat.reshape(*tensor.shape, tensor.itemsize)


def widened(content: Array, wire: str) -> Array:
    """Return the bytes of the same numbers as float32."""
    numbers = torch.from_numpy(np.ascontiguousarray(content)).view(getattr(torch, wire))
    return bytes_of(numbers[..., 0].float())


# Boxes of the sources


def draw_held(
    rng: Random, layout: str, model: Mapping[str, Drawn], slots: int
) -> list[list[tuple[str, Bounds]]]:
    """Draw the boxes that each slot holds; together they cover all tensors."""
    held: list[list[tuple[str, Bounds]]] = [[] for _ in range(slots)]
    for name, drawn in model.items():
        for slot, boxes in enumerate(_divided(rng, layout, drawn.shape, slots)):
            held[slot] += [(name, box) for box in boxes]
    for each in held:
        rng.shuffle(each)
    return held


def _divided(rng: Random, layout: str, shape: tuple[int, ...], slots: int) -> list[list[Bounds]]:
    complete: Bounds = ((0,) * len(shape), shape)
    if layout == "full":
        return [[complete] for _ in range(slots)]
    if not shape:
        first = rng.randrange(slots)
        return [[complete] if slot == first or slot == 0 else [] for slot in range(slots)]
    if layout == "uneven":
        return [[box] for box in _cut(complete, 0, _cuts(rng, shape[0], slots - 1))]
    if layout == "tp":
        return [[_chunk(complete, min(1, len(shape) - 1), slots, slot)] for slot in range(slots)]
    if layout == "mesh":
        down, across = {1: (1, 1), 2: rng.choice([(1, 2), (2, 1)]), 3: (3, 1), 4: (2, 2)}[slots]
        boxes = []
        for slot in range(slots):
            box = _chunk(complete, 0, down, slot // across)
            # A tensor with one axis is replicated along the mesh's other dimension.
            boxes.append([_chunk(box, 1, across, slot % across)] if len(shape) > 1 else [box])
        return boxes
    if layout == "experts" and len(shape) == 3:
        experts = [
            _cut(complete, 0, list(range(1, shape[0])))[expert] for expert in range(shape[0])
        ]
        return [experts[slot::slots] for slot in range(slots)]
    if layout == "pieces":
        dealt: list[list[Bounds]] = [[] for _ in range(slots)]
        for box in _cut(complete, 0, _cuts(rng, shape[0], rng.randint(0, 4))):
            for slot in rng.sample(range(slots), rng.randint(1, min(2, slots))):
                dealt[slot].append(box)
        return dealt
    return [[_chunk(complete, 0, slots, slot)] for slot in range(slots)]


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


# Targets of the receivers


def draw_targets(rng: Random, model: Mapping[str, Drawn]) -> dict[str, TargetTensor]:
    """Draw the targets of a receiver: a part of most tensors."""
    specs = {name: TensorSpec(name, drawn.wire, drawn.shape) for name, drawn in model.items()}
    targets = []
    plain = [name for name in model if name not in ("q", "k", "v", "gate", "up")]
    if rng.random() < 0.6:
        tp = rng.choice([1, 2, 4])
        q, k, v = (specs[name] for name in "qkv")
        heads, kv_heads = q.shape[0] // HEAD_DIM, k.shape[0] // HEAD_DIM
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": HEAD_DIM}
        ranks = {"tp_size": tp, "tp_rank": rng.randrange(tp)}
        targets.append(fused_qkv_target("qkv", q, k, v, **sizes, **ranks))
    else:
        plain += ["q", "k", "v"]
    if rng.random() < 0.6:
        tp = rng.choice([1, 2, 4])
        rank = rng.randrange(tp)
        targets.append(fused_gate_up_target("gate_up", specs["gate"], specs["up"], tp, rank))
    else:
        plain += ["gate", "up"]
    for name in plain:
        if rng.random() < 0.9 or name == "large":
            targets.append(_draw_target(rng, specs[name]))
    return {target.name: target for target in targets}


def _draw_target(rng: Random, spec: TensorSpec) -> TargetTensor:
    shape = spec.shape
    kinds = ["full", "tp", "tp", "tp", "range", "mesh"] if shape else ["full"]
    if spec.name == "experts":
        kinds += ["experts"] * 6
    kind = rng.choice(kinds)
    axis = rng.randrange(len(shape)) if shape else 0
    if kind == "tp":
        ranks = rng.randint(1, 4)
        return tp_target(spec, TargetTPLayout(ranks, rng.randrange(ranks), axis))
    if kind == "range":
        rows = SliceRange(*_cuts(rng, shape[axis], 2))
        return tp_target(spec, TargetTPLayout(1, 0, axis, target_range=rows))
    if kind == "mesh":
        sizes = [(rng.randrange(len(shape)), rng.randint(1, 3)) for _ in range(2)]
        return mesh_target(spec, [(along, size, rng.randrange(size)) for along, size in sizes])
    if kind == "experts":
        ids = rng.sample(range(shape[0]), rng.randint(1, shape[0]))
        return stacked_experts_target(spec.name, spec, ids)
    return replicated_target(spec)


def places(model: Mapping[str, Drawn]) -> dict[str, Array]:
    """Return arrays for `picked` that hold each element's flat place, counted over all tensors.

    So the picked values show where each element comes from.
    """
    numbered, first = {}, 0
    for name, drawn in model.items():
        size = int(np.prod(drawn.shape, dtype=np.int64))
        numbered[name] = np.arange(first, first + size).reshape(*drawn.shape, 1)
        first += size
    return numbered


def held_places(
    model: Mapping[str, Drawn], held: Sequence[tuple[str, Bounds]], of: Mapping[str, Array]
) -> npt.NDArray[np.bool_]:
    """Return a mask of the places that the boxes hold."""
    total = sum(int(np.prod(drawn.shape, dtype=np.int64)) for drawn in model.values())
    mask = np.zeros(total, np.bool_)
    for name, (start, shape) in held:
        index = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
        mask[of[name][index].reshape(-1)] = True
    return mask
