"""`CompilePass`: what turns published tensors into those that a kernel wants, at the receiver.

The trainer stays free of kernels: it publishes raw tensors, and each receiver compiles its own part
of them, from scratch memory into scratch memory, before anything live changes. A pass is made by
name, so that a configuration or another package can choose one.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

import torch

from refit_mx.errors import RefitConfigError
from refit_mx.manifest import Scalar
from refit_mx.tensor_types import TensorSpec

ENTRY_POINT_GROUP = "refit_mx.compile_passes"
"""An entry point of this group is a pass: its name is the compile target, its value the factory."""


class CompilePass(Protocol):
    """Makes the tensors of one compile target. Has no state; one thread or several may use it.

    The specs it is given are those of a receiver's own tensors, that is of its slices, and so are
    the tensors: a scale belongs to a slice, not to the whole model's tensor.
    """

    @property
    def name(self) -> str:
        """The compile target it makes, such as ``deep_gemm_fp8``."""

    @property
    def accepts(self) -> frozenset[str]:
        """The compile targets that it can start from, usually ``hf_raw`` alone."""

    @property
    def metadata(self) -> Mapping[str, Scalar]:
        """What it promises of its output; a publisher of such bytes puts it into the registry."""

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """See whether it can compile these.

        Raises:
            CompileTargetError: it cannot; names the tensor and why.
        """

    def output_specs(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """The tensors that it makes of these, in this order; a shape is that of C-ordered bytes."""

    def unchanged(self, specs: Sequence[TensorSpec]) -> frozenset[str]:
        """Names of outputs that are the input of the same name, byte for byte.

        A caller that uses the inputs in their place leaves these out of ``out``.
        """

    def run(self, tensors: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor]) -> None:
        """Compile.

        Args:
            tensors: of the specs that were checked, on one device. Not written to.
            out: one for each output spec, of its shape and dtype, C-ordered, on the same device;
                those of `unchanged` may be missing. Overwritten.

        Raises:
            CompileError: a value cannot be represented, such as a NaN; ``out`` is undefined then.
        """


# Any: the options are those of the pass that is named.
Factory = Callable[..., CompilePass]

_BUILT_IN = {
    "hf_raw": "refit_mx.compile.hf_raw:HfRaw",
    "deep_gemm_fp8": "refit_mx.compile.deep_gemm_fp8:DeepGemmFp8",
    "cutlass_fp8": "refit_mx.compile.cutlass_fp8:CutlassFp8",
}
_registered: dict[str, Factory] = {}
_lock = threading.Lock()


def register_compile_pass(name: str, factory: Factory) -> None:
    """Make a pass known under its compile target in this process.

    A package that is installed can name an entry point of the group `ENTRY_POINT_GROUP` instead.

    Args:
        name: the compile target.
        factory: makes the pass; its keyword arguments are the options that a configuration may set.

    Raises:
        RefitConfigError: the name is empty or taken, by a built-in pass, an entry point or an
            earlier call.
    """
    with _lock:
        if not name:
            raise RefitConfigError("register_compile_pass: the name is empty")
        if name in _BUILT_IN or name in _registered or name in _entry_point_values():
            raise RefitConfigError(
                f"register_compile_pass({name!r}): there is a pass of this name; choose another"
            )
        _registered[name] = factory


def compile_pass_names() -> tuple[str, ...]:
    """The compile targets that `compile_pass` can make here, sorted.

    Raises:
        RefitConfigError: two packages claim one name.
    """
    return tuple(sorted({*_BUILT_IN, *_registered, *_entry_point_values()}))


def compile_pass(name: str, **options: Any) -> CompilePass:
    """The pass that makes a compile target.

    Args:
        name: the compile target.
        options: of this pass.

    Raises:
        RefitConfigError: no such pass, two packages claim the name, or a wrong option.
    """
    found = _entry_point_values()
    factory: Factory
    if name in _BUILT_IN:
        factory = _load(_BUILT_IN[name])
    elif name in _registered:
        factory = _registered[name]
    elif name in found:
        factory = _load(found[name])
    else:
        raise RefitConfigError(
            f"compile_pass({name!r}): expected one of {', '.join(compile_pass_names())}"
        )
    try:
        made = factory(**options)
    except TypeError as error:
        raise RefitConfigError(f"compile_pass({name!r}): {error}") from None
    if made.name != name:
        raise RefitConfigError(f"compile_pass({name!r}): its factory makes {made.name!r}")
    return made


def allocate_outputs(
    compiler: CompilePass, specs: Sequence[TensorSpec], device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Uninitialised memory for what `CompilePass.run` writes, without what stays unchanged."""
    unchanged = compiler.unchanged(specs)
    return {
        spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        for spec in compiler.output_specs(specs)
        if spec.name not in unchanged
    }


def _entry_point_values() -> dict[str, str]:
    """Compile target to ``module:attribute``, of installed packages."""
    values: dict[str, str] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        known = _BUILT_IN.get(point.name) or values.get(point.name)
        if known is not None and known != point.value:
            raise RefitConfigError(
                f"compile pass {point.name!r}: claimed by {known} and by {point.value}; "
                "uninstall one of the packages"
            )
        values[point.name] = point.value
    return values


def _load(value: str) -> Factory:
    module, _, attribute = value.partition(":")
    factory: Factory = getattr(importlib.import_module(module), attribute)
    return factory
