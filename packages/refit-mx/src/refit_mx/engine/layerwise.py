"""`LayerwiseReload`: an install by vLLM's own layerwise reload.

After loading, vLLM turns a layer's weights into the form it computes with: packed on a CPU, or
transposed, shuffled or quantized by GPU kernels. So received weights are put into a layer as a
loader would leave them; vLLM then processes the layer again and copies the result into the tensors
that captured graphs use. vLLM's backend ``sharded_rdt`` uses the same functions of
``vllm.model_executor.model_loader.reload``; `test_vllm_versions.py` checks each in every version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import vllm
from torch import nn
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _get_original_loader,
    _layerwise_process,
    _place_kernel_tensors,
    get_layerwise_info,
)
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS, materialize_layer
from vllm.model_executor.model_loader.reload.utils import get_layer_tensors
from vllm.platforms import current_platform

from refit_mx.engine.loader_trace import trace_loaders, traced_target
from refit_mx.errors import LayoutError
from refit_mx.layout import TensorSpec
from refit_mx.plan.target_tensors import TargetTensor
from refit_mx.receive.install import can_represent

try:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
except ImportError:  # before vLLM 0.28, only these two attention layers are processed last

    def is_deferred_attention_layer(layer: nn.Module) -> bool:
        from vllm.model_executor.layers.attention import Attention, MLAAttention

        return isinstance(layer, Attention | MLAAttention)


_MAX_NAMED = 5
_NEVER_LOADED = SKIP_TENSORS - {"bias"}
REPEATABLE: frozenset[str] = frozenset(
    {
        "UnquantizedLinearMethod",
        "UnquantizedEmbeddingMethod",
        "Fp8LinearMethod",
        "Fp8MoEMethod",
        "UnquantizedFusedMoEMethod",
    }
)
"""Methods whose ``process_weights_after_loading`` gives the same result for the same weights."""
REPEATABLE_ON_CPU: frozenset[str] = frozenset(
    {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
)
"""Repeatable methods on a CPU, where even vLLM's ``reload_weights`` loads experts wrongly."""


