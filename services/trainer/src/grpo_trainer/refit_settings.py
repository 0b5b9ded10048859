"""What every process of a refit is told: where the control plane is, and how weights travel."""

from __future__ import annotations

from typing import Literal

from grpo_trainer.sections import PositiveFloat, PositiveInt, Section


class RefitSettings(Section):
    """Travels to the policy and generation workers.

    Attributes:
        control: address of the control plane, host:port.
        model_name: by which the control plane knows the run's model.
        transport: how the bytes move.
        host: at which policy workers offer them.
        tensor_parallel: shards that the generation worker assembles its weights from.
        timeout_s: deadline of a publish and of a refit, in seconds.
    """

    control: str
    model_name: str
    transport: Literal["auto", "nixl", "tcp"]
    host: str
    tensor_parallel: PositiveInt
    timeout_s: PositiveFloat

    @property
    def transports(self) -> tuple[str, ...] | None:
        """What a publisher offers; None for all that it can."""
        return {"auto": None, "nixl": ("nixl", "tcp"), "tcp": ("tcp",)}[self.transport]
