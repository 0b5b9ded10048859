"""Multi-head latent attention: the weights that vLLM derives from others after loading."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from refit_mx.errors import LayoutError


class _Absorbed(NamedTuple):
    """What one layer has derived.

    Attributes:
        weight: (heads * (width_k + width_v), rank), of the ``kv_b_proj`` that it is derived of.
        up_k: ``W_UK_T``, (heads, width_k, rank); None if the layer has none.
        up_v: ``W_UV``, (heads, rank, width_v); None if the layer has none.
        heads: that this rank has.
        width_k: of one head's part of the projection that makes keys.
    """

    weight: torch.Tensor
    up_k: torch.Tensor | None
    up_v: torch.Tensor | None
    heads: int
    width_k: int


def check_mla_weights(model: nn.Module) -> None:
    """Refuse a model whose absorbed weights `refresh_mla_weights` could not make.

    Raises:
        LayoutError: a ``kv_b_proj`` is quantised, or its shape does not fit.
    """
    for _ in _absorbed(model):
        pass


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
        LayoutError: as `check_mla_weights`.
    """
    layers = list(_absorbed(model))
    for layer in layers:
        both = layer.weight.view(layer.heads, -1, layer.weight.shape[1])
        if layer.up_k is not None:
            layer.up_k.copy_(both[:, : layer.width_k])
        if layer.up_v is not None:
            layer.up_v.copy_(both[:, layer.width_k :].transpose(1, 2))
    return len(layers)


def _absorbed(model: nn.Module) -> Iterator[_Absorbed]:
    for name, module in model.named_modules():
        up_v, up_k = (_tensor(module, attribute) for attribute in ("W_UV", "W_UK_T"))
        derived = up_k if up_k is not None else up_v
        # Any: the layer is vLLM's.
        projection: Any = getattr(module, "kv_b_proj", None)
        if derived is None or projection is None:
            continue
        weight: torch.Tensor = projection.weight
        heads = derived.shape[0]
        rank = up_k.shape[2] if up_k is not None else derived.shape[1]
        width_v = up_v.shape[2] if up_v is not None else weight.shape[0] // heads - derived.shape[1]
        width_k = up_k.shape[1] if up_k is not None else weight.shape[0] // heads - width_v
        expected = (heads * (width_k + width_v), rank)
        wanted = {each.dtype for each in (up_k, up_v) if each is not None}
        if wanted != {weight.dtype} or tuple(weight.shape) != expected:
            raise LayoutError(
                f"{name}: kv_b_proj.weight is {weight.dtype} of shape {tuple(weight.shape)}; its "
                f"absorbed weights are made of {' and '.join(sorted(map(str, wanted)))} of shape "
                f"{expected}"
            )
        yield _Absorbed(weight, up_k, up_v, heads, width_k)


def _tensor(module: nn.Module, attribute: str) -> torch.Tensor | None:
    found = getattr(module, attribute, None)
    return found if isinstance(found, torch.Tensor) else None
