"""`request_manifest`: request one manifest from a publisher's `ManifestService`, over gRPC."""

from __future__ import annotations

import time
from contextlib import closing

import grpc

from refit_mx.control.protocol import Message, refit_pb2, refit_pb2_grpc
from refit_mx.deadline import Deadline
from refit_mx.errors import ProtocolError, SourceLostError
from refit_mx.manifest.format import MANIFEST_FRAME_BYTES, MAX_MANIFEST_BYTES, manifest_digest

_FULL_PAUSE_S = 0.1
"""Pause before another call to a publisher that accepts no further connection."""


def request_manifest(
    endpoint: str, version_id: str, source_slot_id: str, *, digest: str, deadline: Deadline
) -> bytes:
    """Return a publisher's encoded manifest.

    Raises:
        SourceLostError: no answer came in time, or the publisher no longer holds the manifest.
        ProtocolError: the manifest is too large, or its digest is not that in the control plane.
    """
    while True:
        try:
            data = _call(endpoint, version_id, source_slot_id, deadline).manifest
            break
        except grpc.RpcError as error:
            code, details = error.code(), str(error.details())
            if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise ProtocolError(f"{endpoint}: its manifest is too large: {details}") from None
            # A server with too many connections accepts and closes further ones.
            full = code is grpc.StatusCode.UNAVAILABLE and "Socket closed" in details
            if not full or deadline.left_s <= _FULL_PAUSE_S:
                raise SourceLostError(f"{endpoint}: {code.name}: {details}") from None
        time.sleep(_FULL_PAUSE_S)
    actual = manifest_digest(data)
    if actual != digest:
        raise ProtocolError(
            f"{endpoint}: its manifest of {version_id} has the digest {actual[:16]}...; "
            f"the control plane has {digest[:16]}..."
        )
    return data


def _call(endpoint: str, version_id: str, source_slot_id: str, deadline: Deadline) -> Message:
    channel = grpc.insecure_channel(
        endpoint,
        options=[
            ("grpc.max_receive_message_length", MAX_MANIFEST_BYTES + MANIFEST_FRAME_BYTES),
            ("grpc.max_send_message_length", MANIFEST_FRAME_BYTES),
            # Otherwise a call to a publisher restarted on the same port waits for gRPC's back-off.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ],
    )
    with closing(channel):
        return refit_pb2_grpc.RefitWorkerServiceStub(channel).GetWeightVersionShardManifest(
            refit_pb2.GetWeightVersionShardManifestRequest(
                version_id=version_id, source_slot_id=source_slot_id
            ),
            timeout=deadline.left_s,
        )
