"""`LeaseWatch`: distinguishes the leases of live consumers from those of dead ones."""

from __future__ import annotations

import time
from collections import Counter

from dataplane_core.client import DataPlaneClient
from dataplane_core.declaration import named_holders
from dataplane_core.errors import ClaimTimeoutError
from dataplane_core.inspector import StoreInspector
from dataplane_core.process import process_name
from dataplane_core.streaming.dataset import StreamingDataset

_ROUNDING_S = 1e-6


class LeaseWatch:
    """Observer of the claims of a task's consumers and of the assignments of its ranks.

    Args:
        inspector: the inspector of the store.
        partition_id: the partition.
        task_name: the consumer task.
    """

    def __init__(self, inspector: StoreInspector, partition_id: str, task_name: str) -> None:
        self._inspector = inspector
        self._partition_id = partition_id
        self._task_name = task_name
        self._since: float | None = None
        self._first_length_s: dict[str, float] = {}
        self._live: set[str] = set()

    def all_live(self) -> bool:
        """Return whether each holder and assigned rank was active since the first call.

        A claim is live if it was renewed since this watch first saw it. A rank's claim is also live
        if it was made after the first call: a rank that works through its assignments may not have
        renewed its newest claim yet. An assignment is live if its rank claimed or renewed
        after the first call. False if there are neither claims nor assignments. Claims and
        assignments beyond the inspector's limit for one list are not watched.
        """
        now = time.monotonic()  # before the query, so that `now - age` is never too late
        claims = self._inspector.list_claims(self._partition_id)
        assignments = self._inspector.list_assignments(self._partition_id)
        since = self._since
        if since is None:
            since = self._since = time.monotonic()
        names = [claim.claim for claim in claims if claim.task == self._task_name]
        for claim in claims:
            # Seconds from the claim to its expiry, which only a renewal moves. Both terms were
            # read at one moment of the store's clock.
            length_s = claim.age_s + claim.expires_in_s
            first_s = self._first_length_s.setdefault(claim.claim, length_s)
            renewed = claim.expires_in_s > 0 and length_s > first_s + _ROUNDING_S
            if renewed or (claim.rank is not None and now - claim.age_s > since):
                self._live.add(claim.claim)
        seen = [each.seen_s for each in assignments if each.task == self._task_name]
        return (
            bool(names or seen)
            and self._live.issuperset(names)
            and all(age is not None and now - age > since for age in seen)
        )


def wait_timeout(
    client: DataPlaneClient, dataset: StreamingDataset, others: int
) -> ClaimTimeoutError:
    """Return the error of a loader that waited too long for the samples that others hold."""
    partition_id, task_name = dataset.partition_id, dataset.task_name
    assigned = 0
    holders: Counter[str] = Counter()
    if client.capabilities.inspection:
        assignments = client.inspector.list_assignments(partition_id)
        assigned = min(others, sum(each.samples for each in assignments if each.task == task_name))
        for claim in client.inspector.list_claims(partition_id):
            if claim.task == task_name:
                holders[claim.owner] += claim.samples
    reasons = []
    if others > assigned:
        reasons.append(f"{others - assigned} samples are still leased by other consumers")
        if holders:
            named = named_holders(holders, process_name())
            reasons.append(f"all leases of the task: {named}")
    if assigned:
        reasons.append(
            f"{assigned} samples are still assigned to data-parallel ranks; register the partition "
            "again, or redeliver them (inspector.reset_consumption), so that all can claim them"
        )
    return ClaimTimeoutError(
        f"StreamingDataLoader(partition={partition_id!r}, task={task_name!r}): after "
        f"{dataset.timeout_s:g} s, {'; '.join(reasons)}",
        missing=others,
        leased=sum(holders.values()),
        holders=holders,
    )