class LayerwiseReload:
    """Installer of a model's weights, which it gets in the form that the model's loaders expect."""

    # Any: vLLM's objects.
    def __init__(self, model: Any, model_config: Any) -> None:
        self._model = model
        self._model_config = model_config
        self._eager = bool(model_config.enforce_eager)

    def trace(self, published: Sequence[TensorSpec]) -> tuple[TargetTensor, ...]:
        """Return a target for each parameter that published tensors fill, under its name.

        The model's weights stay unchanged.

        Raises:
            LayoutError: a loader fails, or does more than copy.
        """
        specs = {spec.name: spec for spec in published}
        with self._load_form() as parameters:
            traced = trace_loaders(self._model.load_weights, parameters, published)
            return tuple(
                traced_target(name, entry, parameters[name], specs)
                for name, entry in traced.items()
                if entry.copies or entry.obstacle
            )

    def check(self, outputs: Mapping[str, TensorSpec]) -> None:
        """Check that tensors, by parameter name, can be installed, before anything is changed.

        Raises:
            LayoutError: the model or a layer cannot be processed again, a tensor has no parameter,
                a parameter gets no tensor, or a tensor's shape or dtype does not fit its parameter.
        """
        with self._load_form() as parameters:
            sources = self._sources(outputs)
            unknown = sorted(set(outputs) - set(sources.values()))
            missing: list[str] = []
            self._check_model()
            for prefix, layer in self._model.named_modules():
                names = [_join(prefix, leaf) for leaf in get_layer_tensors(layer)]
                _check_processing(prefix, layer, loaded=any(name in sources for name in names))
                for name in names:
                    if name in sources:
                        _check_fits(name, layer, outputs[sources[name]], parameters[name])
                if not is_deferred_attention_layer(layer):  # its scales are optional
                    missing += [
                        name
                        for leaf in layer._parameters
                        if leaf not in _NEVER_LOADED
                        and (name := _join(prefix, leaf)) in parameters
                        and name not in sources
                    ]
        if unknown:
            raise LayoutError(
                f"{len(unknown)} of {len(outputs)} tensors have no parameter: "
                f"{', '.join(unknown[:_MAX_NAMED])}"
            )
        if missing:
            raise LayoutError(
                f"{len(missing)} of {len(missing) + len(sources)} parameters get no tensor: "
                f"{', '.join(missing[:_MAX_NAMED])}"
            )

    def install(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Install weights layer by layer, after `check` with their specs.

        If this raises, the live weights are a mixture. It may then be called again.
        """
        self._restore()
        with torch.no_grad():
            initialize_layerwise_reload(self._model)
            sources = self._sources(tensors)
            for prefix, layer in self._model.named_modules():
                own = {
                    leaf: tensors[sources[name]]
                    for leaf in get_layer_tensors(layer)
                    if (name := _join(prefix, leaf)) in sources
                }
                if own:
                    _install_layer(layer, own)
            finalize_layerwise_reload(self._model, self._model_config)

    def _sources(self, outputs: Mapping[str, object]) -> dict[str, str]:
        """Return the name of the tensor for each parameter.

        Tied layers share a tensor in service, and only one of them is loaded. The other is
        processed too, since a CPU packs the weights of each layer.
        """
        shared: dict[int, str] = {}
        live: dict[str, int] = {}
        for prefix, layer in self._model.named_modules():
            kernel = get_layerwise_info(layer).kernel_tensors
            for leaf, tensor in ({**kernel[0], **kernel[1]} if kernel is not None else {}).items():
                name = _join(prefix, leaf)
                live[name] = id(tensor)
                if name in outputs:
                    shared[id(tensor)] = name
        loadable = {
            _join(prefix, leaf)
            for prefix, layer in self._model.named_modules()
            for leaf in get_layer_tensors(layer)
        }
        return {name: name for name in outputs if name in loadable} | {
            name: shared[tensor]
            for name, tensor in live.items()
            if name in loadable and name not in outputs and tensor in shared
        }

    def _check_model(self) -> None:
        name = type(self._model).__name__
        if callable(getattr(self._model, "process_weights_after_loading", None)):
            raise LayoutError(
                f"{name} processes the weights of the complete model after loading, which vLLM's "
                "layerwise reload does not do; expected only layers to process weights"
            )
        if vllm.__version__.startswith("0.25.") and not self._eager:
            for prefix, layer in self._model.named_modules():
                if type(layer).__name__ == "MLAAttention":
                    raise LayoutError(
                        f"{prefix}: MLAAttention of vLLM {vllm.__version__} creates new tensors, "
                        "while captured graphs use the old ones; expected vLLM 0.26 or "
                        "later, or enforce_eager"
                    )

    @contextmanager
    def _load_form(self) -> Iterator[dict[str, torch.Tensor]]:
        """Temporarily give layers the tensors that loaders expect, without memory."""
        self._restore()
        try:
            initialize_layerwise_reload(self._model)
            parameters: dict[str, torch.Tensor] = {}
            for prefix, layer in self._model.named_modules():
                for leaf, tensor in get_layer_tensors(layer).items():
                    # vLLM's wrapper would process the layer once all its tensors are loaded.
                    tensor.weight_loader = _get_original_loader(tensor)
                    parameters[_join(prefix, leaf)] = tensor
            yield parameters
        finally:
            self._restore()

    def _restore(self) -> None:
        """Restore the served tensors in layers that wait for weights."""
        for layer in self._model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    _place_kernel_tensors(layer, info)
                info.reset()
        if hasattr(self._model, "_original_do_torchao_reload"):
            self._model._do_torchao_reload = self._model._original_do_torchao_reload


def _install_layer(layer: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    info = get_layerwise_info(layer)
    materialize_layer(layer, info)
    live = info.kernel_tensors
    for leaf, parameter in get_layer_tensors(layer).items():
        tensor = tensors.get(leaf)
        if tensor is not None:
            # Copied, although vLLM copies again: a bias is used directly, and a kernel may keep the
            # processed tensor, while the next fetch overwrites scratch memory.
            if tensor.shape != parameter.shape:
                parameter.data.zero_()  # padding rows of a vocabulary
            part = tuple(slice(0, size) for size in tensor.shape)
            parameter.data[part].copy_(tensor)
        elif live is not None and leaf in live[1] and live[1][leaf].shape == parameter.shape:
            parameter.data.copy_(live[1][leaf])  # a buffer that no checkpoint has
        if live is not None and getattr(layer, "_cpu_skip_gemm_dispatch", False):
            # On a CPU with AMX, latent attention packed this weight at launch and freed it. It does
            # so again once its layers are processed. Until then vLLM needs a tensor to copy into.
            freed = live[0].get(leaf)
            if freed is not None and freed.numel() == 0:
                live[0][leaf] = nn.Parameter(torch.empty_like(parameter), requires_grad=False)
    _layerwise_process(layer, info)


def _check_processing(prefix: str, layer: nn.Module, *, loaded: bool) -> None:
    """Check that vLLM can process a layer again as it did at launch."""
    if is_deferred_attention_layer(layer):
        if loaded:
            raise LayoutError(
                f"{prefix}: {type(layer).__name__} has its own weights in the checkpoint, such as "
                "scales; reloading them is not supported"
            )
        return
    method = getattr(layer, "quant_method", None)
    if method is not None and loaded:
        processor = type(method).__name__
    elif callable(getattr(layer, "process_weights_after_loading", None)):
        processor = type(layer).__name__
    else:
        return
    on_cpu = current_platform.is_cpu()
    known = REPEATABLE_ON_CPU if on_cpu else REPEATABLE
    if processor not in known:
        raise LayoutError(
            f"{prefix}: {processor} may process weights differently than at launch"
            f"{' on a CPU' if on_cpu else ''}; expected one of {', '.join(sorted(known))}"
        )


def _check_fits(name: str, layer: nn.Module, spec: TensorSpec, parameter: torch.Tensor) -> None:
    shape, expected = spec.shape, tuple(parameter.shape)
    # Only a vocabulary is padded; a scale with fewer rows belongs to another kind of layer.
    pads = any(base.__name__ == "VocabParallelEmbedding" for base in type(layer).__mro__)
    padded = pads and len(shape) == len(expected) and shape[0] < expected[0]
    if shape != expected and not (padded and shape[1:] == expected[1:]):
        raise LayoutError(f"{name}: the received tensor has shape {shape}; expected {expected}")
    if not can_represent(parameter.dtype, getattr(torch, spec.dtype)):
        raise LayoutError(
            f"{name}: the model loads {str(parameter.dtype).removeprefix('torch.')}, which "
            f"cannot hold every {spec.dtype} value; publish another wire dtype, or use a compile "
            "pass"
        )


def _join(prefix: str, leaf: str) -> str:
    return f"{prefix}.{leaf}" if prefix else leaf
