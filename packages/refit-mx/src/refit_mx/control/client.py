"""`ControlClient`: the control plane as publishers, receivers and drivers use it.

It speaks to ours and to a real ModelExpress server through ModelExpress's own stubs. Every call has
a deadline, and every failure is one of `refit_mx.errors`.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from refit_mx.control.connection import Connection, PreconditionError
from refit_mx.control.leases import VersionLease
from refit_mx.control.protocol import (
    Message,
    p2p_pb2,
    p2p_pb2_grpc,
    refit_pb2,
    refit_pb2_grpc,
    refit_source_id,
    shard_of,
    shard_to,
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
"""A call that is given less cannot even be answered by a server that is well."""
_NAMING_S = 0.5
"""After a deadline, of each call that asks what is missing."""


@dataclass(frozen=True)
class VersionInfo:
    """A version as the control plane has it.

    Attributes:
        version_id: unique in the control plane.
        model_name: whose weights.
        payload_format: of the shards.
        base_version_id: the version that a delta is of.
        expected_source_slots: which a READY version has a live shard of, each.
        layout_signature: the same for versions of the same slots.
        state: at the time of the call.
        created_at_ms: Unix time.
    """

    version_id: str
    model_name: str
    payload_format: PayloadFormat
    base_version_id: str | None
    expected_source_slots: tuple[str, ...]
    layout_signature: str
    state: VersionState
    created_at_ms: int


class ControlClient:
    """A connection to a control plane; safe to use from many threads.

    Args:
        address: HOST:PORT.
        rpc_timeout_s: of each call.
        tls_ca: PEM file of the certificates to trust; None speaks without TLS.
        tls_name: that the server's certificate has to be of; None for the host of ``address``.
        token: sent as ``authorization: Bearer``; without TLS only to a loopback address.

    Raises:
        RefitConfigError: the address is empty, a token would travel in the clear or cannot be sent,
            or the certificates cannot be read.
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
        """Announce a version; it is STAGING until each slot has a shard of a live worker.

        Args:
            model_name: whose weights.
            expected_source_slots: unique names of what publishers will fill.
            idempotency_key: the same call with the same key gives the same version.
            version_id: to have; None lets the control plane choose.

        Raises:
            ControlError: the key or the id stands for another version, or an argument is wrong.
            ControlUnavailableError: the control plane cannot be reached.
            RefitTimeoutError: it did not answer in time.
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
        """The version as it is now.

        Raises:
            VersionNotFoundError: there is none of this id.
            ControlUnavailableError: the control plane cannot be reached.
            RefitTimeoutError: it did not answer in time.
        """
        request = refit_pb2.GetWeightVersionRequest(uid=version_id)
        return _version(self._call(self._refit.GetWeightVersion, request).version)

    def wait_ready(self, version_id: str, deadline: Deadline) -> VersionInfo:
        """Wait until a version is READY. A control plane that is away is waited for, too.

        Raises:
            VersionNotFoundError: there is none of this id.
            VersionNotReadyError: it is being released.
            RefitTimeoutError: the deadline passed; names the slots that are missing.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            doing = ""
            try:
                version = self._limited(deadline.left_s).get_version(version_id)
                if version.state is VersionState.READY:
                    return version
                if version.state is VersionState.RELEASING:
                    raise VersionNotReadyError(
                        f"version {version_id!r} is RELEASING; expected it to become READY"
                    )
            except (ControlUnavailableError, RefitTimeoutError) as error:
                doing = f"the control plane at {self.address} does not answer: {error}"
            if not deadline.left_s:
                missing = self._limited(_NAMING_S)._what_is_missing
                raise deadline.error(doing or missing(version_id))
            time.sleep(min(pause_s, deadline.left_s))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def delete_version(self, version_id: str) -> VersionInfo:
        """Release a version: no new lease is given, and its shards may go when the last one ends.

        Raises:
            VersionNotFoundError: there is none of this id.
            ControlUnavailableError: the control plane cannot be reached.
            RefitTimeoutError: it did not answer in time.
        """
        request = refit_pb2.DeleteWeightVersionRequest(uid=version_id)
        return _version(self._call(self._refit.DeleteWeightVersion, request).version)

    # Workers

    def register_worker(
        self, worker_id: str, role: WorkerRole, model_name: str, *, ttl_s: float
    ) -> int:
        """A worker is alive for ``ttl_s``, rounded up to whole seconds. See `Heartbeat`.

        Returns:
            Unix time in milliseconds at which it is taken for dead.

        Raises:
            ControlError: the id is another's, or the worker said STALE.
            ControlUnavailableError: the control plane cannot be reached.
            RefitTimeoutError: it did not answer in time.
        """
        request = refit_pb2.RegisterWorkerRequest(
            worker=refit_pb2.WorkerRegistration(
                worker_id=worker_id, role=int(role), model_name=model_name
            ),
            ttl_seconds=math.ceil(ttl_s),
        )
        answer = self._call(self._refit.RegisterWorker, request)
        return int(answer.worker.expires_at_unix_ms)

    def mark_stale(
        self, worker_id: str, role: WorkerRole, model_name: str, *, timeout_s: float | None = None
    ) -> None:
        """Say that a worker stops, so that it is not read from any more.

        `RefitService` has no call for it. Ours takes ``P2pService.UpdateStatus`` for a worker of
        `RefitService` (see `refit_source_id`) and believes it at once and for good. A server that
        knows no such source gets a registration that lapses after one second.

        Raises:
            ControlUnavailableError: the control plane cannot be reached.
            RefitTimeoutError: it did not answer in time.
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
            pass  # it does not know the source, or not the service
        self._call(
            self._refit.RegisterWorker,
            refit_pb2.RegisterWorkerRequest(
                worker=refit_pb2.WorkerRegistration(
                    worker_id=worker_id, role=int(role), model_name=model_name
                ),
                ttl_seconds=_STALE_TTL_S,
            ),
            timeout_s=timeout_s,
        )

    # Shards

    def create_shard(self, shard: Shard) -> VersionInfo:
        """Offer a shard to receivers; its worker must be registered.

        Returns:
            The version, READY if this was its last slot.

        Raises:
            VersionNotFoundError: there is no such version.
            VersionNotReadyError: the version is being released.
            ControlError: the worker is not live or of another model (`PreconditionError`), the
                version does not expect the slot, or the worker published something else there.
            ControlUnavailableError: the control plane cannot be reached.
            RefitTimeoutError: it did not answer in time.
        """
        request = refit_pb2.CreateWeightVersionShardRequest(shard=shard_to(shard))
        try:
            return _version(self._call(self._refit.CreateWeightVersionShard, request).version)
        except PreconditionError as error:
            if self.get_version(shard.version_id).state is VersionState.RELEASING:
                raise VersionNotReadyError(str(error)) from None
            raise

    def list_shards(self, version_id: str) -> list[Shard]:
        """The shards of live workers; ours gives those of the workers heard last first.

        Raises:
            VersionNotFoundError: there is no such version.
            ControlUnavailableError: the control plane cannot be reached.
            RefitTimeoutError: it did not answer in time.
        """
        request = refit_pb2.ListWeightVersionShardsRequest(version_id=version_id)
        answer = self._call(self._refit.ListWeightVersionShards, request)
        try:
            return [shard_of(each) for each in answer.shards]
        except Refusal as wrong:
            raise ControlError(f"control plane at {self.address}: {wrong}") from None

    def delete_shard(self, version_id: str, source_slot_id: str, worker_id: str) -> bool:
        """Take a shard back. Only when this has returned may its memory be used again.

        Returns:
            Whether there was one; False also for a version that is forgotten, since it had none.

        Raises:
            VersionLeasedError: a receiver may still read it.
            VersionNotReadyError: the version is not being released; delete the version first.
            ControlUnavailableError: the control plane cannot be reached.
            RefitTimeoutError: it did not answer in time.
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
        """Hold a READY version; a thread renews the lease until it is closed.

        Args:
            version_id: to hold.
            worker_id: of the receiver; it has one lease on a version at a time.
            ttl_s: for which a renewal lasts, rounded up to whole seconds.

        Raises:
            VersionNotFoundError: there is no such version.
            VersionNotReadyError: it is not READY.
            ControlUnavailableError: the control plane cannot be reached.
            RefitTimeoutError: it did not answer in time.
        """
        return VersionLease(
            version_id,
            worker_id,
            ttl_s=math.ceil(ttl_s),
            renew=lambda: self._renew_lease(version_id, worker_id, math.ceil(ttl_s)),
            give_back=lambda lease_id: self._delete_lease(version_id, lease_id, worker_id),
        )

    def within(self, deadline: Deadline, doing: str = "") -> ControlClient:
        """Return this client, with less time for calls that have to be done before a deadline.

        Closing either closes both.

        Raises:
            RefitTimeoutError: the deadline has passed.
        """
        return self._limited(deadline.check(doing))

    def _limited(self, timeout_s: float) -> ControlClient:
        limited = copy.copy(self)
        limited.rpc_timeout_s = max(_MIN_CALL_S, min(self.rpc_timeout_s, timeout_s))
        return limited

    def another(self) -> ControlClient:
        """A client of the same control plane on a connection of its own, which shares no lock."""
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

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _renew_lease(self, version_id: str, worker_id: str, ttl_s: int) -> str:
        request = refit_pb2.RegisterVersionLeaseRequest(
            version_id=version_id, worker_id=worker_id, ttl_seconds=ttl_s
        )
        try:
            answer = self._call(self._refit.RegisterVersionLease, request)
        except PreconditionError as error:
            raise VersionNotReadyError(str(error)) from None
        return str(answer.lease.lease_id)

    def _delete_lease(self, version_id: str, lease_id: str, worker_id: str) -> None:
        self._call(
            self._refit.DeleteVersionLease,
            refit_pb2.DeleteVersionLeaseRequest(
                version_id=version_id, lease_id=lease_id, worker_id=worker_id
            ),
        )

    def _what_is_missing(self, version_id: str) -> str:
        try:
            version = self.get_version(version_id)
            covered = {shard.source_slot_id for shard in self.list_shards(version_id)}
        except (ControlError, RefitTimeoutError) as error:
            return f"the control plane at {self.address} does not answer: {error}"
        missing = [slot for slot in version.expected_source_slots if slot not in covered]
        shown = ", ".join(missing[:5]) + (" and more" if len(missing) > 5 else "")
        return (
            f"version {version_id!r} is {version.state.name}, {len(missing)} of "
            f"{len(version.expected_source_slots)} slots have no live shard: {shown}"
        )

    def _call(
        self,
        method: Callable[..., Message],
        request: Message,
        *,
        timeout_s: float | None = None,
    ) -> Message:
        return self._connection.call(method, request, timeout_s=timeout_s or self.rpc_timeout_s)


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
