"""Copying of received tensors into live weights, with all checks before the first copy."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from refit_mx.errors import LayoutError
from refit_mx.layout import TensorSpec
from refit_mx.memory.cuda import synchronize


def check_install(specs: Mapping[str, TensorSpec], live: Mapping[str, torch.Tensor]) -> None:
    """Check that each received tensor has a live weight that can hold it without loss.

    Live weights that are not received stay unchanged.

    Raises:
        LayoutError: a name, a shape or a dtype does not match.
    """
    unknown = [name for name in specs if name not in live]
    if unknown:
        raise LayoutError(
            f"{len(unknown)} of {len(specs)} tensors have no live weight: {', '.join(unknown[:5])}"
        )
    for name, spec in specs.items():
        weight = live[name]
        if tuple(weight.shape) != spec.shape:
            raise LayoutError(
                f"{name}: the live weight has the shape {tuple(weight.shape)}; "
                f"the received tensor has {spec.shape}"
            )
        if not can_represent(weight.dtype, getattr(torch, spec.dtype)):
            raise LayoutError(
                f"{name}: the live weight is {str(weight.dtype).removeprefix('torch.')} and cannot "
                f"hold every {spec.dtype} value; publish another wire dtype, or use a compile pass"
            )


def can_represent(live: torch.dtype, received: torch.dtype) -> bool:
    """Return whether every value of dtype ``received`` is also a value of dtype ``live``."""
    if live == received:
        return True
    if torch.float8_e4m3fn in (live, received) or torch.float8_e5m2 in (live, received):
        # bfloat16 could hold the values, but without their scales they are not weights.
        return False
    return torch.promote_types(live, received) == live


def install_tensors(received: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into live weights, and wait for the copies. Call `check_install` before."""
    with torch.no_grad():
        for name, tensor in received.items():
            live[name].copy_(tensor, non_blocking=True)
        synchronize(
            device
            for name, tensor in received.items()
            for device in (tensor.device, live[name].device)
        )
