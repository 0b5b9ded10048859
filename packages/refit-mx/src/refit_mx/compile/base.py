"""`CompilePass`: converts published tensors to those that a kernel needs, at the receiver.

Trainers need no kernels: they publish raw tensors. Each receiver compiles its own part, from
scratch memory to scratch memory, before any live weight changes. A pass is created by name, so that
a configuration or another package can choose it.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Protocol

import torch

from refit_mx.errors import RefitConfigError
from refit_mx.layout import TensorSpec
from refit_mx.manifest.format import Scalar

ENTRY_POINT_GROUP = "refit_mx.compile_passes"
"""Group of entry points for passes: the name is the compile target, the value is the factory."""


class CompilePass(Protocol):
    """Compiler of one compile target. It has no state, so several threads may use it.

    It gets specs and tensors of a receiver's slices, not of the complete model: a scale belongs to
    a slice.
    """

    @property
    def name(self) -> str:
        """Compile target of the output, such as ``deep_gemm_fp8``."""

    @property
    def accepts(self) -> frozenset[str]:
        """Compile targets that it accepts as input, usually only ``hf_raw``."""

    @property
    def metadata(self) -> Mapping[str, Scalar]:
        """Properties of its output; a publisher of such bytes declares them in its manifest."""

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """Check that it can compile tensors with these specs.

        Raises:
            CompileTargetError: it cannot; the message names the tensor and the reason.
        """

    def output_specs(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Return the specs of the outputs, in order, as C-ordered tensors."""

    def unchanged(self, specs: Sequence[TensorSpec]) -> frozenset[str]:
        """Return the names of outputs that equal the input of the same name, byte for byte.

        A caller that uses these inputs directly omits the names from ``out``.
        """

    def run(self, tensors: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor]) -> None:
        """Compile tensors.

        Args:
            tensors: inputs with the checked specs: 0 to 4 axes, possibly empty or strided, on one
                device. Not written to.
            out: outputs to overwrite, one per output spec, with its shape and dtype, C-ordered, on
                the same device. Those of `unchanged` may be missing.

        Raises:
            CompileError: a value cannot be represented, such as a NaN; ``out`` is then undefined.
        """


# Any: each pass has its own options.
Factory = Callable[..., CompilePass]

_BUILT_IN = {
    "hf_raw": "refit_mx.compile.hf_raw:HfRaw",
    "deep_gemm_fp8": "refit_mx.compile.deep_gemm_fp8:DeepGemmFp8",
    "cutlass_fp8": "refit_mx.compile.cutlass_fp8:CutlassFp8",
}
_registered: dict[str, Factory] = {}
_lock = threading.Lock()


def register_compile_pass(name: str, factory: Factory) -> None:
    """Register a pass under its compile target in this process.

    An installed package can instead have an entry point of the group `ENTRY_POINT_GROUP`. The
    keyword arguments of the factory are the options of a configuration.

    Raises:
        RefitConfigError: the name is empty or used by a built-in pass, an entry point or an earlier
            call.
    """
    with _lock:
        if not name:
            raise RefitConfigError("register_compile_pass: the name is empty")
        if name in _BUILT_IN or name in _registered or name in _entry_point_values():
            raise RefitConfigError(
                f"register_compile_pass({name!r}): this name is taken; choose another"
            )
        _registered[name] = factory


def compile_pass(name: str, **options: Any) -> CompilePass:
    """Create the pass for a compile target, with the options of that pass.

    Raises:
        RefitConfigError: there is no such pass, two packages use the name, or an option is wrong.
    """
    from_packages = _entry_point_values()
    factory: Factory
    if name in _BUILT_IN:
        factory = _load(_BUILT_IN[name])
    elif name in _registered:
        factory = _registered[name]
    elif name in from_packages:
        factory = _load(from_packages[name])
    else:
        known = sorted({*_BUILT_IN, *_registered, *from_packages})
        raise RefitConfigError(f"compile_pass({name!r}): expected one of {', '.join(known)}")
    try:
        compiler = factory(**options)
    except TypeError as error:
        raise RefitConfigError(f"compile_pass({name!r}): {error}") from None
    if compiler.name != name:
        raise RefitConfigError(
            f"compile_pass({name!r}): its factory created {compiler.name!r}; expected {name!r}"
        )
    return compiler


def allocate_outputs(
    compiler: CompilePass, specs: Sequence[TensorSpec], device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """Allocate uninitialized memory for the outputs of `CompilePass.run` that change."""
    unchanged = compiler.unchanged(specs)
    return {
        spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
        for spec in compiler.output_specs(specs)
        if spec.name not in unchanged
    }


def run_pass(
    compiler: CompilePass,
    specs: Sequence[TensorSpec],
    tensors: Mapping[str, torch.Tensor],
    out: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Run a pass into ``out``, from `allocate_outputs`; return all outputs, in their order."""
    if out:
        compiler.run(tensors, out)
    return {
        spec.name: out[spec.name] if spec.name in out else tensors[spec.name]
        for spec in compiler.output_specs(specs)
    }


def _entry_point_values() -> dict[str, str]:
    """Return ``module:attribute`` by compile target, from installed packages."""
    values: dict[str, str] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        known = _BUILT_IN.get(point.name) or values.get(point.name)
        if known is not None and known != point.value:
            raise RefitConfigError(
                f"compile pass {point.name!r}: used by {known} and by {point.value}; "
                "uninstall one of the packages"
            )
        values[point.name] = point.value
    return values


def _load(value: str) -> Factory:
    module, _, attribute = value.partition(":")
    factory: Factory = getattr(importlib.import_module(module), attribute)
    return factory
