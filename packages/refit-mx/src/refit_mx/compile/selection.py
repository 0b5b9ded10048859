"""Selection of tensors to quantize: the weights of linear layers, by name and shape."""

from __future__ import annotations

import re
from collections.abc import Callable

from refit_mx.layout import TensorSpec

Selection = Callable[[TensorSpec], bool]
"""Function that returns whether to quantize a tensor."""

RAW_DTYPES = frozenset({"float32", "bfloat16", "float16"})
"""Input dtypes of a quantizing pass."""

# Tensors that published fp8 checkpoints leave unquantized: embeddings, small tensors with a large
# effect (norms, routers), and the last layer.
_NOT_QUANTIZED = re.compile(
    r"(^|\.)("
    r"\w*embed\w*|wte|wpe|\w*norm\w*|ln_\w+|lm_head|output_layer|router|shared_expert_gate"
    r")(\.|$)|\.(mlp|block_sparse_moe)\.gate\.weight$"
)
# Stacked experts have the projection in the last part of the name: `experts.w13_weight`.
_STACKED = re.compile(r"(^|\.)experts\.(\w+\.)*(\w+_)?weight$")


def linear_weights(spec: TensorSpec) -> bool:
    """Select matrices with a name ending in ``weight``, and experts stacked on a first axis.

    Embeddings, norms, routers, ``lm_head`` and biases are not selected. Dtypes are not considered:
    a pass refuses a selected tensor with a dtype outside `RAW_DTYPES`.
    """
    if _NOT_QUANTIZED.search(spec.name):
        return False
    if len(spec.shape) == 3:
        return _STACKED.search(spec.name) is not None
    if len(spec.shape) != 2:
        return False
    return spec.name.endswith(".weight") or _STACKED.search(spec.name) is not None
