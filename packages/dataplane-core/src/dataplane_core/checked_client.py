"""Bases of clients that check their arguments by `dataplane_core.boundary`.

A subclass implements the methods that end in ``_checked``. Their arguments are plain values that
need no further check, except the values of the fields of a put.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar  # Any: tags hold the caller's own primitives

from dataplane_core.boundary import (
    ClaimCall,
    LeaseCall,
    PutRequest,
    ReadRequest,
    check_claim,
    check_clear,
    check_consumption,
    check_lease_call,
    check_put,
    check_read,
)
from dataplane_core.capabilities import Capabilities
from dataplane_core.client import DataPlaneClient
from dataplane_core.declaration import PartitionDeclaration
from dataplane_core.process import process_name

if TYPE_CHECKING:
    from tensordict import TensorDict

    from dataplane_core.ledger.selection import TagFilter
    from dataplane_core.meta import KVBatchMeta


class CheckedClient(DataPlaneClient):
    """Client with the methods of the contract, each of which checks its arguments."""

    _lease_s: float | None = None
    """Length of the leases of claims, in seconds; None claims without leases."""

    def register_partition(
        self,
        partition_id: str,
        fields: list[str],
        num_samples: int,
        consumer_tasks: list[str],
        grpo_group_size: int | None = None,
        enums: dict[str, list[str]] | None = None,
    ) -> None:
        self._register_checked(
            PartitionDeclaration.checked(
                partition_id, fields, num_samples, consumer_tasks, grpo_group_size, enums
            )
        )

    @abstractmethod
    def _register_checked(self, declaration: PartitionDeclaration) -> None: ...

    def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: list[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,
        timeout_s: float = 60.0,
        *,
        dp_world: int | None = None,
        where: Sequence[TagFilter] = (),
        seed: int | None = None,
        wait_for_leased: bool = True,
        sample_ids: Sequence[str] | None = None,
    ) -> KVBatchMeta:
        call = check_claim(
            *(partition_id, task_name, required_fields, batch_size, dp_rank, blocking, timeout_s),
            dp_world=dp_world,
            where=where,
            seed=seed,
            wait_for_leased=wait_for_leased,
            sample_ids=sample_ids,
            lease_s=self._lease_s,
            owner=process_name(),
        )
        return self._claim_checked(call)

    @abstractmethod
    def _claim_checked(self, call: ClaimCall) -> KVBatchMeta: ...

    def check_consumption_status(self, partition_id: str, task_names: list[str]) -> bool:
        return self._consumed_checked(*check_consumption(partition_id, task_names))

    @abstractmethod
    def _consumed_checked(self, partition_id: str, task_names: list[str]) -> bool: ...

    def put_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        *,
        claim: KVBatchMeta | None = None,
        origin: str | None = None,
        acknowledge: bool = False,
    ) -> KVBatchMeta:
        put = check_put(
            *("put_samples", sample_ids, partition_id, tags),
            claim=claim,
            origin=origin,
            acknowledge=acknowledge,
        )
        return put.result(self._put_checked(put, fields))

    @abstractmethod
    def _put_checked(self, put: PutRequest, fields: TensorDict | None) -> Sequence[str]:
        """Check the values of ``fields``, put the samples, and return the names of the fields."""

    def get_samples(
        self,
        sample_ids: list[str],
        partition_id: str,
        select_fields: list[str],
        *,
        origins: dict[str, int] | None = None,
    ) -> TensorDict:
        read = check_read("get_samples", sample_ids, partition_id, select_fields, origins=origins)
        return self._get_checked(read, origins)

    @abstractmethod
    def _get_checked(self, read: ReadRequest, origins: dict[str, int] | None) -> TensorDict: ...

    def clear_samples(
        self, sample_ids: list[str] | None, partition_id: str, *, force: bool = False
    ) -> None:
        ids, partition_id, force = check_clear("clear_samples", sample_ids, partition_id, force)
        if not self._clear_checked(partition_id, ids, force=force) and ids is None:
            warnings.warn(
                f"clear_samples(None, partition={partition_id!r}): nothing to clear",
                RuntimeWarning,
                stacklevel=2,
            )

    @abstractmethod
    def _clear_checked(self, partition_id: str, ids: list[str] | None, *, force: bool) -> bool:
        """Drop samples, or with None the partition; return whether there was anything to drop."""


class LedgerClient(CheckedClient):
    """Client of a store whose samples and claims are in a `dataplane_core.ledger.Ledger`."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        read_your_writes=True,
        no_torn_rows=True,
        exclusive_claims=True,
        bounded_waits=True,
        leases=True,
        conservation=True,
        safe_clear=True,
        backpressure=True,
        survivable=True,
        group_claims=True,
        origins=True,
        inspection=True,
        withdrawal=True,
        named_claims=True,
        claim_order=True,
    )

    def acknowledge(self, meta: KVBatchMeta) -> None:
        self._update_lease(check_lease_call("acknowledge", meta))

    def release(self, meta: KVBatchMeta) -> None:
        self._update_lease(check_lease_call("release", meta))

    def renew(self, meta: KVBatchMeta) -> None:
        self._update_lease(check_lease_call("renew", meta))

    def _update_lease(self, call: LeaseCall) -> None:
        if call.sample_ids:
            self._update_lease_checked(call)

    @abstractmethod
    def _update_lease_checked(self, call: LeaseCall) -> None: ...

    def withdraw_samples(self, sample_ids: list[str], partition_id: str) -> None:
        ids, partition_id, _ = check_clear("withdraw_samples", sample_ids, partition_id)
        self._clear_checked(partition_id, ids, force=True, withdrawn=True)

    @abstractmethod
    def _clear_checked(
        self, partition_id: str, ids: list[str] | None, *, force: bool, withdrawn: bool = False
    ) -> bool:
        """Drop samples; with ``withdrawn``, count them as never put."""

    def read_origins(
        self, sample_ids: Sequence[str], partition_id: str, fields: Sequence[str]
    ) -> dict[str, int]:
        return self._origins_checked(check_read("read_origins", sample_ids, partition_id, fields))

    @abstractmethod
    def _origins_checked(self, read: ReadRequest) -> dict[str, int]: ...
