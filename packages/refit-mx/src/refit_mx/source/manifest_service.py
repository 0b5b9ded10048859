"""`ManifestService`: serves the manifests of one publisher, as ModelExpress's workers do.

The control plane stores only a manifest's SHA-256 and endpoint. The service is modelexpress_rl's
own RefitWorkerService, so ModelExpress's clients can use it too.
"""

from __future__ import annotations

import threading
from concurrent import futures

import grpc

from refit_mx.control.protocol import Message, refit_pb2, refit_pb2_grpc
from refit_mx.errors import RefitConfigError
from refit_mx.listening.grpc_server import RequestGuard, server_options
from refit_mx.listening.hosts import host_and_port, resolve_advertised_host
from refit_mx.manifest.format import MANIFEST_FRAME_BYTES, MAX_MANIFEST_BYTES, manifest_digest

_WORKERS = 4
_CONNECTIONS_SHARE = 0.125
"""Fraction of this process's file descriptors for its connections, which end after each answer."""


class ManifestService(refit_pb2_grpc.RefitWorkerServiceServicer):
    """gRPC server for manifests, in threads of this process.

    Arguments are those of `refit_mx.control.embedded.EmbeddedControlServer`.

    Raises:
        RefitConfigError: the server cannot listen on the address, or clients cannot connect to the
            advertised host.
    """

    def __init__(
        self, *, host: str = "127.0.0.1", advertised_host: str | None = None, port: int = 0
    ) -> None:
        advertised = resolve_advertised_host(host, advertised_host)
        self._manifests: dict[tuple[str, str], tuple[bytes, str]] = {}
        self._lock = threading.Lock()
        self._guard = RequestGuard("manifest service", _WORKERS)
        self._server = grpc.server(
            futures.ThreadPoolExecutor(_WORKERS, thread_name_prefix="refit-manifests"),
            options=[
                *server_options(_CONNECTIONS_SHARE),
                ("grpc.max_send_message_length", MAX_MANIFEST_BYTES + MANIFEST_FRAME_BYTES),
                ("grpc.max_receive_message_length", MANIFEST_FRAME_BYTES),
            ],
            interceptors=[self._guard],
        )
        refit_pb2_grpc.add_RefitWorkerServiceServicer_to_server(self, self._server)
        bind_address = host_and_port(host, port)
        try:
            bound = self._server.add_insecure_port(bind_address)
        except RuntimeError as error:
            self._guard.close()
            raise RefitConfigError(
                f"manifests cannot be served on {bind_address}: {error}"
            ) from None
        self._server.start()
        self.endpoint = host_and_port(advertised, bound)

    def put(self, version_id: str, source_slot_id: str, data: bytes) -> str:
        """Serve a manifest from now on; return its digest, for the control plane.

        Raises:
            RefitConfigError: it is too large.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise RefitConfigError(
                f"manifest of {version_id}: {len(data)} bytes; expected at most "
                f"{MAX_MANIFEST_BYTES}"
            )
        digest = manifest_digest(data)
        with self._lock:
            self._manifests[version_id, source_slot_id] = (data, digest)
        return digest

    def drop(self, version_id: str, source_slot_id: str) -> None:
        """Stop serving a manifest; do nothing if it is not served."""
        with self._lock:
            self._manifests.pop((version_id, source_slot_id), None)

    def close(self) -> None:
        """Stop serving. May be called again."""
        self._server.stop(grace=0).wait(timeout=5)
        self._guard.close()

    def GetWeightVersionShardManifest(  # noqa: N802  # the name of the RPC
        self, request: Message, context: grpc.ServicerContext
    ) -> Message:
        """Answer the RPC of this name."""
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
