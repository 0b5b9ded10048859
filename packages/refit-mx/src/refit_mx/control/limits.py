"""`Limits`: bounds on what the control plane retains, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from refit_mx.settings import add_bounds, check_bounds


@dataclass(frozen=True)
class Limits:
    """Bounds on what the control plane retains, and for how long.

    Attributes:
        retention: READY versions that a model retains. Beyond it the oldest without a lease are
            released. 0 retains all. Versions in object storage do not count.
        forget_after_s: time after which a RELEASING version without shards and leases is
            forgotten, and so is a dead worker without shards.
        abandon_after_s: time after which a STAGING version without a live shard is released.
        max_released: limit of RELEASING versions without shards and leases. Beyond it, they
            are forgotten at once, in the order in which they lost their last shard or lease.
        max_versions: limit of all versions that are not forgotten.
        max_workers: limit of all workers that are not forgotten.
        max_leases: limit of live leases on one version.
        max_replicas: limit of shards that fill one slot.
        max_ttl_s: longest time to live of a worker or a lease.

    Raises:
        RefitConfigError: a negative retention, or another limit that is not positive.
    """

    # for a JSON schema
    __pydantic_config__: ClassVar = {"extra": "forbid", "json_schema_extra": add_bounds}
    _may_be_zero: ClassVar = ("retention",)

    retention: int = 2
    forget_after_s: float = 3600.0
    abandon_after_s: float = 86_400.0
    max_released: int = 256
    max_versions: int = 10_000
    max_workers: int = 100_000
    max_leases: int = 10_000
    max_replicas: int = 256
    max_ttl_s: float = 86_400.0

    def __post_init__(self) -> None:
        check_bounds(self)
