"""Raw tensors as in a Hugging Face checkpoint, cast if the receiver requests it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from refit_mx.errors import CompileError, CompileTargetError, RefitConfigError
from refit_mx.layout import ITEM_SIZES, TensorSpec
from refit_mx.manifest.format import Scalar

_FLOATS = frozenset(dtype for dtype in ITEM_SIZES if "float" in dtype)


class HfRaw:
    """Compile target ``hf_raw``.

    Args:
        dtype: dtype to which floating-point tensors are cast, rounding to nearest; None keeps
            their dtypes. Tensors of integers and bools are never cast. A finite value out of range
            is refused.

    Raises:
        RefitConfigError: the dtype is not a floating-point dtype that can be published.
    """

    name = "hf_raw"
    accepts = frozenset({"hf_raw"})

    def __init__(self, *, dtype: str | None = None) -> None:
        if dtype is not None and dtype not in _FLOATS:
            raise RefitConfigError(
                f"{self.name}: dtype {dtype!r}; "
                f"expected one of {', '.join(sorted(_FLOATS))} or None"
            )
        self._dtype = dtype

    @property
    def metadata(self) -> Mapping[str, Scalar]:
        """See `CompilePass.metadata`: the dtype, if all tensors are cast to one."""
        return {} if self._dtype is None else {"dtype": self._dtype}

    def check(self, specs: Sequence[TensorSpec]) -> None:
        """See `CompilePass.check`.

        Raises:
            CompileTargetError: a cast from float8, whose values need their scales.
        """
        for spec in specs:
            if self._changes(spec.dtype) and spec.dtype.startswith("float8"):
                raise CompileTargetError(
                    f"{self.name}: {spec.name} is {spec.dtype}, to be cast to {self._dtype}; its "
                    "values need scales, which a cast ignores"
                )

    def output_specs(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(spec.name, self._dtype, spec.shape)
            if self._dtype is not None and self._changes(spec.dtype)
            else spec
            for spec in specs
        )

    def unchanged(self, specs: Sequence[TensorSpec]) -> frozenset[str]:
        return frozenset(spec.name for spec in specs if not self._changes(spec.dtype))

    def run(self, tensors: Mapping[str, torch.Tensor], out: Mapping[str, torch.Tensor]) -> None:
        """See `CompilePass.run`. NaN and infinite values are preserved.

        Raises:
            CompileError: a finite value is out of range for the dtype of the cast.
        """
        with torch.no_grad():
            for name, output in out.items():
                tensor = tensors[name]
                output.copy_(tensor)
                if tensor.dtype != output.dtype and _overflowed(tensor, output):
                    raise CompileError(
                        f"{name}: has values that are finite as {tensor.dtype} and not as "
                        f"{output.dtype}; the old weights stay"
                    )

    def _changes(self, dtype: str) -> bool:
        return self._dtype is not None and dtype in _FLOATS and dtype != self._dtype


def _overflowed(tensor: torch.Tensor, cast: torch.Tensor) -> bool:
    before = torch.finfo(tensor.dtype)
    after = torch.finfo(cast.dtype)
    if before.max <= after.max or not tensor.numel():
        return False
    finite = torch.isfinite(tensor)
    if cast.dtype.itemsize == 1:
        # Here some builds of torch saturate and others give NaN, so test the input.
        lost = finite & (tensor.abs() > after.max)
    else:
        lost = finite & ~torch.isfinite(cast)
    return bool(lost.any())
