"""`ControlClient`: the control plane's client for publishers, receivers and drivers.

It works with this package's control plane and with a ModelExpress server, through ModelExpress's
own stubs. Every call has a deadline, and every failure is an error of `refit_mx.errors`.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

from refit_mx.closing import Closeable
from refit_mx.control.connection import Connection, PreconditionError
from refit_mx.control.leases import VersionLease
from refit_mx.control.ledger import list_names
from refit_mx.control.protocol import (
    Message,
    p2p_pb2,
    p2p_pb2_grpc,
    refit_pb2,
    refit_pb2_grpc,
    refit_source_id,
    shard_message,
    shard_of,
)
from refit_mx.control.records import PayloadFormat, Refusal, Shard, VersionState, WorkerRole
from refit_mx.deadline import Deadline
from refit_mx.errors import (
    ControlError,
    ControlUnavailableError,
    RefitConfigError,
    RefitTimeoutError,
    VersionLeasedError,
    VersionNotFoundError,
    VersionNotReadyError,
)

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.25
_STALE_TTL_S = 1
_MIN_CALL_S = 0.05
"""Minimum time limit of a call, so that a healthy server can answer just before a deadline."""
_RENEW_S = 2.0
"""Time limit of one lease renewal, short so that a failed one is soon repeated."""
_RELEASE_S = 1.0
"""Time limit of a lease's release; if no answer comes, the lease expires."""
_LIST_MISSING_S = 0.5
"""Time limit of each call that lists the missing slots for the error of a deadline."""


@dataclass(frozen=True)
class VersionInfo:
    """A version in the control plane.

    Attributes:
        version_id: id, unique in the control plane.
        model_name: model of the weights.
        payload_format: format of the shards.
        base_version_id: the version that a delta is based on.
        expected_source_slots: slots that each have a live shard once the version is READY.
        layout_signature: equal for versions with the same slots.
        state: state at the time of the call.
        created_at_ms: Unix time of creation.
    """

    version_id: str
    model_name: str
    payload_format: PayloadFormat
    base_version_id: str | None
    expected_source_slots: tuple[str, ...]
    layout_signature: str
    state: VersionState
    created_at_ms: int


