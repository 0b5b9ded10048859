"""Generation worker's side of a refit: receive a version and install all of it or nothing.

The worker receives each matrix as the shards of a tensor-parallel engine, one target per rank, and
assembles them. The layout differs from that of the sources, as in a large run.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch

from grpo_trainer.refit.settings import RefitSettings
from refit_mx import (
    MxV2RefitReceiver,
    ReceiverSettings,
    RefitStats,
    TargetTensor,
    TargetTPLayout,
    TensorSpec,
    compile_pass,
    replicated_target,
    tp_target,
)


class RefitTarget:
    """Receiver of a generation worker; versions go into ``weights``, its model's state dict."""

    def __init__(self, settings: RefitSettings, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self._timeout_s = settings.timeout_s
        # The model has plain tensors, so only those are accepted.
        self._compile = compile_pass("hf_raw")
        # Target name to the part of the model that it fills.
        self._parts: dict[str, torch.Tensor] = {}
        with ExitStack() as stack:
            control = stack.enter_context(settings.connect())
            self._receiver = stack.enter_context(
                MxV2RefitReceiver(
                    settings.model_name,
                    control=control,
                    targets=self._targets(settings.generation_tensor_parallel),
                    transport=settings.transport,
                    settings=ReceiverSettings(control_retry_s=settings.timeout_s),
                )
            )
            self._open = stack.pop_all()

    def _targets(self, ranks: int) -> list[TargetTensor]:
        targets = []
        for name, tensor in self._weights.items():
            spec = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            if tensor.dim() < 2:
                targets.append(replicated_target(spec))
                self._parts[targets[-1].name] = tensor
                continue
            for rank in range(ranks):
                layout = TargetTPLayout(ranks, rank)
                part = tensor[layout.slices(spec.shape)]
                if part.numel():
                    targets.append(tp_target(spec, layout, name=f"{name}#{rank}"))
                    self._parts[targets[-1].name] = part
        return targets

    def refit(self, version_id: str) -> RefitStats:
        """Receive and install a version.

        Raises:
            RefitError: the version is not available in time, does not fit, or is corrupt; the
                model is unchanged.
        """
        return self._receiver.refit(
            version_id, self._parts, self._compile, timeout_s=self._timeout_s
        )

    def close(self) -> None:
        """Stop receiving."""
        self._open.close()
