"""Copying received tensors into live weights, and refusing what would not fit before it starts."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from refit_mx.cuda_order import wait_for
from refit_mx.errors import LayoutError
from refit_mx.tensor_types import TensorSpec


def check_install(specs: Mapping[str, TensorSpec], live: Mapping[str, torch.Tensor]) -> None:
    """Check that every tensor that comes has a live one that can take it without loss.

    Args:
        specs: of what comes, by name.
        live: the weights that are served, by name. Those that do not come stay as they are.

    Raises:
        LayoutError: a name, a shape or a dtype does not fit.
    """
    unknown = [name for name in specs if name not in live]
    if unknown:
        raise LayoutError(
            f"{len(unknown)} of {len(specs)} tensors have no live weight to go to: "
            f"{', '.join(unknown[:5])}"
        )
    for name, spec in specs.items():
        weight = live[name]
        if tuple(weight.shape) != spec.shape:
            raise LayoutError(
                f"{name}: the live weight has the shape {tuple(weight.shape)}; "
                f"what comes has {spec.shape}"
            )
        if not holds(weight.dtype, getattr(torch, spec.dtype)):
            raise LayoutError(
                f"{name}: the live weight is {str(weight.dtype).removeprefix('torch.')} and cannot "
                f"hold every {spec.dtype}; publish another wire dtype, or use a compile pass"
            )


def holds(live: torch.dtype, comes: torch.dtype) -> bool:
    """Whether every value of dtype ``comes`` is one of dtype ``live`` too."""
    if live == comes:
        return True
    if torch.float8_e4m3fn in (live, comes) or torch.float8_e5m2 in (live, comes):
        # Not that bfloat16 could not hold them: without their scales they are not weights.
        return False
    return torch.promote_types(live, comes) == live


def install_tensors(received: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> None:
    """Copy, and wait until the copies are there. `check_install` was called before."""
    with torch.no_grad():
        for name, tensor in received.items():
            live[name].copy_(tensor, non_blocking=True)
        wait_for(
            device
            for name, tensor in received.items()
            for device in (tensor.device, live[name].device)
        )
