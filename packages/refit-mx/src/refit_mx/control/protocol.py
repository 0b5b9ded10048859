"""ModelExpress's protobuf messages and services, and their conversion to records.

Importing ``modelexpress`` or ``modelexpress_rl`` imports torch, CUDA's bindings and NIXL. A control
plane needs none of them, and NIXL's libraries crash a process that has loaded another gRPC. The
generated modules need nothing else from their packages, so they are imported under empty stand-in
packages. The stand-ins are removed afterwards: a later import gets the real packages, with these
same modules.
"""

from __future__ import annotations

import enum
import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from refit_mx.control.records import (
    Code,
    ObjectStorage,
    PayloadFormat,
    Refusal,
    Shard,
    Version,
    VersionBody,
    VersionState,
)
from refit_mx.control.state import layout_signature

# The generated classes have no types, so messages are Any in this package.
Message = Any
_Member = TypeVar("_Member", bound=enum.IntEnum)

MAX_CHARACTERS = 512
"""Length limit of an identifier or an address."""
MAX_SLOTS = 65_536
"""Number of slots that one version may expect."""


def refit_source_id(model_name: str) -> str:
    """Return the source id that stands for a model's RL workers in ``UpdateStatus``.

    ``RefitService`` has no call to mark a worker STALE. ``P2pService.UpdateStatus`` can, for
    sources that published metadata. So a worker of ``RefitService`` appears there as a weights
    source of its model, without any other property.
    """
    return str(
        compute_mx_source_id(
            p2p_pb2.SourceIdentity(
                mx_source_type=p2p_pb2.MX_SOURCE_TYPE_WEIGHTS, model_name=model_name
            )
        )
    )


def checked_text(value: str, what: str, *, maximum: int = MAX_CHARACTERS) -> str:
    """Return ``value`` if it is valid as an identifier or an address.

    Raises:
        Refusal: INVALID_ARGUMENT if it is empty, too long, or has unprintable characters.
    """
    if not value.strip():
        raise Refusal(Code.INVALID_ARGUMENT, f"{what} is required")
    if len(value) > maximum:
        raise Refusal(
            Code.INVALID_ARGUMENT, f"{what} has {len(value)} characters; expected at most {maximum}"
        )
    if not value.isprintable():
        raise Refusal(Code.INVALID_ARGUMENT, f"{what} {value!r} has unprintable characters")
    return value


def checked_fields(message: Message, *names: str) -> tuple[str, ...]:
    """Return fields of a message, each checked by `checked_text`."""
    return tuple(checked_text(getattr(message, name), name) for name in names)


def version_body_of(request: Message) -> VersionBody:
    """Return the body of a ``CreateWeightVersionRequest``.

    Raises:
        Refusal: INVALID_ARGUMENT if a field is missing or invalid.
    """
    if not request.payload_format:
        raise Refusal(Code.INVALID_ARGUMENT, "payload_format is required")
    payload_format = enum_member(PayloadFormat, request.payload_format, "payload_format")
    if len(request.expected_source_slots) > MAX_SLOTS:
        raise Refusal(
            Code.INVALID_ARGUMENT,
            f"{len(request.expected_source_slots)} expected source slots; at most {MAX_SLOTS}",
        )
    storage = None
    if request.HasField("object_storage"):
        uri = checked_text(request.object_storage.uri, "object_storage.uri", maximum=4096)
        if not request.object_storage.storage_type:
            raise Refusal(Code.INVALID_ARGUMENT, "object_storage.storage_type is required")
        storage = ObjectStorage(uri, request.object_storage.storage_type)
    return VersionBody(
        model_name=checked_text(request.model_name, "model_name"),
        idempotency_key=checked_text(request.idempotency_key, "idempotency_key"),
        payload_format=payload_format,
        base_version_id=checked_text(request.base_version_id, "base_version_id")
        if request.HasField("base_version_id")
        else None,
        expected_source_slots=tuple(
            checked_text(slot, "an expected source slot") for slot in request.expected_source_slots
        ),
        object_storage=storage,
        # In proto3 a missing state reads as UNSPECIFIED; a version starts STAGING.
        state=enum_member(VersionState, request.state or VersionState.STAGING, "state"),
        uid=checked_text(request.uid, "uid") if request.HasField("uid") else None,
    )


def enum_member(kind: type[_Member], number: int, what: str) -> _Member:
    """Return the member that a number stands for in ``refit.proto``.

    Raises:
        Refusal: INVALID_ARGUMENT for an unknown number.
    """
    try:
        return kind(number)
    except ValueError:
        *names, last = kind.__members__
        raise Refusal(
            Code.INVALID_ARGUMENT, f"{what} {number}; expected {', '.join(names)} or {last}"
        ) from None


def version_message(version: Version) -> Message:
    """Return the ``WeightVersion`` message of a record."""
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
    """Return the record of a ``WeightVersionShard``.

    Raises:
        Refusal: INVALID_ARGUMENT if a field is missing or invalid.
    """
    texts = "version_id", "source_slot_id", "worker_id", "manifest_digest", "manifest_endpoint"
    checked_fields(message, *texts)
    return Shard(*(getattr(message, name) for name in Shard.__struct_fields__))


def shard_message(shard: Shard) -> Message:
    """Return the ``WeightVersionShard`` message of a record."""
    return refit_pb2.WeightVersionShard(**msgspec.structs.asdict(shard))


_lock = threading.Lock()


@contextmanager
def _stand_in_packages(*packages: str) -> Iterator[None]:
    """Allow imports of submodules of packages without running the packages' own code."""
    stand_ins = []
    with _lock:
        try:
            for name in packages:
                if name in sys.modules:
                    continue
                top, _, rest = name.partition(".")
                spec = PathFinder.find_spec(top)
                if spec is None or not spec.submodule_search_locations:
                    raise ModuleNotFoundError(f"No module named {top!r}", name=top)
                module = ModuleType(name)
                module.__path__ = [
                    "/".join([folder, *rest.split(".")]) if rest else folder
                    for folder in spec.submodule_search_locations
                ]
                sys.modules[name] = module
                stand_ins.append(name)
            yield
        finally:
            for name in stand_ins:
                sys.modules.pop(name, None)


if TYPE_CHECKING:  # a type checker needs real imports
    from modelexpress import p2p_pb2 as p2p_pb2
    from modelexpress import p2p_pb2_grpc as p2p_pb2_grpc
    from modelexpress.metadata.source_id import compute_mx_source_id as compute_mx_source_id
    from modelexpress_rl import refit_pb2 as refit_pb2
    from modelexpress_rl import refit_pb2_grpc as refit_pb2_grpc
else:
    with _stand_in_packages("modelexpress", "modelexpress.metadata", "modelexpress_rl"):
        p2p_pb2 = importlib.import_module("modelexpress.p2p_pb2")
        p2p_pb2_grpc = importlib.import_module("modelexpress.p2p_pb2_grpc")
        compute_mx_source_id = importlib.import_module(
            "modelexpress.metadata.source_id"
        ).compute_mx_source_id
        refit_pb2 = importlib.import_module("modelexpress_rl.refit_pb2")
        refit_pb2_grpc = importlib.import_module("modelexpress_rl.refit_pb2_grpc")
