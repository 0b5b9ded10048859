"""Configuration types and their validation.

The types are plain TypedDicts, as a trainer's YAML holds them. `validate_config` checks a config
against its type and names unknown keys. With `require_keys` an adapter demands keys that the type
leaves optional. With `check_agreement` it refuses an attaching client whose keys contradict the
store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import (
    Annotated,
    Any,  # callbacks receive, and configs hold, open dicts
    Literal,
    NotRequired,
)

from pydantic import (
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)
from pydantic.json_schema import SkipJsonSchema
from typing_extensions import TypedDict

from dataplane_core.arguments import repr_with_type
from dataplane_core.errors import ConfigError


class ObservabilityConfig(TypedDict):
    """Configuration of the middleware that records each operation.

    Attributes:
        enabled: wrap the client in every installed middleware.
        callback: receives one dict per operation. It is set in code, not in YAML.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # type: ignore[misc]

    enabled: bool
    callback: NotRequired[Annotated[Callable[[dict[str, Any]], None], SkipJsonSchema()]]


class DataPlaneConfig(TypedDict):
    """Configuration of a data-plane client: which client to build, and its sizes.

    The client that bootstraps an external store must set every key up to ``local_buffer_size``;
    none has a default. These values apply to all clients of the store, except the keys that each
    client sets for itself. A client that attaches may omit the keys of the store; if it sets
    another value, it is refused.

    Attributes:
        enabled: False makes the factory raise, so that no run starts without its data plane.
        impl: name of the client, an entry point in the group ``dataplane_core.clients``.
        backend: storage engine of the store.
        storage_capacity: maximum samples in the store, over all its units. A put beyond it blocks;
            new fields of existing samples need no capacity.
        num_storage_units: number of storage processes of ``packed``, ``simple`` and
            ``mooncake_cpu``; other backends ignore it.
        claim_meta_poll_interval_s: interval of clients that poll, in seconds. The clients of this
            repository are notified and ignore it; a `KeyValueClient` polls at its own ``poll_s``.
        global_segment_size: bytes of each storage unit (``packed``) or of the store's memory
            (``mooncake_cpu``, ``yuanrong``); other backends ignore it.
        local_buffer_size: bytes per local buffer, for ``mooncake_cpu`` only.
        controller_address: address of the store, for clients that attach from outside the cluster.
            The clients of this repository attach through Ray and ignore it.
        ack_timeout_ms: deadline of one store operation, in milliseconds; each client has its own.
        claim_lease_s: how long a claim stays exclusive without being acknowledged or renewed, in
            seconds. Without it a claim is final. Each client sets it for its own claims.
        unit_resources: custom Ray resource to the amount that each storage unit reserves, so that
            units run on the nodes that have it (``packed`` and ``simple`` only). Without it units
            are spread over all nodes.
        packed_transport: how clients reach the units (``packed`` only): ``shm``, ``tcp``, or
            ``auto`` (the default), which is ``shm`` on the unit's own node and ``tcp`` elsewhere.
        claim_order: ``module:function`` that maps a sample's id and tags to a number. Claims
            without a seed take the smallest numbers first, and equal ones in the order of first
            puts. Without this key, claims take samples in the order of first puts.
        sampler: ``module:Class`` of a TransferQueue sampler, which serves TransferQueue's own
            clients. Without it TransferQueue's controller serves rows in order.
        transfer_queue_mirror: whether rows, tags and consumption are mirrored to TransferQueue's
            controller, for readers through TransferQueue's own API (the default). False, with
            backend ``packed``, starts no controller.
        observability: optional middleware; each client has its own.
    """

    __pydantic_config__ = ConfigDict(  # type: ignore[misc]
        extra="forbid", strict=True, allow_inf_nan=False
    )

    enabled: bool
    impl: str
    backend: NotRequired[str]
    storage_capacity: NotRequired[PositiveInt]
    num_storage_units: NotRequired[PositiveInt]
    claim_meta_poll_interval_s: NotRequired[PositiveFloat]
    global_segment_size: NotRequired[NonNegativeInt]
    local_buffer_size: NotRequired[NonNegativeInt]

    controller_address: NotRequired[str]
    ack_timeout_ms: NotRequired[PositiveInt]
    claim_lease_s: NotRequired[PositiveFloat]
    unit_resources: NotRequired[dict[str, NonNegativeFloat]]
    packed_transport: NotRequired[Literal["auto", "shm", "tcp"]]
    claim_order: NotRequired[str]
    sampler: NotRequired[str]
    transfer_queue_mirror: NotRequired[bool]
    observability: NotRequired[ObservabilityConfig]


REQUIRED_OF_STORES: tuple[str, ...] = (
    "backend",
    "storage_capacity",
    "num_storage_units",
    "claim_meta_poll_interval_s",
    "global_segment_size",
    "local_buffer_size",
)
"""Keys that a client needs to bootstrap an external store, besides ``enabled`` and ``impl``."""


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[DataPlaneConfig]:
    return TypeAdapter(DataPlaneConfig)


def validate_config(cfg: Mapping[str, Any] | None) -> DataPlaneConfig:
    """Check ``cfg`` against `DataPlaneConfig`.

    Raises:
        ConfigError: (a ValueError) the error names every unknown key, missing key, value of a wrong
            type and number that is out of range.
    """
    try:
        keys = dict(cfg)  # type: ignore[arg-type]  # refused below
    except (TypeError, ValueError):
        raise ConfigError(
            f"data-plane config: found {repr_with_type(cfg)}; expected a mapping like "
            "DataPlaneConfig"
        ) from None
    try:
        return _adapter().validate_python(keys)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
            f" (found {item['input']!r})"
            for item in error.errors(include_url=False)
        )
        raise ConfigError(f"data-plane config: {problems}") from None


def require_keys(cfg: DataPlaneConfig, keys: Iterable[str], *, impl: str) -> None:
    """Raise `ConfigError` naming the ``keys`` that ``impl`` needs and ``cfg`` lacks."""
    missing = [key for key in keys if key not in cfg]
    if missing:
        raise ConfigError(
            f"data-plane config: impl {impl!r} needs {', '.join(missing)}; "
            "set every key explicitly, none has a default"
        )


def check_agreement(cfg: DataPlaneConfig, store: Mapping[str, object]) -> None:
    """Raise `ConfigError` naming the keys of an attaching client that contradict the store.

    Args:
        cfg: configuration of the client; a key that it lacks contradicts nothing.
        store: the store's value for each key that the store determines.
    """
    differing = [
        f"{key}: found {cfg[key]!r}; expected {value!r}"  # type: ignore[literal-required]
        for key, value in store.items()
        if key in cfg and cfg[key] != value  # type: ignore[literal-required]
    ]
    if differing:
        raise ConfigError(
            f"data-plane config: {'; '.join(differing)}: the running store has these values for "
            "all of its clients; remove the keys or set the same values"
        )
