"""ModelExpress's protobuf messages and services, and what they are in our records."""

from __future__ import annotations

from typing import Any

from refit_mx.control.messages import (
    compute_mx_source_id,
    p2p_pb2,
    p2p_pb2_grpc,
    refit_pb2,
    refit_pb2_grpc,
)
from refit_mx.control.records import (
    Code,
    ObjectStorage,
    PayloadFormat,
    Refusal,
    Shard,
    Version,
    VersionBody,
    VersionState,
    WorkerRole,
)
from refit_mx.control.state import layout_signature

__all__ = [
    "compute_mx_source_id",
    "p2p_pb2",
    "p2p_pb2_grpc",
    "refit_pb2",
    "refit_pb2_grpc",
    "refit_source_id",
    "shard_of",
    "shard_to",
    "version_body_of",
    "version_to",
]

# The generated classes have no types, so messages are Any in this package.
Message = Any

MOST_CHARACTERS = 512
"""Of an identifier or an address."""
MOST_SLOTS = 65_536
"""That one version expects."""


def refit_source_id(model_name: str) -> str:
    """What ``UpdateStatus`` calls the RL workers of a model.

    ``RefitService`` has no call by which a worker says that it stops; ``P2pService.UpdateStatus``
    has, for sources that published metadata. So a worker of ``RefitService`` stands there as a
    source of weights of its model without any other property.
    """
    return str(
        compute_mx_source_id(
            p2p_pb2.SourceIdentity(
                mx_source_type=p2p_pb2.MX_SOURCE_TYPE_WEIGHTS, model_name=model_name
            )
        )
    )


def text(value: str, what: str, *, most: int = MOST_CHARACTERS) -> str:
    """``value``, if it can be an identifier or an address.

    Raises:
        Refusal: INVALID_ARGUMENT: it is empty, too long, or has characters that cannot be seen.
    """
    if not value.strip():
        raise Refusal(Code.INVALID_ARGUMENT, f"{what} is required")
    if len(value) > most:
        raise Refusal(
            Code.INVALID_ARGUMENT, f"{what} has {len(value)} characters; expected at most {most}"
        )
    if not value.isprintable():
        raise Refusal(Code.INVALID_ARGUMENT, f"{what} {value!r} has unprintable characters")
    return value


def version_body_of(request: Message) -> VersionBody:
    """What a ``CreateWeightVersionRequest`` asks for.

    Raises:
        Refusal: INVALID_ARGUMENT.
    """
    try:
        payload_format = PayloadFormat(request.payload_format)
    except ValueError:
        raise Refusal(Code.INVALID_ARGUMENT, "payload_format is required") from None
    if len(request.expected_source_slots) > MOST_SLOTS:
        raise Refusal(
            Code.INVALID_ARGUMENT,
            f"{len(request.expected_source_slots)} expected source slots; at most {MOST_SLOTS}",
        )
    storage = None
    if request.HasField("object_storage"):
        uri = text(request.object_storage.uri, "object_storage.uri", most=4096)
        if not request.object_storage.storage_type:
            raise Refusal(Code.INVALID_ARGUMENT, "object_storage.storage_type is required")
        storage = ObjectStorage(uri, request.object_storage.storage_type)
    return VersionBody(
        model_name=text(request.model_name, "model_name"),
        idempotency_key=text(request.idempotency_key, "idempotency_key"),
        payload_format=payload_format,
        base_version_id=text(request.base_version_id, "base_version_id")
        if request.HasField("base_version_id")
        else None,
        expected_source_slots=tuple(
            text(slot, "an expected source slot") for slot in request.expected_source_slots
        ),
        object_storage=storage,
        # Proto3 cannot tell a state that is not given from UNSPECIFIED; a version starts STAGING.
        state=state_of(request.state or refit_pb2.WEIGHT_VERSION_STATE_STAGING),
        uid=text(request.uid, "uid") if request.HasField("uid") else None,
    )


def state_of(number: int) -> VersionState:
    """Of a message's ``state``.

    Raises:
        Refusal: INVALID_ARGUMENT.
    """
    try:
        return VersionState(number)
    except ValueError:
        raise Refusal(
            Code.INVALID_ARGUMENT, f"state {number}; expected STAGING, READY or RELEASING"
        ) from None


def role_of(number: int) -> WorkerRole:
    """Of a message's ``role``.

    Raises:
        Refusal: INVALID_ARGUMENT.
    """
    try:
        return WorkerRole(number)
    except ValueError:
        raise Refusal(
            Code.INVALID_ARGUMENT, f"role {number}; expected TRAINER or GENERATOR"
        ) from None


def version_to(version: Version) -> Message:
    """As a ``WeightVersion``."""
    body = version.body
    message = refit_pb2.WeightVersion(
        uid=version.uid,
        model_name=body.model_name,
        idempotency_key=body.idempotency_key,
        payload_format=int(body.payload_format),
        expected_source_slots=body.expected_source_slots,
        layout_signature=layout_signature(body),
        state=int(version.state),
        created_at_unix_ms=version.created_at_ms,
    )
    if body.base_version_id is not None:
        message.base_version_id = body.base_version_id
    if body.object_storage is not None:
        message.object_storage.uri = body.object_storage.uri
        message.object_storage.storage_type = body.object_storage.storage_type
    return message


def shard_of(message: Message) -> Shard:
    """Of a ``WeightVersionShard``.

    Raises:
        Refusal: INVALID_ARGUMENT.
    """
    return Shard(
        version_id=text(message.version_id, "version_id"),
        source_slot_id=text(message.source_slot_id, "source_slot_id"),
        worker_id=text(message.worker_id, "worker_id"),
        tensor_count=message.tensor_count,
        total_bytes=message.total_bytes,
        manifest_digest=text(message.manifest_digest, "manifest_digest"),
        manifest_endpoint=text(message.manifest_endpoint, "manifest_endpoint"),
    )


def shard_to(shard: Shard) -> Message:
    """As a ``WeightVersionShard``."""
    return refit_pb2.WeightVersionShard(
        version_id=shard.version_id,
        source_slot_id=shard.source_slot_id,
        worker_id=shard.worker_id,
        tensor_count=shard.tensor_count,
        total_bytes=shard.total_bytes,
        manifest_digest=shard.manifest_digest,
        manifest_endpoint=shard.manifest_endpoint,
    )
