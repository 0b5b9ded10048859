"""The control plane as gRPC services of ModelExpress.

The servicers are synchronous: a ``grpc.server`` runs them in its threads, a ``grpc.aio.server`` in
its migration thread pool.
"""

# ruff: noqa: N802 - methods have the names of the RPCs

from __future__ import annotations

import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import grpc

from refit_mx.control.plane import ControlPlane
from refit_mx.control.protocol import (
    Message,
    checked_fields,
    checked_text,
    compute_mx_source_id,
    enum_member,
    p2p_pb2,
    p2p_pb2_grpc,
    refit_pb2,
    refit_pb2_grpc,
    refit_source_id,
    shard_message,
    shard_of,
    version_body_of,
    version_message,
)
from refit_mx.control.records import Refusal, VersionState, WorkerRole
from refit_mx.control.sources import Source
from refit_mx.control.state import ControlState

Context = Any  # grpc's context has no types


CallObserver = Callable[[str, str, float], None]
"""Callback for each answered call: its method, the name of its status code, and its duration."""


def ignore_call(method: str, code: str, seconds: float) -> None:
    """Ignore a call."""


class _Servicer:
    def __init__(self, plane: ControlPlane, observe: CallObserver) -> None:
        self._plane = plane
        self._observe = observe


Rpc = Callable[[Any, Message, Context], Message]
Step = Callable[[Any, Message, ControlState, int], Message]


def _rpc(answer: Callable[[Any, Message], Message]) -> Rpc:
    """Turn a function of a request into the RPC of the same name."""

    @wraps(answer)
    def rpc(self: _Servicer, request: Message, context: Context) -> Message:
        started = time.perf_counter()
        code = grpc.StatusCode.UNKNOWN  # as gRPC reports an unexpected error
        try:
            message = answer(self, request)
            code = grpc.StatusCode.OK
        except Refusal as refusal:
            code = grpc.StatusCode[refusal.code.value]
            context.abort(code, refusal.message)
        else:
            return message
        finally:
            self._observe(answer.__name__, code.name, time.perf_counter() - started)

    return rpc


def _step(step: Step) -> Rpc:
    """Turn a function of the state into the RPC of the same name."""

    @wraps(step)
    def answer(self: _Servicer, request: Message) -> Message:
        return self._plane.call(lambda state, now_ms: step(self, request, state, now_ms))

    return _rpc(answer)


class RefitServicer(_Servicer, refit_pb2_grpc.RefitServiceServicer):
    """``RefitService``: versions, workers, shards and leases."""

    @_step
    def CreateWeightVersion(self, request: Message, state: ControlState, now_ms: int) -> Message:
        version = state.create_version(version_body_of(request), now_ms=now_ms)
        return refit_pb2.CreateWeightVersionResponse(version=version_message(version))

    @_step
    def GetWeightVersion(self, request: Message, state: ControlState, now_ms: int) -> Message:
        version = state.get_version(*checked_fields(request, "uid"), now_ms=now_ms)
        return refit_pb2.GetWeightVersionResponse(version=version_message(version))

    @_step
    def DeleteWeightVersion(self, request: Message, state: ControlState, now_ms: int) -> Message:
        version = state.delete_version(*checked_fields(request, "uid"), now_ms=now_ms)
        return refit_pb2.DeleteWeightVersionResponse(version=version_message(version))

    @_step
    def UpdateWeightVersionState(
        self, request: Message, state: ControlState, now_ms: int
    ) -> Message:
        (uid,) = checked_fields(request, "uid")
        version_state = enum_member(VersionState, request.state, "state")
        version = state.update_version_state(uid, version_state, now_ms=now_ms)
        return refit_pb2.UpdateWeightVersionStateResponse(version=version_message(version))

    @_step
    def RegisterWorker(self, request: Message, state: ControlState, now_ms: int) -> Message:
        worker_id, model_name = checked_fields(request.worker, "worker_id", "model_name")
        role = enum_member(WorkerRole, request.worker.role, "role")
        worker = state.register_worker(
            worker_id, role, model_name, ttl_s=request.ttl_seconds, now_ms=now_ms
        )
        return refit_pb2.RegisterWorkerResponse(
            worker=refit_pb2.WorkerRegistration(
                worker_id=worker.worker_id,
                role=int(worker.role),
                model_name=worker.model_name,
                expires_at_unix_ms=worker.expires_at_ms,
            )
        )

    @_step
    def CreateWeightVersionShard(
        self, request: Message, state: ControlState, now_ms: int
    ) -> Message:
        shard, version = state.create_shard(shard_of(request.shard), now_ms=now_ms)
        return refit_pb2.CreateWeightVersionShardResponse(
            shard=shard_message(shard), version=version_message(version)
        )

    @_step
    def ListWeightVersionShards(
        self, request: Message, state: ControlState, now_ms: int
    ) -> Message:
        shards = state.list_shards(*checked_fields(request, "version_id"), now_ms=now_ms)
        return refit_pb2.ListWeightVersionShardsResponse(
            shards=[shard_message(shard) for shard in shards]
        )

    @_step
    def DeleteWeightVersionShard(
        self, request: Message, state: ControlState, now_ms: int
    ) -> Message:
        shard = checked_fields(request, "version_id", "source_slot_id", "worker_id")
        deleted = state.delete_shard(*shard, now_ms=now_ms)
        return refit_pb2.DeleteWeightVersionShardResponse(deleted=deleted)

    @_step
    def RegisterVersionLease(self, request: Message, state: ControlState, now_ms: int) -> Message:
        version_id, worker_id = checked_fields(request, "version_id", "worker_id")
        lease = state.register_lease(
            version_id, worker_id, ttl_s=request.ttl_seconds, now_ms=now_ms
        )
        return refit_pb2.RegisterVersionLeaseResponse(
            lease=refit_pb2.VersionLease(
                lease_id=lease.lease_id,
                version_id=lease.version_id,
                worker_id=lease.worker_id,
                expires_at_unix_ms=lease.expires_at_ms,
            )
        )

    @_step
    def DeleteVersionLease(self, request: Message, state: ControlState, now_ms: int) -> Message:
        lease = checked_fields(request, "version_id", "lease_id", "worker_id")
        deleted = state.delete_lease(*lease, now_ms=now_ms)
        return refit_pb2.DeleteVersionLeaseResponse(deleted=deleted)


