"""Settings of publishers and receivers: every time limit and every bound, in one place."""

from __future__ import annotations

from dataclasses import dataclass, fields

from refit_mx.bounded_control import PATIENCE_S
from refit_mx.errors import RefitConfigError
from refit_mx.manifest_service import MOST_MANIFEST_BYTES

MOST_COPY_THREADS = 4


@dataclass(frozen=True)
class PublisherSettings:
    """Of a `refit_mx.publisher.MxV2TrainingPublisher`.

    Attributes:
        rpc_timeout_s: of one call to the control plane.
        control_patience_s: for a control plane that cannot be reached, before anything is copied.
        poll_s: between two looks at a version whose lease is waited for.
        source_timeout_s: after which the source server gives up a receiver that takes no bytes.
        max_connections: to the source server at a time, each a thread of this process. Beyond it
            the one that was idle for longest is closed, which its receiver opens again when it
            needs it; if none is idle, receivers wait. A receiver has one, over TCP
            ``connections_per_source``, one for manifests, and one more while it asks for digests.
        most_manifest_bytes: of a manifest; a larger one is refused.
        copy_threads: that copy into the arena and take digests; None is one a core that this
            process may use, at most `MOST_COPY_THREADS`.
        stale_on_sigterm: say STALE on SIGTERM, after which no version can be published. False for a
            process that handles SIGTERM and goes on.
    """

    rpc_timeout_s: float = 10.0
    control_patience_s: float = PATIENCE_S
    poll_s: float = 0.05
    source_timeout_s: float = 30.0
    max_connections: int = 1024
    most_manifest_bytes: int = MOST_MANIFEST_BYTES
    copy_threads: int | None = None
    stale_on_sigterm: bool = True

    def __post_init__(self) -> None:
        _positive(self)


@dataclass(frozen=True)
class ReceiverSettings:
    """Of a `refit_mx.receiver.MxV2RefitReceiver`.

    Attributes:
        lease_ttl_s: a version is kept for this long after the last renewal; renewed all the time.
        heartbeat_ttl_s: after this long without a sign of life a receiver is taken for dead.
        rpc_timeout_s: of one call to the control plane.
        control_patience_s: for a control plane that cannot be reached.
        manifest_timeout_s: one publisher that does not hand out its manifest in this time is left
            out.
        digest_timeout_s: one publisher that does not answer for the digests of what was read in
            this time is lost.
        stall_timeout_s: of a fetch for which no source has sent a byte; over NIXL, for which no
            transfer of at most 16 MiB (with RDMA 64) has ended. Then those that do not
            answer are left out, or else those that still owe something, and the next attempt reads
            from others.
        connect_timeout_s: of one connection to a source, over NIXL at most half of the time left.
        connections_per_source: of the TCP transport.
        scratch_copies: scratch memory, in multiples of what all targets take; what is in quarantine
            counts.
        most_manifest_bytes: of a manifest; a larger one is refused.
        verify_beside_bytes: from this many bytes on, what has arrived is verified in a thread while
            more arrives.
    """

    lease_ttl_s: float = 15.0
    heartbeat_ttl_s: float = 15.0
    rpc_timeout_s: float = 10.0
    control_patience_s: float = PATIENCE_S
    manifest_timeout_s: float = 5.0
    digest_timeout_s: float = 30.0
    stall_timeout_s: float = 10.0
    connect_timeout_s: float = 5.0
    connections_per_source: int = 2
    scratch_copies: int = 3
    most_manifest_bytes: int = MOST_MANIFEST_BYTES
    verify_beside_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        _positive(self)


def _positive(settings: PublisherSettings | ReceiverSettings) -> None:
    for field in fields(settings):
        value = getattr(settings, field.name)
        if value is not None and not isinstance(value, bool) and not value > 0:
            raise RefitConfigError(
                f"{type(settings).__name__}: {field.name} {value!r}; expected more than 0"
            )
