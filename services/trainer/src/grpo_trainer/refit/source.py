"""Policy worker's side of a refit: publish its part of the policy's weights.

All workers hold the same weights. Each publishes the part assigned to it along the first
axis, as FSDP shards a parameter. So exactly one process sends each byte, and the load is equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch

from grpo_trainer.actors.address import resolve_hosts
from grpo_trainer.refit.settings import RefitSettings
from refit_mx import (
    Box,
    LocalShard,
    MxV2TrainingPublisher,
    PublisherSettings,
    TargetTPLayout,
)


def slot(rank: int) -> str:
    """Return the source slot of a rank."""
    return f"policy-{rank}"


class RefitSource:
    """Publisher of ``rank`` among ``world`` policy workers."""

    def __init__(self, settings: RefitSettings, *, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        host, advertised = resolve_hosts(settings.host, settings.advertised_host)
        with ExitStack() as stack:
            control = stack.enter_context(settings.connect())
            self._publisher = stack.enter_context(
                MxV2TrainingPublisher(
                    settings.model_name,
                    slot(rank),
                    control=control,
                    transports=settings.transports,
                    host=host,
                    advertised_host=advertised,
                    timeout_s=settings.timeout_s,
                    settings=PublisherSettings(control_retry_s=settings.timeout_s),
                )
            )
            self._open = stack.pop_all()

    def publish(self, version_id: str, weights: Mapping[str, torch.Tensor]) -> None:
        """Publish this rank's part of ``weights``, the complete state dict, which all ranks hold.

        The driver must have created the version in the control plane.

        Raises:
            RefitError: the part cannot be published in time.
        """
        self._publisher.publish(version_id, self.shards(weights))

    def shards(self, weights: Mapping[str, torch.Tensor]) -> list[LocalShard]:
        """Return this rank's rows of each tensor; rank 0 has all 0-d tensors."""
        shards = []
        for name, tensor in weights.items():
            shape = tuple(tensor.shape)
            if not shape:
                if self._rank == 0:
                    shards.append(LocalShard(name, shape, Box.full(shape), tensor))
                continue
            slices = TargetTPLayout(self._world, self._rank).slices(shape)
            part = tensor[slices]
            if part.numel():
                shards.append(LocalShard(name, shape, Box.of_slices(slices, shape), part))
        return shards

    def close(self) -> None:
        """Stop publishing weights."""
        self._open.close()
