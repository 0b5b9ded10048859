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
    """Arguments that create a version; calls with one idempotency key must have equal arguments.

    Attributes:
        model_name: model of the weights.
        idempotency_key: key, unique within the model.
        payload_format: format of the shards or the object.
        base_version_id: the version that a delta is based on.
        expected_source_slots: slots that each have a live shard once the version is READY; empty
            for a version in object storage.
        object_storage: location; None if workers serve the version.
        state: initial state, STAGING or READY.
        uid: id chosen by the caller; None lets the control plane choose.
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

    Attributes:
        uid: id, unique in the control plane.
        body: arguments of its creation.
        state: current state.
        order: number that rises with each created version.
        created_at_ms: Unix time of creation.
        released_at_ms: Unix time at which it became RELEASING; 0 before.
        reason: reason why it became RELEASING.
    """

    uid: str
    body: VersionBody
    state: VersionState
    order: int
    created_at_ms: int
    released_at_ms: int = 0
    reason: str = ""


class Worker(msgspec.Struct):
    """A process that serves or receives weights.

    Attributes:
        worker_id: id, new for every process.
        role: role of the worker.
        model_name: model of the weights.
        ttl_ms: time to live of each registration.
        expires_at_ms: Unix time at which the registration expires unless it is renewed.
        stale: whether the worker was marked STALE, which is final.
        expired: whether the registration expired and has not been renewed since.
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

    Attributes:
        version_id: the version.
        source_slot_id: the expected slot that the shard fills.
        worker_id: the worker that serves it.
        tensor_count: number of tensors, for display only.
        total_bytes: size, for display only.
        manifest_digest: sha256 of the manifest, in hex.
        manifest_endpoint: host:port that serves the manifest.
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
    """A receiver's lease on a version.

    Attributes:
        lease_id: id, unique in the control plane.
        version_id: the version that is held.
        worker_id: the receiver; it has one lease on a version at a time.
        ttl_ms: time to live of each renewal.
        expires_at_ms: Unix time at which the lease expires unless it is renewed.
    """

    lease_id: str
    version_id: str
    worker_id: str
    ttl_ms: int
    expires_at_ms: int
