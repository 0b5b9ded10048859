"""From a model's own parameters to what it needs of the published tensors, and where that goes.

A model in vLLM's form says it all by itself: the class of a layer says how its parameters are
divided over the ranks, ``packed_modules_mapping`` which projections are fused. Nothing here imports
vLLM: layers are known by the names of their classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from refit_mx.compile.base import CompilePass
from refit_mx.errors import LayoutError
from refit_mx.install import check_install
from refit_mx.layout import TargetTPLayout
from refit_mx.plan.targets import (
    TargetPart,
    TargetTensor,
    fused_qkv_target,
    replicated_target,
    tp_target,
)
from refit_mx.slice_range import SliceRange
from refit_mx.tensor_types import Box, TensorSpec

_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Where a model has no ``packed_modules_mapping`` of its own."""
_MOST_NAMED = 5


@dataclass(frozen=True)
class ModelInstall:
    """What one rank's model needs, and where it goes.

    Attributes:
        targets: to receive, named as the model's parameters.
        live: name of what is installed, after a compile pass, to the memory of the live parameter
            as a C-ordered tensor; without the rows that only pad a vocabulary.
        unused: published tensors that this rank takes nothing of: of other pipeline stages, of
            experts elsewhere, or tied ones.
    """

    targets: tuple[TargetTensor, ...]
    live: Mapping[str, torch.Tensor]
    unused: tuple[str, ...]


def model_install(
    model: nn.Module, published: Sequence[TensorSpec], compiler: CompilePass
) -> ModelInstall:
    """Derive it.

    A parameter of which nothing is published has to be one that the pass makes, such as a scale.

    Args:
        model: one rank's.
        published: the whole model's tensors.
        compiler: makes what is installed of what is received.

    Raises:
        LayoutError: a parameter gets nothing, or what it gets has another shape or dtype; or a
            layer's division does not fit what is published.
        CompileTargetError: the pass cannot compile this.
    """
    names = _Names(model, published)
    targets: list[TargetTensor] = []
    rows: dict[str, int] = {}
    left: dict[str, torch.Tensor] = {}
    for aliases, module, leaf, parameter in _parameters(model):
        for alias in aliases:
            target = _target(names, module, alias, leaf)
            if target is not None:
                targets.append(target)
                if _is_a(module, "VocabParallelEmbedding"):
                    rows[target.name] = target.shape[0]
                left[target.name] = parameter
                break
        else:
            left[aliases[0]] = parameter
    specs = [TensorSpec(target.name, target.dtype, target.shape) for target in targets]
    compiler.check(specs)
    outputs = compiler.output_specs(specs)
    live = {
        spec.name: memory_view(left[spec.name], rows.get(spec.name))
        for spec in outputs
        if spec.name in left
    }
    without = [name for name in left if name not in live]
    if without:
        raise LayoutError(
            f"{len(without)} of {len(left)} parameters get nothing: "
            f"{', '.join(without[:_MOST_NAMED])}. "
            f"{len(published)} tensors are published, such as "
            f"{', '.join(spec.name for spec in published[:_MOST_NAMED])}; "
            f"the compile target is {compiler.name}"
        )
    check_install({spec.name: spec for spec in outputs}, live)
    used = {part.tensor for target in targets for part in target.parts}
    return ModelInstall(
        tuple(targets), live, tuple(spec.name for spec in published if spec.name not in used)
    )


def memory_view(parameter: torch.Tensor, rows: int | None = None) -> torch.Tensor:
    """A parameter's memory as a C-ordered tensor. A column-major matrix gives its transpose.

    Args:
        parameter: contiguous, or transposed over its last two axes.
        rows: of the first axis, from the first one on; None for all.

    Raises:
        LayoutError: it is strided in another way.
    """
    memory = parameter.detach()
    if not memory.is_contiguous() and memory.ndim >= 2:
        memory = memory.transpose(-1, -2)
    if not memory.is_contiguous():
        raise LayoutError(
            f"a parameter of shape {tuple(parameter.shape)} has strides {parameter.stride()}; "
            "expected a contiguous or a column-major one"
        )
    return memory if rows is None else memory[:rows]


