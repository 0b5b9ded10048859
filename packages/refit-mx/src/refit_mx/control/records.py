"""What the control plane knows, one struct a row, and how it refuses.

The structs are what the store keeps, so a field that is added needs a default; one that is taken
away or changes its meaning needs a new `refit_mx.control.store.SCHEMA_VERSION`.
"""

from __future__ import annotations

import enum

import msgspec


class VersionState(enum.IntEnum):
    """As ``refit.proto`` numbers them."""

    STAGING = 1
    READY = 2
    RELEASING = 3


class PayloadFormat(enum.IntEnum):
    """As ``refit.proto`` numbers them."""

    FULL_TENSOR = 1
    XOR_DELTA = 2
    FULL_HF_CHECKPOINT = 3


class WorkerRole(enum.IntEnum):
    """As ``refit.proto`` numbers them."""

    TRAINER = 1
    GENERATOR = 2


class Code(enum.Enum):
    """Why a call is refused; the names of gRPC's status codes."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    UNAVAILABLE = "UNAVAILABLE"


class Refusal(Exception):
    """A call that the rules do not allow; nothing was changed by it.

    Attributes:
        code: for the caller's program.
        message: for the caller's eyes; names the thing, what was found and what was expected.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class ObjectStorage(msgspec.Struct, frozen=True):
    """Where a version lies that no worker serves.

    Attributes:
        uri: of the whole payload.
        storage_type: as ``refit.proto`` numbers them.
    """

    uri: str
    storage_type: int


class VersionBody(msgspec.Struct, frozen=True):
    """What a version was created with: all that an idempotency key stands for.

    Attributes:
        model_name: whose weights.
        idempotency_key: unique to the model.
        payload_format: of the shards or the object.
        base_version_id: the version that a delta is of.
        expected_source_slots: which a READY version has a live shard of, each; none if it lies in
            object storage.
        object_storage: set if no worker serves the version.
        state: STAGING or READY.
        uid: if the caller chose one.
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
        uid: unique in the control plane.
        body: what it was created with.
        state: now.
        order: counts up; a version that was created later has a larger one.
        created_at_ms: Unix time.
        released_at_ms: Unix time at which it became RELEASING; 0 before.
        reason: why it became RELEASING.
    """

    uid: str
    body: VersionBody
    state: VersionState
    order: int
    created_at_ms: int
    released_at_ms: int = 0
    reason: str = ""


class Worker(msgspec.Struct):
    """One process that serves or receives weights.

    Attributes:
        worker_id: new with every process.
        role: what it does.
        model_name: of the weights.
        ttl_ms: how long a registration lasts.
        expires_at_ms: Unix time at which it is taken for dead unless it registers again.
        stale: it said that it stops; that is for good.
        lapsed: it did not register again in time, and has not since.
    """

    worker_id: str
    role: WorkerRole
    model_name: str
    ttl_ms: int
    expires_at_ms: int
    stale: bool = False
    lapsed: bool = False

    def is_live(self, now_ms: int) -> bool:
        """Whether it may be read from."""
        return not (self.stale or self.lapsed) and now_ms < self.expires_at_ms


class Shard(msgspec.Struct, frozen=True):
    """One worker's part of a version.

    Attributes:
        version_id: of the version.
        source_slot_id: which expected slot it fills.
        worker_id: who serves it.
        tensor_count: for the eyes.
        total_bytes: for the eyes.
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
        """What it is unique by."""
        return (self.version_id, self.source_slot_id, self.worker_id)


class Lease(msgspec.Struct):
    """A receiver's hold on a version.

    Attributes:
        lease_id: unique.
        version_id: of the version.
        worker_id: of the receiver; it has one lease on a version at a time.
        ttl_ms: how long a renewal lasts.
        expires_at_ms: Unix time at which it ends unless it is renewed.
    """

    lease_id: str
    version_id: str
    worker_id: str
    ttl_ms: int
    expires_at_ms: int
