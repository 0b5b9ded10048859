"""Settings of publishers and receivers: all time limits and bounds."""

from __future__ import annotations

from dataclasses import dataclass, fields

from refit_mx.errors import RefitConfigError

CONTROL_RETRY_S = 3.0
"""Retry time for an unreachable control plane: enough for it to restart."""
MAX_MANIFEST_BYTES = 256 << 20
"""Size limit of one manifest: about four million shards."""
MAX_COPY_THREADS = 4


@dataclass(frozen=True)
class PublisherSettings:
    """Settings of a `refit_mx.source.publisher.MxV2TrainingPublisher`.

    Attributes:
        rpc_timeout_s: time limit of one control-plane call.
        control_retry_s: time limit of retries while the control plane cannot be reached; applies
            before anything is copied.
        poll_s: polling interval while waiting for the leases of a version.
        source_timeout_s: a receiver that accepts no bytes for so long is disconnected.
        max_connections: concurrent connections to the source server, each with a thread here.
            Beyond it the connection idle for longest is closed, and its receiver reconnects when
            needed; if none is idle, receivers wait. A receiver has one connection, or
            ``connections_per_source`` over TCP, plus one for manifests and, at times, one for
            digests.
        max_manifest_bytes: size limit of a manifest; a larger one is refused.
        copy_threads: threads that copy into the arena and compute digests. None is one per core
            that this process may use, up to `MAX_COPY_THREADS`.
        stale_on_sigterm: whether SIGTERM marks the publisher STALE, after which it can publish no
            version. Use False in a process that handles SIGTERM and continues.
    """

    rpc_timeout_s: float = 10.0
    control_retry_s: float = CONTROL_RETRY_S
    poll_s: float = 0.05
    source_timeout_s: float = 30.0
    max_connections: int = 1024
    max_manifest_bytes: int = MAX_MANIFEST_BYTES
    copy_threads: int | None = None
    stale_on_sigterm: bool = True

    def __post_init__(self) -> None:
        _positive(self)


@dataclass(frozen=True)
class ReceiverSettings:
    """Settings of a `refit_mx.receive.receiver.MxV2RefitReceiver`.

    Attributes:
        lease_ttl_s: time to live of a lease after its last renewal.
        heartbeat_ttl_s: a receiver that is silent for so long counts as dead.
        rpc_timeout_s: time limit of one control-plane call.
        control_retry_s: time limit of retries while the control plane cannot be reached.
        manifest_timeout_s: a publisher that does not send its manifest in this time is excluded.
        digest_timeout_s: a publisher that does not send the digests of what was read in this time
            counts as lost.
        stall_timeout_s: longest time in which a fetch gets no byte from any source, or over NIXL
            completes no transfer, each at most 16 MiB (64 with RDMA). Then sources that do not
            respond are excluded, or else those with outstanding reads, and the next attempt reads
            from other sources.
        connect_timeout_s: time limit of one connection to a source; over NIXL at most half of the
            time that remains.
        connections_per_source: connections of the TCP transport to each source.
        scratch_copies: scratch memory, as a multiple of the size of all targets. Buffers in
            quarantine count.
        max_manifest_bytes: size limit of a manifest; a larger one is refused.
        min_overlapped_verify_bytes: a fetch of at least this size is verified while bytes still
            arrive.
    """

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
    max_manifest_bytes: int = MAX_MANIFEST_BYTES
    min_overlapped_verify_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        _positive(self)


def _positive(settings: PublisherSettings | ReceiverSettings) -> None:
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value is not None and not isinstance(value, bool) and not value > 0:
            raise RefitConfigError(
                f"{type(settings).__name__}: {field.name} {value!r}; expected more than 0"
            )
