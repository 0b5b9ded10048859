"""Configuration types and their validation.

The types are plain TypedDicts, because a trainer's YAML carries them as they are. `validate_config`
checks one against its type and refuses unknown keys by name; an adapter says with `require_keys`
which optional-by-type keys it cannot run without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import (
    Any,  # callbacks receive, and configs hold, open dicts
    NotRequired,
)

from pydantic import ConfigDict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from dataplane_core.errors import ConfigError


class ObservabilityConfig(TypedDict):
    """Optional middleware that records what each operation did.

    Attributes:
        enabled: wrap the client in every installed middleware.
        callback: receives one dict per operation. Set in code; it does not come from YAML.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    enabled: bool
    callback: NotRequired[Callable[[dict[str, Any]], None]]


class DataPlaneConfig(TypedDict):
    """Which client to build, and how it is sized.

    The shipped YAML of a trainer sets every key of the first block; nothing is defaulted in code.

    Attributes:
        enabled: False makes the factory refuse, so that a run never starts on half a data plane.
        impl: name of the client, an entry point in the group ``dataplane_core.clients``.
        backend: storage engine inside the client.
        storage_capacity: samples the store holds at most, over all its units.
        num_storage_units: storage processes.
        claim_meta_poll_interval_s: how often a client that has to poll looks again, in seconds.
            Our clients are woken and do not poll.
        global_segment_size: bytes of each storage unit (``packed``) or of the store's segment
            (``mooncake_cpu``); other backends ignore it.
        local_buffer_size: bytes per local buffer, read by ``mooncake_cpu`` only.
        controller_address: where a client that attaches from outside the cluster finds it; ours
            attach through Ray and do not read it.
        ack_timeout_ms: deadline of one store operation, in milliseconds.
        claim_lease_s: how long a claim stays exclusive without being acknowledged or renewed, in
            seconds. Without it a claim is final.
        unit_resources: custom Ray resources and how much of each a storage unit asks for, so that
            it is placed on a node that has them (``packed`` and ``simple``). Without it units are
            spread over the nodes.
        packed_transport: how clients of backend ``packed`` reach its units: ``shm``, ``tcp``, or
            ``auto`` (the default), which is ``shm`` on the unit's own node.
        claim_order: ``module:function`` that takes a sample's id and tags and returns a number; of
            the samples that could be claimed those with the smallest are, where a claim gives no
            seed. Without it the order is that of first puts.
        sampler: ``module:Class`` of a TransferQueue sampler that serves what TransferQueue's own
            clients ask the controller for; without it rows are handed out in order.
        observability: optional middleware.
    """

    __pydantic_config__ = ConfigDict(  # type: ignore[misc]
        extra="forbid", strict=True, allow_inf_nan=False
    )

    enabled: bool
    impl: str
    backend: NotRequired[str]
    storage_capacity: NotRequired[int]
    num_storage_units: NotRequired[int]
    claim_meta_poll_interval_s: NotRequired[float]
    global_segment_size: NotRequired[int]
    local_buffer_size: NotRequired[int]

    controller_address: NotRequired[str]
    ack_timeout_ms: NotRequired[int]
    claim_lease_s: NotRequired[float]
    unit_resources: NotRequired[dict[str, float]]
    packed_transport: NotRequired[str]
    claim_order: NotRequired[str]
    sampler: NotRequired[str]
    observability: NotRequired[ObservabilityConfig]


REQUIRED_OF_STORES: tuple[str, ...] = (
    "backend",
    "storage_capacity",
    "num_storage_units",
    "claim_meta_poll_interval_s",
    "global_segment_size",
    "local_buffer_size",
)
"""The keys that every client over an external store needs, besides ``enabled`` and ``impl``."""

_NOT_NEGATIVE = ("global_segment_size", "local_buffer_size")
_POSITIVE = (
    "storage_capacity",
    "num_storage_units",
    "claim_meta_poll_interval_s",
    "ack_timeout_ms",
    "claim_lease_s",
)


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[DataPlaneConfig]:
    return TypeAdapter(DataPlaneConfig)


def validate_config(cfg: Mapping[str, Any] | None) -> DataPlaneConfig:
    """Check ``cfg`` against `DataPlaneConfig`.

    Raises:
        ConfigError: (a ValueError) naming every unknown key, missing key and wrong value.
    """
    if cfg is None:
        raise ConfigError("data-plane config: found None; expected a mapping like DataPlaneConfig")
    try:
        valid = _adapter().validate_python(dict(cfg))
    except ValidationError as error:
        found = "; ".join(
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
            f" (found {item['input']!r})"
            for item in error.errors(include_url=False)
        )
        raise ConfigError(f"data-plane config: {found}") from None
    for key in _POSITIVE:
        value = valid.get(key)
        if isinstance(value, int | float) and value <= 0:
            raise ConfigError(f"data-plane config: {key}: found {value!r}; expected more than 0")
    for key in _NOT_NEGATIVE:
        value = valid.get(key)
        if isinstance(value, int | float) and value < 0:
            raise ConfigError(f"data-plane config: {key}: found {value!r}; expected at least 0")
    for name, amount in valid.get("unit_resources", {}).items():
        if amount < 0:
            raise ConfigError(
                f"data-plane config: unit_resources.{name}: found {amount!r}; expected at least 0"
            )
    return valid


def require_keys(cfg: DataPlaneConfig, keys: Iterable[str], *, impl: str) -> None:
    """Raise `ConfigError` naming the ``keys`` that ``impl`` needs and ``cfg`` lacks."""
    missing = [key for key in keys if key not in cfg]
    if missing:
        raise ConfigError(
            f"data-plane config: impl {impl!r} needs {', '.join(missing)}; "
            "set every key explicitly, none has a default"
        )
