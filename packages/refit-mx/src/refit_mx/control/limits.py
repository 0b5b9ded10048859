"""`Limits`: how much the control plane keeps, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from refit_mx.errors import RefitConfigError


@dataclass(frozen=True)
class Limits:
    """How much the control plane keeps, and for how long.

    Attributes:
        retention: READY versions that a model keeps; the oldest beyond it that nobody leases are
            released. 0 keeps all. Versions in object storage do not count.
        forget_after_s: after this a RELEASING version without shards and leases is forgotten, and
            so is a worker that is dead and has no shards.
        abandon_after_s: after this a STAGING version without a live shard is released.
        most_released: RELEASING versions without shards and leases that are remembered; of more,
            those that have been so for longest are forgotten at once.
        most_versions: that are not forgotten, in all.
        most_workers: that are not forgotten, in all.
        most_leases: live ones on one version.
        most_replicas: shards that fill one slot.
        most_ttl_s: of a worker or a lease.

    Raises:
        RefitConfigError: a negative retention, or another limit that is not positive.
    """

    retention: int = 2
    forget_after_s: float = 3600.0
    abandon_after_s: float = 86_400.0
    most_released: int = 256
    most_versions: int = 10_000
    most_workers: int = 100_000
    most_leases: int = 10_000
    most_replicas: int = 256
    most_ttl_s: float = 86_400.0

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value < 0 or (value == 0 and name != "retention"):
                raise RefitConfigError(f"{name} {value!r}; expected more than 0")
