"""Multi-head latent attention: the weights that vLLM derives from others after loading."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from refit_mx.errors import LayoutError


@torch.no_grad()
def refresh_mla_weights(model: nn.Module) -> int:
    """Make the absorbed weights of multi-head latent attention of the ``kv_b_proj`` beside them.

    vLLM makes them once after loading, so an install has to make them anew. In place: graphs that
    were captured hold their addresses.

    Args:
        model: one rank's; one without such attention is left alone.

    Returns:
        The number of layers.

    Raises:
        LayoutError: a ``kv_b_proj`` is quantised, or its shape does not fit.
    """
    count = 0
    for name, module in model.named_modules():
        up_v, up_k = getattr(module, "W_UV", None), getattr(module, "W_UK_T", None)
        if not isinstance(up_v, torch.Tensor) or not isinstance(up_k, torch.Tensor):
            continue
        # Any: the layer is vLLM's.
        layer: Any = module
        weight = layer.kv_b_proj.weight
        heads, width_k, rank = up_k.shape
        width_v = up_v.shape[2]
        if weight.dtype != up_v.dtype or tuple(weight.shape) != (heads * (width_k + width_v), rank):
            raise LayoutError(
                f"{name}: kv_b_proj.weight is {weight.dtype} of shape {tuple(weight.shape)}; "
                f"expected {up_v.dtype} of shape {(heads * (width_k + width_v), rank)}"
            )
        both = weight.view(heads, width_k + width_v, rank)
        up_k.copy_(both[:, :width_k])
        up_v.copy_(both[:, width_k:].transpose(1, 2))
        count += 1
    return count
