"""Mapping from published tensors to a model's parameters, recorded from its weight loaders.

A model's ``load_weights`` runs once over tensors without memory, and each copy is recorded instead
of executed. The loaders know the naming, fusing, sharding and expert placement of their vLLM
version, so none of that is repeated here. vLLM's layerwise reload also runs loaders over tensors
without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from refit_mx.errors import LayoutError
from refit_mx.layout import Box, TensorSpec
from refit_mx.plan.target_tensors import TargetPart, TargetTensor


@dataclass(frozen=True)
class View:
    """The box of a strided tensor that a view shows."""

    start: tuple[int, ...]  # first element on each axis of the base tensor
    # Elements on each axis of the base tensor; 1 on those that the view lacks.
    size: tuple[int, ...]
    # Axes of the base tensor in the order of the view's axes, without those of size 1.
    order: tuple[int, ...]


def locate_view(base: torch.Tensor, view: torch.Tensor) -> View | None:
    """Return the box of ``base`` that ``view`` shows; None if it is not one box.

    ```
    base (4, 6), strides (6, 1)      view (2, 3), strides (6, 1), offset 14
                                     14 = 2 * 6 + 2  ->  start (2, 2), size (2, 3)
    ```
    """
    strides: tuple[int, ...] = tuple(base.stride())
    axes = [axis for axis in range(base.ndim) if base.shape[axis] > 1]
    axes.sort(key=lambda axis: (-strides[axis], axis))
    start = [0] * base.ndim
    offset = int(view.storage_offset()) - int(base.storage_offset())
    if offset < 0:
        return None
    for axis in axes:
        start[axis], offset = divmod(offset, strides[axis])
    if offset:
        return None
    size, order = [1] * base.ndim, list[int]()
    for length, stride in zip(view.shape, view.stride(), strict=True):
        if length == 1:
            continue
        matching = [axis for axis in axes if strides[axis] == stride and axis not in order]
        if not matching:
            return None
        size[matching[0]] = length
        order.append(matching[0])
    if any(start[a] + size[a] > base.shape[a] for a in range(base.ndim)):
        return None
    return View(tuple(start), tuple(size), tuple(order))


@dataclass
class TracedParameter:
    """Copies that the loaders make into one parameter."""

    # Name and view of each source, and the view of the parameter.
    copies: list[tuple[str, View, View]] = field(default_factory=list)
    # Views of the parameter that are filled with 0, such as padding rows of a vocabulary.
    zeros: list[View | None] = field(default_factory=list)
    # What its loader does besides copying boxes; None if it only copies boxes.
    obstacle: str | None = None


class LoaderTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of copies from sources into parameters, which are not executed.

    The parameters may be without memory; none is written to.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.traced: dict[str, TracedParameter] = {}
        self._parameters = {_storage(tensor): (name, tensor) for name, tensor in parameters.items()}
        self._sources = {_storage(tensor): (name, tensor) for name, tensor in sources.items()}

    # Any: operators have arguments and results of any type.
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        written = _written(func, args)
        match = None if written is None else self._parameters.get(_storage(written))
        if written is None or match is None:
            return func(*args, **kwargs)
        name, parameter = match
        entry = self.traced.setdefault(name, TracedParameter())
        if func is torch.ops.aten.copy_.default:
            self._record(entry, parameter, written, args[1])
        elif _writes_zeros(func, args):
            entry.zeros.append(locate_view(parameter, written))
        else:
            entry.obstacle = entry.obstacle or f"its loader calls {func}"
        return written

    def _record(
        self,
        entry: TracedParameter,
        parameter: torch.Tensor,
        written: torch.Tensor,
        copied: torch.Tensor,
    ) -> None:
        source = self._sources.get(_storage(copied))
        if source is None:
            entry.obstacle = entry.obstacle or "its loader computes what it stores"
            return
        name, tensor = source
        taken, placed = locate_view(tensor, copied), locate_view(parameter, written)
        if taken is None or placed is None or tuple(copied.shape) != tuple(written.shape):
            entry.obstacle = entry.obstacle or f"its loader reshapes {name}"
        elif any(tuple(sorted(view.order)) != view.order for view in (taken, placed)):
            entry.obstacle = entry.obstacle or f"its loader transposes {name}"
        else:
            entry.copies.append((name, taken, placed))


def trace_loaders(
    load_weights: Callable[[Iterable[tuple[str, torch.Tensor]]], object],
    parameters: Mapping[str, torch.Tensor],
    published: Sequence[TensorSpec],
) -> dict[str, TracedParameter]:
    """Run a model's ``load_weights``; return the writes to each parameter, by name.

    The parameters are in the form that the loaders expect; the tensors of the checkpoint are the
    published ones.

    Raises:
        LayoutError: a loader fails.
    """
    sources = {
        spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
        for spec in published
    }
    current = "no tensor"

    def weights() -> Iterable[tuple[str, torch.Tensor]]:
        nonlocal current
        for name, tensor in sources.items():
            current = name
            yield name, tensor

    trace = LoaderTrace(parameters, sources)
    try:
        with torch.no_grad(), trace:
            load_weights(weights())
    except Exception as error:  # models raise anything
        raise LayoutError(
            f"the model's load_weights fails at {current}: {type(error).__name__}: {error}"
        ) from error
    return trace.traced


def traced_target(
    name: str, traced: TracedParameter, parameter: torch.Tensor, specs: Mapping[str, TensorSpec]
) -> TargetTensor:
    """Return a parameter as a target with parts of published tensors.

    It has fewer rows than the parameter if the loader fills the others with 0.

    Raises:
        LayoutError: it is not made of copies of boxes, or a part of it has no copy.
    """
    if traced.obstacle is not None:
        raise LayoutError(f"{name}: {traced.obstacle}; expected copies of published tensors")
    shape = tuple(parameter.shape)
    dtypes = {specs[source].dtype for source, _, _ in traced.copies}
    if len(dtypes) > 1:
        raise LayoutError(
            f"{name}: combines tensors of {' and '.join(sorted(dtypes))}; expected one dtype"
        )
    filled = [
        view.start[0]
        for view in traced.zeros
        if view is not None
        and shape
        and view.start[0] + view.size[0] == shape[0]
        and view.size[1:] == shape[1:]
    ]
    covered = (min(filled), *shape[1:]) if filled else shape
    parts = {
        # The last copy into a place wins, as in the loaders: some load a shared tensor twice.
        (placed.start, placed.size): TargetPart(
            source, Box(taken.start, taken.size), placed.start, specs[source].shape
        )
        for source, taken, placed in traced.copies
    }
    return TargetTensor(name, dtypes.pop(), covered, tuple(parts.values()))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    """Return an operator's first argument if the operator writes to it."""
    declared = func._schema.arguments
    if not args or not declared or not isinstance(args[0], torch.Tensor):
        return None
    alias = declared[0].alias_info
    return args[0] if alias is not None and alias.is_write else None


def _writes_zeros(func: Any, args: tuple[Any, ...]) -> bool:
    if func is torch.ops.aten.zero_.default:
        return True
    return func is torch.ops.aten.fill_.Scalar and args[1] == 0
