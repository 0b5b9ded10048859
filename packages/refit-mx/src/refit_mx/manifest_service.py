"""`ManifestService`: hands out the manifests of one publisher, as ModelExpress's workers do.

The control plane keeps only a manifest's SHA-256 and where it is served. It is served by
modelexpress_rl's own RefitWorkerService, so that ModelExpress's clients find it too.
"""

from __future__ import annotations

import hashlib
import threading
import time
from concurrent import futures
from contextlib import closing

import grpc

from refit_mx.control.messages import refit_pb2, refit_pb2_grpc
from refit_mx.control.protocol import Message
from refit_mx.deadline import Deadline
from refit_mx.errors import ProtocolError, RefitConfigError, SourceLostError
from refit_mx.grpc_listening import RequestGuard, server_options
from refit_mx.hosts import host_and_port, told_host
from refit_mx.known_sources import KnownSources
from refit_mx.structures import Structures

MOST_MANIFEST_BYTES = 256 << 20
"""Of one manifest: some four million shards."""
_FRAME_BYTES = 1 << 16
"""What an answer has beside the manifest, generously."""
_WORKERS = 4
_SHARE = 0.125
"""Of this process's file descriptors that connections may take; they end with the answer."""
_FULL_PAUSE_S = 0.1
"""Before a publisher that has as many connections as it takes is asked again."""


def manifest_digest(data: bytes) -> str:
    """As the control plane names it: SHA-256, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


class ManifestService(refit_pb2_grpc.RefitWorkerServiceServicer):
    """A gRPC server for manifests, in threads of this process.

    Args:
        host: to listen on.
        advertised_host: that others are told; None for ``host``.
        port: 0 for any that is free.
        most_bytes: of a manifest; a larger one is refused when it is put.

    Raises:
        RefitConfigError: the address cannot be listened on, or nobody could connect to what is
            told.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        advertised_host: str | None = None,
        port: int = 0,
        most_bytes: int = MOST_MANIFEST_BYTES,
    ) -> None:
        told = told_host(host, advertised_host)
        self._most_bytes = most_bytes
        self._manifests: dict[tuple[str, str], tuple[bytes, str]] = {}
        self._lock = threading.Lock()
        self._guard = RequestGuard("manifest service", _WORKERS)
        self._server = grpc.server(
            futures.ThreadPoolExecutor(_WORKERS, thread_name_prefix="refit-manifests"),
            options=[
                *server_options(_SHARE),
                ("grpc.max_send_message_length", most_bytes + _FRAME_BYTES),
                ("grpc.max_receive_message_length", _FRAME_BYTES),
            ],
            interceptors=[self._guard],
        )
        refit_pb2_grpc.add_RefitWorkerServiceServicer_to_server(self, self._server)
        where = host_and_port(host, port)
        try:
            bound = self._server.add_insecure_port(where)
        except RuntimeError as error:
            raise RefitConfigError(f"manifests cannot be served on {where}: {error}") from None
        self._server.start()
        self.endpoint = host_and_port(told, bound)

    def put(self, version_id: str, source_slot_id: str, data: bytes) -> str:
        """Serve a manifest.

        Returns:
            Its digest, as the control plane is to be told.

        Raises:
            RefitConfigError: it is too large, or another is served for this version and slot.
        """
        if len(data) > self._most_bytes:
            raise RefitConfigError(
                f"manifest of {version_id}: {len(data)} bytes; expected at most {self._most_bytes}"
            )
        digest = manifest_digest(data)
        with self._lock:
            known = self._manifests.setdefault((version_id, source_slot_id), (data, digest))
        if known[1] != digest:
            raise RefitConfigError(
                f"another manifest is served for version {version_id}, slot {source_slot_id}; "
                "drop it first"
            )
        return digest

    def drop(self, version_id: str, source_slot_id: str) -> None:
        """Serve it no more. Nothing happens if it is not served."""
        with self._lock:
            self._manifests.pop((version_id, source_slot_id), None)

    def close(self) -> None:
        """Stop serving. May be called again."""
        self._server.stop(grace=0).wait(timeout=5)
        self._guard.close()

    def GetWeightVersionShardManifest(  # noqa: N802  # the name of the RPC
        self,
        request: Message,
        context: grpc.ServicerContext,
    ) -> Message:
        """The RPC."""
        with self._lock:
            known = self._manifests.get((request.version_id, request.source_slot_id))
        if known is None:
            context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"no manifest of version {request.version_id!r}, slot {request.source_slot_id!r} "
                "is served here",
            )
            raise AssertionError("abort raises")
        data, digest = known
        return refit_pb2.GetWeightVersionShardManifestResponse(
            manifest=data, manifest_digest=digest
        )


