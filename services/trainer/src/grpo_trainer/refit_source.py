"""What a policy worker does in a refit: it publishes its part of the policy's weights.

The workers hold the same weights. Each publishes its share along the first axis, as FSDP divides a
parameter, so that every byte leaves one process and all of them carry the same load.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any  # Any: settings before they are checked

import torch

from grpo_trainer.node_address import own_hosts
from grpo_trainer.refit_settings import RefitSettings
from refit_mx import (
    Box,
    LocalShard,
    MxV2TrainingPublisher,
    PublisherSettings,
    TargetTPLayout,
)


def slot(rank: int) -> str:
    """The source slot that a rank fills."""
    return f"policy-{rank}"


class RefitSource:
    """One rank's publisher.

    Args:
        settings: of the run.
        rank: of this worker among ``world``.
        world: number of workers.
    """

    def __init__(self, settings: RefitSettings, *, rank: int, world: int) -> None:
        self._rank, self._world = rank, world
        host, told = own_hosts(settings.host, settings.advertised_host)
        with ExitStack() as stack:
            control = stack.enter_context(settings.connect())
            self._publisher = stack.enter_context(
                MxV2TrainingPublisher(
                    settings.model_name,
                    slot(rank),
                    control=control,
                    transports=settings.transports,
                    host=host,
                    advertised_host=told,
                    timeout_s=settings.timeout_s,
                    settings=PublisherSettings(control_patience_s=settings.timeout_s),
                )
            )
            self._open = stack.pop_all()

    def publish(self, version_id: str, weights: Mapping[str, torch.Tensor]) -> int:
        """Publish this rank's share of ``weights``; returns its bytes.

        Args:
            version_id: made in the control plane before.
            weights: the whole state dict, the same on every rank.

        Raises:
            RefitError: it cannot be published in time.
        """
        shards = self.shards(weights)
        self._publisher.publish(version_id, shards)
        return sum(shard.tensor.nbytes for shard in shards)

    def shards(self, weights: Mapping[str, torch.Tensor]) -> list[LocalShard]:
        """This rank's share: of each tensor its rows; of one without axes, all of it at rank 0."""
        found = []
        for name, tensor in weights.items():
            shape = tuple(tensor.shape)
            if not shape:
                if self._rank == 0:
                    found.append(LocalShard(name, shape, Box.whole(shape), tensor))
                continue
            slices = TargetTPLayout(self._world, self._rank).slices(shape)
            part = tensor[slices]
            if part.numel():
                found.append(LocalShard(name, shape, Box.of_slices(slices, shape), part))
        return found

    def close(self) -> None:
        """Stop offering weights."""
        self._open.close()


def start_source(settings: Mapping[str, Any], *, rank: int, world: int) -> RefitSource:
    """The publisher of a rank, from `RefitSettings` as they travel to an actor."""
    return RefitSource(RefitSettings.model_validate(settings), rank=rank, world=world)