def _parameters(
    model: nn.Module,
) -> Iterator[tuple[list[str], nn.Module, str, torch.Tensor]]:
    """Names, layer, last part of the name, and parameter; a tied one once, with all its names."""
    found: dict[int, tuple[list[str], nn.Module, str, torch.Tensor]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{prefix}.{leaf}" if prefix else leaf
            entry = found.setdefault(id(parameter), ([], module, leaf, parameter))
            entry[0].append(name)
    yield from found.values()


class _Names:
    """Published tensors by the name that the model gives them."""

    def __init__(self, model: nn.Module, published: Sequence[TensorSpec]) -> None:
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        self._specs: dict[str, TensorSpec] = {}
        for spec in published:
            # vLLM's WeightsMapper; a name that it maps to None is not the model's.
            name = spec.name if mapper is None else mapper._map_name(spec.name)
            if name is not None:
                self._specs[name] = spec
        self._fused: Mapping[str, Sequence[str]] = {
            **_FUSED,
            **(getattr(model, "packed_modules_mapping", None) or {}),
        }

    def get(self, name: str) -> TensorSpec | None:
        return self._specs.get(name)

    def members(self, name: str) -> list[TensorSpec] | None:
        """Of a fused parameter; None if none is published.

        Raises:
            LayoutError: some are, and some are not.
        """
        head, _, leaf = name.rpartition(".")
        parent, _, last = head.rpartition(".")
        names = [
            f"{parent}.{member}.{leaf}" if parent else f"{member}.{leaf}"
            for member in self._fused.get(last, ())
        ]
        return self._all_or_none(name, names)

    def experts(self, prefix: str, projection: str, count: int) -> list[TensorSpec] | None:
        """One tensor an expert, or one that stacks them all."""
        for stacked in (f"{prefix}.{projection}.weight", f"{prefix}.{projection}"):
            spec = self._specs.get(stacked)
            if spec is not None:
                return [spec]
        names = [f"{prefix}.{expert}.{projection}.weight" for expert in range(count)]
        return self._all_or_none(f"{prefix}.*.{projection}", names)

    def _all_or_none(self, name: str, names: Sequence[str]) -> list[TensorSpec] | None:
        specs = [self._specs[n] for n in names if n in self._specs]
        if specs and len(specs) < len(names):
            missing = [n for n in names if n not in self._specs]
            raise LayoutError(
                f"{name}: made of {len(names)} published tensors, of which {len(missing)} lack: "
                f"{', '.join(missing[:_MOST_NAMED])}"
            )
        return specs or None


def _target(names: _Names, module: nn.Module, name: str, leaf: str) -> TargetTensor | None:
    """What a parameter is made of; None if nothing of it is published."""
    # Any: the layer is vLLM's, and its class name says which attributes it has.
    layer: Any = module
    size, rank = _tensor_parallel(layer)
    if _is_a(module, "QKVParallelLinear"):
        members = names.members(name)
        if members is None:
            return None
        _expect(name, members, 3)
        return fused_qkv_target(
            name,
            *members,
            num_heads=layer.total_num_heads,
            num_kv_heads=layer.total_num_kv_heads,
            head_dim=layer.head_size,
            tp_size=size,
            tp_rank=rank,
        )
    if _is_a(module, "MergedColumnParallelLinear"):
        members = names.members(name)
        return None if members is None else _rows_of_each(name, members, size, rank)
    if _is_a(module, "FusedMoE"):
        return _experts_target(names, layer, name, leaf, size, rank)
    spec = names.get(name)
    if spec is None:
        return None
    if _is_a(module, "VocabParallelEmbedding"):
        indices = layer.shard_indices
        taken = SliceRange(indices.org_vocab_start_index, indices.org_vocab_end_index)
        return tp_target(spec, TargetTPLayout(1, 0, 0, taken), name=name)
    if _is_a(module, "ColumnParallelLinear"):
        return _rows_of_each(name, [spec], size, rank)
    if _is_a(module, "RowParallelLinear") and len(spec.shape) == 2:
        columns = spec.shape[1]
        _expect_divided(name, spec, columns, size)
        taken = SliceRange(rank * (columns // size), (rank + 1) * (columns // size))
        return tp_target(spec, TargetTPLayout(size, rank, 1, taken), name=name)
    return replicated_target(spec, name=name)


def _rows_of_each(name: str, members: Sequence[TensorSpec], size: int, rank: int) -> TargetTensor:
    """An equal part of the rows of each, one below the other."""
    parts, at = [], 0
    for spec in members:
        if not spec.shape or spec.shape[1:] != members[0].shape[1:]:
            raise LayoutError(
                f"{name}: {spec.name} has shape {spec.shape}, {members[0].name} "
                f"{members[0].shape}; expected the same but for the first axis"
            )
        _expect_dtype(name, members)
        _expect_divided(name, spec, spec.shape[0], size)
        rows = spec.shape[0] // size
        box = Box((rank * rows, *(0,) * (len(spec.shape) - 1)), (rows, *spec.shape[1:]))
        parts.append(TargetPart(spec.name, box, (at, *(0,) * (len(spec.shape) - 1)), spec.shape))
        at += rows
    return TargetTensor(name, members[0].dtype, (at, *members[0].shape[1:]), tuple(parts))


def _experts_target(
    names: _Names, layer: Any, name: str, leaf: str, size: int, rank: int
) -> TargetTensor | None:
    """The stacked experts of a rank; gate above up in ``w13_weight``."""
    if leaf not in ("w13_weight", "w2_weight"):
        return None
    prefix = name.rpartition(".")[0]
    count = int(layer.global_num_experts)
    owned = _owned_experts(layer, count)
    choices = (
        (("gate_proj", "up_proj"), ("w1", "w3"))
        if leaf == "w13_weight"
        else (("down_proj",), ("w2",))
    )
    for projections in choices:
        found = [names.experts(prefix, projection, count) for projection in projections]
        members = [specs for specs in found if specs is not None]
        if members and len(members) < len(projections):
            raise LayoutError(f"{name}: only one of {' and '.join(projections)} is published")
        if members:
            break
    else:
        return None
    _expect_dtype(name, [spec for specs in members for spec in specs])
    parts: list[TargetPart] = []
    at, shape = 0, (0, 0)
    for specs in members:
        stacked = len(specs[0].shape) == 3
        if len(specs[0].shape) not in (2, 3) or (stacked and specs[0].shape[0] != count):
            raise LayoutError(
                f"{name}: {specs[0].name} has shape {specs[0].shape}; expected that of one expert, "
                f"or of {count} stacked ones"
            )
        rows, columns = specs[0].shape[-2:]
        axis = 0 if leaf == "w13_weight" else 1
        _expect_divided(name, specs[0], (rows, columns)[axis], size)
        part = [rows, columns]
        part[axis] //= size
        start = [0, 0]
        start[axis] = rank * part[axis]
        for local, expert in enumerate(owned):
            spec = specs[0] if stacked else specs[expert]
            box = Box((expert, *start), (1, *part)) if stacked else Box(tuple(start), tuple(part))
            parts.append(TargetPart(spec.name, box, (local, at, 0), spec.shape))
        at += part[0]
        shape = (at, part[1])
    return TargetTensor(name, members[0][0].dtype, (len(owned), *shape), tuple(parts))


def _owned_experts(layer: Any, count: int) -> list[int]:
    """Global ids in the order in which the layer stacks them."""
    local = getattr(layer, "expert_map", None)
    if local is None:
        return list(range(count))
    places = {int(place): expert for expert, place in enumerate(local.tolist()) if place >= 0}
    return [places[place] for place in sorted(places)]


def _tensor_parallel(layer: Any) -> tuple[int, int]:
    """Size and rank. Older layers keep the size alone; the rank is then that of the process."""
    size = int(getattr(layer, "tp_size", 1))
    rank = getattr(layer, "tp_rank", None)
    if rank is None and size > 1 and not hasattr(layer, "shard_indices"):
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        rank = get_tensor_model_parallel_rank()
    return size, int(rank or 0)


def _is_a(module: nn.Module, name: str) -> bool:
    return any(base.__name__ == name for base in type(module).__mro__)


def _expect(name: str, members: Sequence[TensorSpec], count: int) -> None:
    if len(members) != count:
        raise LayoutError(
            f"{name}: made of {len(members)} tensors by packed_modules_mapping; expected {count}"
        )
    _expect_dtype(name, members)


def _expect_dtype(name: str, members: Sequence[TensorSpec]) -> None:
    for spec in members:
        if spec.dtype != members[0].dtype:
            raise LayoutError(
                f"{name}: {spec.name} is {spec.dtype}, {members[0].name} {members[0].dtype}; "
                "expected the same"
            )


def _expect_divided(name: str, spec: TensorSpec, length: int, size: int) -> None:
    if length % size:
        raise LayoutError(
            f"{name}: {spec.name} of shape {spec.shape} over {size} ranks; "
            f"expected them to divide {length}"
        )
