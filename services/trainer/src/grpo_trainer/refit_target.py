"""What a generation worker does in a refit: it receives a version and installs it, all or none.

The worker takes each matrix as the shards of a tensor-parallel engine, one target a rank, and
assembles them: the layout differs from that of the sources, as it does in a large run.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any  # Any: settings before they are checked

import torch

from grpo_trainer.refit_settings import RefitSettings
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
    """The receiver of one generation worker.

    Args:
        settings: of the run.
        weights: the model's own state dict, into which versions are installed.
    """

    def __init__(self, settings: RefitSettings, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self._timeout_s = settings.timeout_s
        # What the model takes are plain tensors, so nothing else than these is accepted.
        self._compile = compile_pass("hf_raw")
        # Target name to the part of the model that it fills.
        self._parts: dict[str, torch.Tensor] = {}
        with ExitStack() as stack:
            control = stack.enter_context(settings.connect())
            self._receiver = stack.enter_context(
                MxV2RefitReceiver(
                    settings.model_name,
                    control=control,
                    targets=self._targets(settings.tensor_parallel),
                    transport=settings.transport,
                    settings=ReceiverSettings(control_patience_s=settings.timeout_s),
                )
            )
            self._open = stack.pop_all()

    def _targets(self, ranks: int) -> list[TargetTensor]:
        found = []
        for name, tensor in self._weights.items():
            spec = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            if tensor.dim() < 2:
                found.append(replicated_target(spec))
                self._parts[found[-1].name] = tensor
                continue
            for rank in range(ranks):
                layout = TargetTPLayout(ranks, rank)
                part = tensor[layout.slices(spec.shape)]
                if part.numel():
                    found.append(tp_target(spec, layout, name=f"{name}#{rank}"))
                    self._parts[found[-1].name] = part
        return found

    def refit(self, version_id: str) -> RefitStats:
        """Receive and install a version.

        Raises:
            RefitError: the version cannot be had in time, does not fit, or its bytes are wrong; the
                model is as it was.
        """
        return self._receiver.refit(
            version_id, self._parts, self._compile, timeout_s=self._timeout_s
        )

    def close(self) -> None:
        """Stop receiving."""
        self._open.close()


def start_target(settings: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> RefitTarget:
    """The receiver of a worker, from `RefitSettings` as they travel to an actor."""
    return RefitTarget(RefitSettings.model_validate(settings), weights)
