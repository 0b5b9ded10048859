"""`AsyncInspector`: a client's inspector, awaited."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dataplane_core.client import DataPlaneClient, TaskCounts
    from dataplane_core.ledger.inspect import (
        ClaimSummary,
        PartitionSummary,
        SampleState,
        ShareSummary,
        StatePage,
        StorageSummary,
    )

_T = TypeVar("_T")


class AsyncInspector(ABC):
    """The methods of `DataPlaneInspector` and `DataPlaneActions` as coroutines."""

    _inner: DataPlaneClient

    @abstractmethod
    async def _call(self, call: Callable[[], _T]) -> _T:
        """Run in a thread."""

    async def clear_samples(
        self, sample_ids: list[str] | None, partition_id: str, *, force: bool = False
    ) -> None:
        """As `DataPlaneClient.clear_samples`."""
        await self._call(lambda: self._inner.clear_samples(sample_ids, partition_id, force=force))

    async def withdraw_samples(self, sample_ids: list[str], partition_id: str) -> None:
        """As `DataPlaneClient.withdraw_samples`."""
        await self._call(lambda: self._inner.withdraw_samples(sample_ids, partition_id))

    async def count_samples(
        self, partition_id: str, task_name: str, required_fields: list[str]
    ) -> TaskCounts:
        """As `DataPlaneInspector.count_samples`."""
        return await self._call(
            lambda: self._inner.count_samples(partition_id, task_name, required_fields)
        )

    async def read_origins(
        self, sample_ids: Sequence[str], partition_id: str, fields: Sequence[str]
    ) -> dict[str, int]:
        """As `DataPlaneClient.read_origins`."""
        return await self._call(lambda: self._inner.read_origins(sample_ids, partition_id, fields))

    async def list_partitions(self) -> list[PartitionSummary]:
        """As `DataPlaneInspector.list_partitions`."""
        return await self._call(self._inner.list_partitions)

    async def list_storage(self) -> list[StorageSummary]:
        """As `DataPlaneInspector.list_storage`."""
        return await self._call(self._inner.list_storage)

    async def read_totals(self) -> dict[str, int]:
        """As `DataPlaneInspector.read_totals`."""
        return await self._call(self._inner.read_totals)

    async def list_samples(
        self, partition_id: str, *, start: int = 0, limit: int = 100
    ) -> list[SampleState]:
        """As `DataPlaneInspector.list_samples`."""
        return await self._call(
            lambda: self._inner.list_samples(partition_id, start=start, limit=limit)
        )

    async def read_sample(self, partition_id: str, sample_id: str) -> SampleState | None:
        """As `DataPlaneInspector.read_sample`."""
        return await self._call(lambda: self._inner.read_sample(partition_id, sample_id))

    async def find_samples(
        self, partition_id: str, *, tag: str, value: object, limit: int = 100
    ) -> list[SampleState]:
        """As `DataPlaneInspector.find_samples`."""
        return await self._call(
            lambda: self._inner.find_samples(partition_id, tag=tag, value=value, limit=limit)
        )

    async def list_claims(self, partition_id: str) -> list[ClaimSummary]:
        """As `DataPlaneInspector.list_claims`."""
        return await self._call(lambda: self._inner.list_claims(partition_id))

    async def list_shares(self, partition_id: str) -> list[ShareSummary]:
        """As `DataPlaneInspector.list_shares`."""
        return await self._call(lambda: self._inner.list_shares(partition_id))

    async def scan_states(
        self, partition_id: str, *, start: int = 0, limit: int = 10_000
    ) -> StatePage:
        """As `DataPlaneInspector.scan_states`."""
        return await self._call(
            lambda: self._inner.scan_states(partition_id, start=start, limit=limit)
        )

    async def reset_consumption(
        self, partition_id: str, task_name: str, sample_ids: list[str]
    ) -> int:
        """As `DataPlaneActions.reset_consumption`."""
        return await self._call(
            lambda: self._inner.reset_consumption(partition_id, task_name, sample_ids)
        )

    async def end_claim(self, partition_id: str, claim: str, *, expired_only: bool = True) -> int:
        """As `DataPlaneActions.end_claim`."""
        return await self._call(
            lambda: self._inner.end_claim(partition_id, claim, expired_only=expired_only)
        )
