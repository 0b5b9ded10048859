"""Settings of publishers and receivers: all time limits and bounds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar  # Any: settings of any class, and JSON

from refit_mx.errors import RefitConfigError

CONTROL_RETRY_S = 6.0
"""Retry time for an unreachable control plane: enough for a restart. It is also enough if silent
peers occupy all connections: the control plane drops them after 2 s, and a refused client
reconnects up to 1.2 s later."""
MAX_COPY_THREADS = 4


def check_bounds(settings: Any) -> None:
    """Raise `RefitConfigError` unless every number of a dataclass is above 0.

    A class may list fields that may also be 0 as ``_may_be_zero``.
    """
    for name in (each.name for each in fields(settings)):
        value, may_be_zero = getattr(settings, name), _may_be_zero(type(settings), name)
        if value is None or isinstance(value, bool) or value > 0 or (value == 0 and may_be_zero):
            continue
        raise RefitConfigError(
            f"{type(settings).__name__}: {name} {value!r}; "
            f"expected {'0 or more' if may_be_zero else 'more than 0'}"
        )


def add_bounds(schema: dict[str, Any], settings: type) -> None:
    """Add the bounds of `check_bounds` to the JSON schema of ``settings``."""
    for name, key in schema["properties"].items():
        for each in key.get("anyOf", [key]):
            if each.get("type") in ("integer", "number"):
                each["minimum" if _may_be_zero(settings, name) else "exclusiveMinimum"] = 0


def _may_be_zero(settings: type, name: str) -> bool:
    return name in getattr(settings, "_may_be_zero", ())


@dataclass(frozen=True)
class PublisherSettings:
    """Settings of a `refit_mx.source.publisher.MxV2TrainingPublisher`.

    Attributes:
        rpc_timeout_s: time limit of one control-plane call, if the publisher creates the client.
        control_retry_s: time limit of retries while the control plane cannot be reached. It
            applies to queries of a version; other calls are retried until the publish times out.
        source_timeout_s: time after which a receiver that accepts no bytes is disconnected.
        max_connections: limit of concurrent connections to the source server, each with a thread
            in this process. Beyond it, the connection idle for longest is closed, and its receiver
            reconnects when needed; if none is idle, new receivers wait. A receiver uses one
            connection for reads (``connections_per_source`` over TCP), one for manifests, and
            sometimes one for digests.
        copy_threads: threads that copy into the arena and compute digests. None is one per core
            that this process may use, up to `MAX_COPY_THREADS`.
        stale_on_sigterm: whether SIGTERM marks the publisher STALE, after which it can publish no
            version. Use False in a process that handles SIGTERM and continues.
    """

    # for a JSON schema
    __pydantic_config__: ClassVar = {"extra": "forbid", "json_schema_extra": add_bounds}

    rpc_timeout_s: float = 10.0
    control_retry_s: float = CONTROL_RETRY_S
    source_timeout_s: float = 30.0
    max_connections: int = 1024
    copy_threads: int | None = None
    stale_on_sigterm: bool = True

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class ReceiverSettings:
    """Settings of a `refit_mx.receive.receiver.MxV2RefitReceiver`.

    Attributes:
        lease_ttl_s: time to live of a lease after its last renewal.
        heartbeat_ttl_s: time after which a silent receiver counts as dead.
        rpc_timeout_s: time limit of one control-plane call, if the receiver creates the client.
        control_retry_s: time limit of retries while the control plane cannot be reached.
        manifest_timeout_s: a publisher that does not send its manifest in this time is excluded.
        digest_timeout_s: a publisher that does not send requested digests in this time counts as
            lost.
        stall_timeout_s: time without progress after which a fetch counts as stalled. Progress is
            any byte from any source; over NIXL it is a complete transfer of at most 16 MiB (64 MiB
            with RDMA). After a stall, the next attempt excludes the silent sources; if none is
            silent, it excludes the sources with outstanding reads.
        connect_timeout_s: time limit for connecting to a source. Connecting to a NIXL agent also
            gets at most half of the time that remains.
        connections_per_source: connections of the TCP transport to each source.
        scratch_copies: limit of scratch memory, as a multiple of the size of all targets. It
            includes quarantined buffers, into which an abandoned read may still write.
        min_overlapped_verify_bytes: a fetch of at least this size is verified while bytes still
            arrive.
    """

    # for a JSON schema
    __pydantic_config__: ClassVar = {"extra": "forbid", "json_schema_extra": add_bounds}

    lease_ttl_s: float = 15.0
    heartbeat_ttl_s: float = 15.0
    rpc_timeout_s: float = 10.0
    control_retry_s: float = CONTROL_RETRY_S
    manifest_timeout_s: float = 5.0
    digest_timeout_s: float = 30.0
    stall_timeout_s: float = 10.0
    connect_timeout_s: float = 5.0
    connections_per_source: int = 2
    scratch_copies: int = 3
    min_overlapped_verify_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        check_bounds(self)