class ManifestClient:
    """Asks publishers for manifests; one that answered before is asked by a faster way.

    Safe to use from several threads.

    Args:
        most_bytes: of a manifest.
    """

    def __init__(self, most_bytes: int = MOST_MANIFEST_BYTES) -> None:
        self._most_bytes = most_bytes
        self.structures = Structures(most_bytes)
        """Of manifests that came in brief."""
        self.known = KnownSources(most_bytes)
        """Publishers whose manifests were good."""

    def fetch(
        self,
        endpoint: str,
        version_id: str,
        source_slot_id: str,
        *,
        digest: str,
        deadline: Deadline,
        most_s: float,
    ) -> bytes:
        """A publisher's manifest.

        Args:
            endpoint: host:port of its `ManifestService`.
            version_id: of the control plane.
            source_slot_id: of the control plane.
            digest: that the control plane names.
            deadline: for the whole operation.
            most_s: for this call, so that one publisher that has stopped costs no more.

        Raises:
            SourceLostError: no answer in time, or the publisher does not have it any more.
            ProtocolError: it is too large, or is not what the control plane names.
        """
        allowed_s = min(most_s, deadline.check(f"asking {endpoint} for a manifest"))
        until = Deadline(allowed_s, "a manifest")
        # Half of the time, since one that is known may be busy, or another by now.
        half = Deadline(allowed_s / 2, "a manifest of a known source")
        data = self.known.manifest(endpoint, version_id, half)
        if data is not None and manifest_digest(data) == digest:
            return data
        while True:
            try:
                answer = self._ask(endpoint, version_id, source_slot_id, until)
                break
            except grpc.RpcError as error:
                code, details = error.code(), str(error.details())
                if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise ProtocolError(
                        f"{endpoint}: its manifest is too large: {details}"
                    ) from None
                if not _is_full(code, details) or until.left_s <= _FULL_PAUSE_S:
                    raise SourceLostError(f"{endpoint}: {code.name}: {details}") from None
            time.sleep(_FULL_PAUSE_S)
        data = answer.manifest
        found = manifest_digest(data)
        if found != digest:
            raise ProtocolError(
                f"{endpoint}: its manifest of {version_id} has the digest {found[:16]}...; "
                f"the control plane names {digest[:16]}..."
            )
        return data

    def _ask(
        self, endpoint: str, version_id: str, source_slot_id: str, deadline: Deadline
    ) -> Message:
        with closing(self._connected(endpoint)) as channel:
            return refit_pb2_grpc.RefitWorkerServiceStub(channel).GetWeightVersionShardManifest(
                refit_pb2.GetWeightVersionShardManifestRequest(
                    version_id=version_id, source_slot_id=source_slot_id
                ),
                timeout=deadline.left_s,
            )

    def close(self) -> None:
        """Disconnect. May be called again, and the client be used again."""
        self.known.close()

    def _connected(self, endpoint: str) -> grpc.Channel:
        return grpc.insecure_channel(
            endpoint,
            options=[
                ("grpc.max_receive_message_length", self._most_bytes + _FRAME_BYTES),
                ("grpc.max_send_message_length", _FRAME_BYTES),
                # Else a publisher that was restarted on its port would wait for gRPC's back-off.
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.enable_http_proxy", 0),
            ],
        )


def _is_full(code: grpc.StatusCode, details: str) -> bool:
    """Whether a server accepted the connection and closed it, as one does that has too many."""
    return code is grpc.StatusCode.UNAVAILABLE and "Socket closed" in details
