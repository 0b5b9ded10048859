"""Publish the weights of a model folder, like the ranks of a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from refit_mx import (
    Box,
    ControlClient,
    EmbeddedControlServer,
    LocalShard,
    MxV2TrainingPublisher,
)

PROMPTS = [[(7 * place + 3) % 250 for place in range(length)] for length in (4, 9, 130, 600)]
MAX_TOKENS = 32


class Trainer(ExitStack):
    """A control plane and publishers; they hold uneven parts of the rows of every tensor.

    Args:
        model: name of the model in the control plane.
        slots: number of publishers.
        transports: transports of the publishers; None for the default.
        device: device of the publishers' arenas.
    """

    def __init__(
        self,
        model: str,
        *,
        slots: int = 1,
        transports: Sequence[str] | None = None,
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self._model = model
        self.server = self.enter_context(EmbeddedControlServer())
        self.control = self.enter_context(ControlClient(self.server.address))
        options: dict[str, Any] = {} if transports is None else {"transports": list(transports)}
        self.publishers = [
            self.enter_context(
                MxV2TrainingPublisher(
                    model, f"fsdp-{slot}", control=self.control, device=device, **options
                )
            )
            for slot in range(slots)
        ]

    def publish(self, version_id: str, tensors: dict[str, torch.Tensor]) -> None:
        """Publish tensors, divided unevenly along the first axis."""
        slots = [f"fsdp-{slot}" for slot in range(len(self.publishers))]
        self.control.create_version(
            self._model, slots, idempotency_key=version_id, version_id=version_id
        )
        for slot, publisher in enumerate(self.publishers):
            publisher.publish(version_id, shards_of(tensors, slot, len(slots)))

    def init_info(self, **changes: Any) -> dict[str, Any]:
        """Return the fields of an `MxInitInfo` for this control plane."""
        return {"control_address": self.server.address, "model_name": self._model, **changes}


def checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of a model folder by name."""
    return load_file(folder / "model.safetensors")


def shards_of(tensors: Mapping[str, torch.Tensor], slot: int, slots: int) -> dict[str, LocalShard]:
    """Return one publisher's rows of every tensor."""
    shards = {}
    for name, tensor in tensors.items():
        start, stop = (_cut(tensor.shape[0], part, slots) for part in (slot, slot + 1))
        if start < stop:
            shape = tuple(tensor.shape)
            box = Box((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))
            shards[name] = LocalShard(name, shape, box, tensor[start:stop])
    return shards


def _cut(rows: int, part: int, parts: int) -> int:
    """Return the first row of a part: parts grow with their number (sizes 1:2:3:...)."""
    return rows * part * (part + 1) // (parts * (parts + 1))