class P2pServicer(_Servicer, p2p_pb2_grpc.P2pServiceServicer):
    """The part of ``P2pService`` that RL refit uses."""

    @_rpc
    def PublishMetadata(self, request: Message) -> Message:
        (worker_id,) = checked_fields(request, "worker_id")
        model_name = checked_text(request.identity.model_name, "identity.model_name")
        mx_source_id = compute_mx_source_id(request.identity)
        self._plane.sources.publish(
            Source(
                mx_source_id=mx_source_id,
                worker_id=worker_id,
                model_name=model_name,
                worker_rank=request.worker.worker_rank,
                identity=request.identity.SerializeToString(),
                metadata=request.worker.SerializeToString(),
                status=request.worker.status,
                updated_at_ms=self._plane.now_ms(),
            )
        )
        return p2p_pb2.PublishMetadataResponse(
            success=True, mx_source_id=mx_source_id, worker_id=worker_id
        )

    @_rpc
    def ListSources(self, request: Message) -> Message:
        now_ms = self._plane.now_ms()
        wanted = None
        if request.HasField("identity"):
            wanted = compute_mx_source_id(request.identity)
        sources = [
            source
            for source in self._plane.sources.all()
            if (wanted is None or source.mx_source_id == wanted)
            and _matches(request, "status_filter", source.status_at(now_ms))
            and _matches(request, "model_name_filter", source.model_name)
            and _matches(request, "worker_rank_filter", source.worker_rank)
            and (
                not request.HasField("min_updated_at")
                or source.updated_at_ms >= request.min_updated_at
            )
        ]
        if request.HasField("limit"):
            sources = sources[: request.limit]
        return p2p_pb2.ListSourcesResponse(instances=[_instance(source) for source in sources])

    @_rpc
    def GetMetadata(self, request: Message) -> Message:
        source = self._plane.sources.get(request.mx_source_id, request.worker_id)
        if source is None:
            return p2p_pb2.GetMetadataResponse(found=False)
        worker = p2p_pb2.WorkerMetadata.FromString(source.metadata)
        worker.status = source.status_at(self._plane.now_ms())
        worker.updated_at = source.updated_at_ms
        return p2p_pb2.GetMetadataResponse(
            found=True,
            worker=worker,
            mx_source_id=source.mx_source_id,
            worker_id=source.worker_id,
            identity=p2p_pb2.SourceIdentity.FromString(source.identity),
        )

    @_rpc
    def UpdateStatus(self, request: Message) -> Message:
        (worker_id,) = checked_fields(request, "worker_id")
        known = self._plane.sources.update(
            request.mx_source_id,
            worker_id,
            status=request.status,
            source_load=request.source_load if request.HasField("source_load") else None,
            now_ms=self._plane.now_ms(),
        )

        def step(state: ControlState, now_ms: int) -> bool:
            worker = state.ledger.workers.get(worker_id)
            if worker is None or refit_source_id(worker.model_name) != request.mx_source_id:
                return False
            state.mark_stale(worker_id, now_ms=now_ms)
            return True

        if request.status == p2p_pb2.SOURCE_STATUS_STALE:
            known = self._plane.call(step) or known
        return p2p_pb2.UpdateStatusResponse(
            success=known,
            message="" if known else f"worker {worker_id!r} has not published this source",
        )


def _matches(request: Message, field: str, value: object) -> bool:
    return not request.HasField(field) or bool(getattr(request, field) == value)


def _instance(source: Source) -> Message:
    metadata = p2p_pb2.WorkerMetadata.FromString(source.metadata)
    instance = p2p_pb2.SourceInstanceRef(
        mx_source_id=source.mx_source_id,
        worker_id=source.worker_id,
        model_name=source.model_name,
        worker_rank=source.worker_rank,
        accelerator=metadata.accelerator,
        updated_at=source.updated_at_ms,
        topology=metadata.topology,
    )
    if source.source_load is not None:
        instance.source_load = source.source_load
    return instance


def add_servicers(server: Any, plane: ControlPlane, observe: CallObserver) -> None:
    """Add both services to a ``grpc.server`` or a ``grpc.aio.server`` (neither has types)."""
    refit_pb2_grpc.add_RefitServiceServicer_to_server(RefitServicer(plane, observe), server)
    p2p_pb2_grpc.add_P2pServiceServicer_to_server(P2pServicer(plane, observe), server)