class ControlClient(Closeable):
    """A connection to a control plane; safe to use from many threads.

    Every call raises `ControlUnavailableError` if the control plane cannot be reached, and
    `RefitTimeoutError` if it does not answer in time.

    Args:
        address: HOST:PORT.
        rpc_timeout_s: time limit of each call.
        tls_ca: PEM file of the certificates to trust; None connects without TLS.
        tls_name: expected name in the server's certificate; None for the host of ``address``.
        token: sent as ``authorization: Bearer``; without TLS only to a loopback address.

    Raises:
        RefitConfigError: the address is empty, a token would be sent unencrypted or has characters
            that cannot be sent, or the certificates cannot be read.
    """

    def __init__(
        self,
        address: str,
        *,
        rpc_timeout_s: float = 10.0,
        tls_ca: Path | str | None = None,
        tls_name: str | None = None,
        token: str | None = None,
    ) -> None:
        if not rpc_timeout_s > 0:
            raise RefitConfigError(f"rpc_timeout_s {rpc_timeout_s!r}; expected more than 0")
        self.address = address
        self.rpc_timeout_s = rpc_timeout_s
        self._secrets = (tls_ca, tls_name, token)
        self._connection = Connection(address, tls_ca=tls_ca, tls_name=tls_name, token=token)
        self._refit = refit_pb2_grpc.RefitServiceStub(self._connection.channel)
        self._p2p = p2p_pb2_grpc.P2pServiceStub(self._connection.channel)

    # Versions

    def create_version(
        self,
        model_name: str,
        expected_source_slots: Sequence[str],
        *,
        idempotency_key: str,
        version_id: str | None = None,
    ) -> VersionInfo:
        """Create a version; it is STAGING until each slot has a shard of a live worker.

        Args:
            model_name: model of the weights.
            expected_source_slots: unique names of the slots that publishers will fill.
            idempotency_key: a repeated call with the same key returns the same version.
            version_id: id of the version; None lets the control plane choose.

        Raises:
            ControlError: the key or the id belongs to another version, or an argument is wrong.
        """
        request = refit_pb2.CreateWeightVersionRequest(
            model_name=model_name,
            idempotency_key=idempotency_key,
            payload_format=refit_pb2.WEIGHT_PAYLOAD_FORMAT_FULL_TENSOR,
            expected_source_slots=list(expected_source_slots),
            state=refit_pb2.WEIGHT_VERSION_STATE_STAGING,
        )
        if version_id is not None:
            request.uid = version_id
        return _version(self._call(self._refit.CreateWeightVersion, request).version)

    def get_version(self, version_id: str) -> VersionInfo:
        """Return the current state of a version.

        Raises:
            VersionNotFoundError: there is no such version.
        """
        request = refit_pb2.GetWeightVersionRequest(uid=version_id)
        return _version(self._call(self._refit.GetWeightVersion, request).version)

    def wait_ready(self, version_id: str, deadline: Deadline) -> VersionInfo:
        """Wait until a version is READY, also while the control plane is unreachable.

        Raises:
            VersionNotFoundError: there is no such version.
            VersionNotReadyError: it is being released.
            RefitTimeoutError: the deadline passed; the message names the missing slots.
        """
        pause_s = _FIRST_PAUSE_S
        no_answer = ""
        answered = False
        while True:
            try:
                version = self._limited(deadline.left_s).get_version(version_id)
                answered = True
                if version.state is VersionState.READY:
                    return version
                if version.state is VersionState.RELEASING:
                    raise VersionNotReadyError(
                        f"version {version_id!r} is RELEASING; expected it to become READY"
                    )
            except (ControlUnavailableError, RefitTimeoutError) as error:
                no_answer = f"the control plane at {self.address} does not answer: {error}"
            if not deadline.left_s:
                # The last call may have failed only because little time was left: after an earlier
                # answer, report the missing slots.
                describe = self._limited(_LIST_MISSING_S)._describe_missing_slots
                raise deadline.error(describe(version_id) if answered else no_answer)
            time.sleep(min(pause_s, deadline.left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def delete_version(self, version_id: str) -> VersionInfo:
        """Release a version: it gets no new leases.

        Once no lease remains, its shards may be deleted.

        Raises:
            VersionNotFoundError: there is no such version.
        """
        request = refit_pb2.DeleteWeightVersionRequest(uid=version_id)
        return _version(self._call(self._refit.DeleteWeightVersion, request).version)

    # Workers

    def register_worker(
        self, worker_id: str, role: WorkerRole, model_name: str, *, ttl_s: float
    ) -> int:
        """Register a worker as live for ``ttl_s``, rounded up to full seconds. See `Heartbeat`.

        Return the Unix time in milliseconds at which the registration expires.

        Raises:
            ControlError: the id belongs to another worker, or the worker is STALE.
        """
        request = _registration(worker_id, role, model_name, math.ceil(ttl_s))
        answer = self._call(self._refit.RegisterWorker, request)
        return int(answer.worker.expires_at_unix_ms)

    def mark_stale(
        self, worker_id: str, role: WorkerRole, model_name: str, *, timeout_s: float | None = None
    ) -> None:
        """Mark a worker STALE, so that no receiver reads from it any more.

        `RefitService` has no such call. This package's control plane accepts
        ``P2pService.UpdateStatus`` for a worker of `RefitService` (see `refit_source_id`). There
        the worker is STALE at once, and this is final. On a server that does not know the source,
        the worker is registered again with a time to live of one second.
        """
        status = p2p_pb2.UpdateStatusRequest(
            mx_source_id=refit_source_id(model_name),
            worker_id=worker_id,
            status=p2p_pb2.SOURCE_STATUS_STALE,
        )
        try:
            if self._call(self._p2p.UpdateStatus, status, timeout_s=timeout_s).success:
                return
        except (ControlUnavailableError, RefitTimeoutError):
            raise
        except ControlError:
            pass  # the server does not know the source, or lacks the service
        request = _registration(worker_id, role, model_name, _STALE_TTL_S)
        self._call(self._refit.RegisterWorker, request, timeout_s=timeout_s)

    # Shards

    def create_shard(self, shard: Shard) -> VersionInfo:
        """Publish a shard to receivers; its worker must be registered.

        Returns:
            The version, READY if this filled its last slot.

        Raises:
            VersionNotFoundError: there is no such version.
            VersionNotReadyError: the version is being released.
            ControlError: the worker is not live or belongs to another model (`PreconditionError`),
                the version does not expect the slot, or the worker published a different shard
                there.
        """
        request = refit_pb2.CreateWeightVersionShardRequest(shard=shard_message(shard))
        try:
            return _version(self._call(self._refit.CreateWeightVersionShard, request).version)
        except PreconditionError as error:
            if self.get_version(shard.version_id).state is VersionState.RELEASING:
                raise VersionNotReadyError(str(error)) from None
            raise

    def list_shards(self, version_id: str) -> list[Shard]:
        """Return the shards of live workers.

        This package's server lists the most recently seen workers first.

        Raises:
            VersionNotFoundError: there is no such version.
        """
        request = refit_pb2.ListWeightVersionShardsRequest(version_id=version_id)
        answer = self._call(self._refit.ListWeightVersionShards, request)
        try:
            return [shard_of(each) for each in answer.shards]
        except Refusal as wrong:
            raise ControlError(f"control plane at {self.address}: {wrong}") from None

    def delete_shard(self, version_id: str, source_slot_id: str, worker_id: str) -> bool:
        """Withdraw a shard. Its memory may be reused only after this has returned.

        Returns:
            Whether the shard existed; False also for a version that was forgotten.

        Raises:
            VersionLeasedError: a receiver may still read it.
            VersionNotReadyError: the version is not being released; delete the version first.
        """
        request = refit_pb2.DeleteWeightVersionShardRequest(
            version_id=version_id, source_slot_id=source_slot_id, worker_id=worker_id
        )
        try:
            return bool(self._call(self._refit.DeleteWeightVersionShard, request).deleted)
        except VersionNotFoundError:
            return False
        except PreconditionError as error:
            if self.get_version(version_id).state is VersionState.RELEASING:
                raise VersionLeasedError(str(error)) from None
            raise VersionNotReadyError(str(error)) from None

    # Leases

    def lease(self, version_id: str, worker_id: str, *, ttl_s: float = 30.0) -> VersionLease:
        """Lease a READY version; a thread renews the lease until it is closed.

        Renewals and the release have separate time limits, not ``rpc_timeout_s``.

        Args:
            version_id: version to lease.
            worker_id: the receiver's worker; it has one lease on a version at a time.
            ttl_s: time to live of each renewal, rounded up to full seconds.

        Raises:
            VersionNotFoundError: there is no such version.
            VersionNotReadyError: the version is not READY.
        """
        ttl_s = math.ceil(ttl_s)
        timeouts_s = chain([self.rpc_timeout_s], repeat(min(ttl_s / 3, _RENEW_S)))
        return VersionLease(
            version_id,
            worker_id,
            ttl_s=ttl_s,
            renew=lambda: self._renew_lease(version_id, worker_id, ttl_s, next(timeouts_s)),
            release=lambda lease_id: self._delete_lease(version_id, lease_id, worker_id),
        )

    def within(self, deadline: Deadline, doing: str = "") -> ControlClient:
        """Return a copy of this client with calls limited to the time before a deadline.

        They share the connection: closing either closes both.

        Raises:
            RefitTimeoutError: the deadline has passed.
        """
        return self._limited(deadline.check(doing))

    def _limited(self, timeout_s: float) -> ControlClient:
        limited = copy.copy(self)
        limited.rpc_timeout_s = max(_MIN_CALL_S, min(self.rpc_timeout_s, timeout_s))
        return limited

    def clone(self) -> ControlClient:
        """Return a client of the same control plane with a separate connection and locks."""
        tls_ca, tls_name, token = self._secrets
        return ControlClient(
            self.address,
            rpc_timeout_s=self.rpc_timeout_s,
            tls_ca=tls_ca,
            tls_name=tls_name,
            token=token,
        )

    def close(self) -> None:
        """Disconnect. May be called again."""
        self._connection.close()

    def _renew_lease(self, version_id: str, worker_id: str, ttl_s: int, timeout_s: float) -> str:
        request = refit_pb2.RegisterVersionLeaseRequest(
            version_id=version_id, worker_id=worker_id, ttl_seconds=ttl_s
        )
        try:
            answer = self._call(self._refit.RegisterVersionLease, request, timeout_s=timeout_s)
        except PreconditionError as error:
            raise VersionNotReadyError(str(error)) from None
        return str(answer.lease.lease_id)

    def _delete_lease(self, version_id: str, lease_id: str, worker_id: str) -> None:
        self._call(
            self._refit.DeleteVersionLease,
            refit_pb2.DeleteVersionLeaseRequest(
                version_id=version_id, lease_id=lease_id, worker_id=worker_id
            ),
            timeout_s=_RELEASE_S,
        )

    def _describe_missing_slots(self, version_id: str) -> str:
        try:
            version = self.get_version(version_id)
            covered = {shard.source_slot_id for shard in self.list_shards(version_id)}
        except (ControlError, RefitTimeoutError) as error:
            return f"the control plane at {self.address} does not answer: {error}"
        missing = [slot for slot in version.expected_source_slots if slot not in covered]
        return (
            f"version {version_id!r} is {version.state.name}, {len(missing)} of "
            f"{len(version.expected_source_slots)} slots have no live shard: {list_names(missing)}"
        )

    def _call(
        self, method: Callable[..., Message], request: Message, *, timeout_s: float | None = None
    ) -> Message:
        return self._connection.call(method, request, timeout_s=timeout_s or self.rpc_timeout_s)


def _registration(worker_id: str, role: WorkerRole, model_name: str, ttl_s: int) -> Message:
    return refit_pb2.RegisterWorkerRequest(
        worker=refit_pb2.WorkerRegistration(
            worker_id=worker_id, role=int(role), model_name=model_name
        ),
        ttl_seconds=ttl_s,
    )


def _version(message: Message) -> VersionInfo:
    return VersionInfo(
        version_id=message.uid,
        model_name=message.model_name,
        payload_format=PayloadFormat(message.payload_format),
        base_version_id=message.base_version_id if message.HasField("base_version_id") else None,
        expected_source_slots=tuple(message.expected_source_slots),
        layout_signature=message.layout_signature,
        state=VersionState(message.state),
        created_at_ms=message.created_at_unix_ms,
    )
