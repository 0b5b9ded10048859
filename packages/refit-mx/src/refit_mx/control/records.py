"""Records of the control plane, one struct per row, and `Refusal`, raised when a rule is broken.

The store writes these structs. So a new field needs a default, and a field that is removed or
changes its meaning needs a new `refit_mx.control.store.SCHEMA_VERSION`.
"""

from __future__ import annotations

import enum

import msgspec


class VersionState(enum.IntEnum):
    """States of a version, numbered as in ``refit.proto``."""

    STAGING = 1
    READY = 2
    RELEASING = 3


class PayloadFormat(enum.IntEnum):
    """Formats of a payload, numbered as in ``refit.proto``."""

    FULL_TENSOR = 1
    XOR_DELTA = 2
    FULL_HF_CHECKPOINT = 3


class WorkerRole(enum.IntEnum):
    """Roles of a worker, numbered as in ``refit.proto``."""

    TRAINER = 1
    GENERATOR = 2


class Code(enum.Enum):
    """Reasons for a refusal, named as gRPC's status codes."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"


class Refusal(Exception):
    """A call that the rules do not allow; it changed nothing.

    Attributes:
        code: reason, for programs.
        message: reason, for people: the subject, its value and the expected value.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ObjectStorage(msgspec.Struct, frozen=True):
    """Location of a version that no worker serves.

    Attributes:
        uri: location of the complete payload.
        storage_type: kind of storage, numbered as in ``refit.proto``.
    """

    uri: str
    storage_type: int


class VersionBody(msgspec.Struct, frozen=True):
    """Arguments that create a version, equal in all calls with the same idempotency key.

    The key is unique within the model. A delta may name its base version. A version has either
    expected slots or object storage. Once it is READY, each slot has a live shard. ``state`` is the
    initial state, STAGING or READY. Without a ``uid``, the control plane chooses one.
    """

    model_name: str
    idempotency_key: str
    payload_format: PayloadFormat
    base_version_id: str | None
    expected_source_slots: tuple[str, ...]
    object_storage: ObjectStorage | None
    state: VersionState
    uid: str | None


class Version(msgspec.Struct):
    """One immutable set of weights.

    The ``order`` rises with each created version. Times are Unix time. ``released_at_ms`` is when
    the version became RELEASING, and 0 before; ``reason`` says why.
    """

    uid: str
    body: VersionBody
    state: VersionState
    order: int
    created_at_ms: int
    released_at_ms: int = 0
    reason: str = ""


class Worker(msgspec.Struct):
    """A process that serves or receives weights. Its id is new for every process.

    The registration expires at ``expires_at_ms``, Unix time, unless it is renewed; each renewal is
    for ``ttl_ms``. STALE is final. ``expired`` lasts until the worker registers again.
    """

    worker_id: str
    role: WorkerRole
    model_name: str
    ttl_ms: int
    expires_at_ms: int
    stale: bool = False
    expired: bool = False

    def is_live(self, now_ms: int) -> bool:
        """Return whether receivers may read from the worker."""
        return not (self.stale or self.expired) and now_ms < self.expires_at_ms


class Shard(msgspec.Struct, frozen=True):
    """One worker's part of a version; its fields are those of the message `WeightVersionShard`.

    The numbers of tensors and bytes are for display only. ``manifest_digest`` is a sha256 in hex,
    ``manifest_endpoint`` the host:port that serves the manifest.
    """

    version_id: str
    source_slot_id: str
    worker_id: str
    tensor_count: int
    total_bytes: int
    manifest_digest: str
    manifest_endpoint: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Key, unique among all shards."""
        return (self.version_id, self.source_slot_id, self.worker_id)


class Lease(msgspec.Struct):
    """A receiver's lease on a version; a receiver has at most one lease on each version.

    The lease expires at ``expires_at_ms``, Unix time, unless it is renewed; each renewal is for
    ``ttl_ms``.
    """

    lease_id: str
    version_id: str
    worker_id: str
    ttl_ms: int
    expires_at_ms: int
