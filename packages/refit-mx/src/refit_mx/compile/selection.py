"""Which tensors a quantising pass takes: the weights of linear layers, by name and shape."""

from __future__ import annotations

import re
from collections.abc import Callable

from refit_mx.tensor_types import TensorSpec

Selection = Callable[[TensorSpec], bool]
"""Whether a pass quantises a tensor."""

RAW_DTYPES = frozenset({"float32", "bfloat16", "float16"})
"""What a quantising pass can start from."""

# Kept as they are by the fp8 checkpoints that are published for these models: what is looked up and
# not multiplied, what is small and decides much (norms, routers), and the last layer.
_KEPT = re.compile(
    r"(^|\.)("
    r"\w*embed\w*|wte|wpe|\w*norm\w*|ln_\w+|lm_head|output_layer|router|shared_expert_gate"
    r")(\.|$)|\.(mlp|block_sparse_moe)\.gate\.weight$"
)
# Stacked experts carry the projection in the last part of the name: `experts.w13_weight`.
_STACKED = re.compile(r"(^|\.)experts\.(\w+\.)*(\w+_)?weight$")


def linear_weights(spec: TensorSpec) -> bool:
    """The default: two axes and a name that ends in ``weight``, or experts stacked on a first axis.

    Embeddings, norms, routers, ``lm_head`` and biases are not taken, nor is what is not of one of
    `RAW_DTYPES` as the name alone would take it: that one a pass refuses.
    """
    if _KEPT.search(spec.name):
        return False
    if len(spec.shape) == 3:
        return _STACKED.search(spec.name) is not None
    if len(spec.shape) != 2:
        return False
    return spec.name.endswith(".weight") or _STACKED.search(spec.name) is not None


def names_matching(pattern: str) -> Selection:
    """The tensors of two or three axes whose whole name matches a regular expression."""
    compiled = re.compile(pattern)
    return lambda spec: len(spec.shape) in (2, 3) and compiled.fullmatch(spec.name) is not None
