"""`LeaseWatch`: tells what live consumers hold from what those hold that are gone."""

from __future__ import annotations

import time
from collections import Counter

from dataplane_core.client import DataPlaneClient
from dataplane_core.declaration import named_holders
from dataplane_core.errors import ClaimTimeoutError
from dataplane_core.process import process_name

_ROUNDING_S = 1e-6


class LeaseWatch:
    """Watches what a task's consumers hold, and what waits for its ranks, from its first look on.

    Args:
        client: one with ``capabilities.inspection``.
        partition_id: the partition.
        task_name: the consumer task.
    """

    def __init__(self, client: DataPlaneClient, partition_id: str, task_name: str) -> None:
        self._client = client
        self._partition_id = partition_id
        self._task_name = task_name
        self._since: float | None = None
        self._first: dict[str, float] = {}
        self._live: set[str] = set()

    def all_live(self) -> bool:
        """Look; True if whoever holds something, or is waited for, lived after the first look.

        A claim is a live one's if it was renewed since it was first seen here, or if a rank made it
        after the first look: of a rank that works its shares off, the newest claim is never renewed
        yet. A share is a live one's if its rank claimed or renewed after the first look. False if
        there is neither. Of more than the inspector lists, the oldest are watched.
        """
        now = time.monotonic()  # before the store looks, so that no sign is taken for a later one
        claims = self._client.list_claims(self._partition_id)
        shares = self._client.list_shares(self._partition_id)
        since = self._since
        if since is None:
            since = self._since = time.monotonic()
        names = [claim.claim for claim in claims if claim.task == self._task_name]
        for claim in claims:
            # From the claim to its lease's end, which only a renewal moves; both parts are of one
            # moment of the store's clock.
            reach = claim.age_s + claim.expires_in_s
            first = self._first.setdefault(claim.claim, reach)
            renewed = claim.expires_in_s > 0 and reach > first + _ROUNDING_S
            if renewed or (claim.rank is not None and now - claim.age_s > since):
                self._live.add(claim.claim)
        seen = [share.seen_s for share in shares if share.task == self._task_name]
        return (
            bool(names or seen)
            and self._live.issuperset(names)
            and all(age is not None and now - age > since for age in seen)
        )


def waited_in_vain(
    client: DataPlaneClient, partition_id: str, task_name: str, others: int, timeout_s: float
) -> ClaimTimeoutError:
    """The error of who waited ``timeout_s`` seconds for ``others`` samples of other consumers."""
    waiting = 0
    holders: Counter[str] = Counter()
    if client.capabilities.inspection:
        shares = client.list_shares(partition_id)
        waiting = min(others, sum(share.samples for share in shares if share.task == task_name))
        for claim in client.list_claims(partition_id):
            if claim.task == task_name:
                holders[claim.owner] += claim.samples
    reasons = []
    if others > waiting:
        reasons.append(f"{others - waiting} samples are still leased by other consumers")
        if holders:
            named = named_holders(holders, process_name())
            reasons.append(f"all leases of the task: {named}")
    if waiting:
        reasons.append(
            f"{waiting} samples still wait for the data-parallel ranks that they were drawn for; "
            "registering the partition again, or reset_consumption, opens them"
        )
    return ClaimTimeoutError(
        f"StreamingDataLoader(partition={partition_id!r}, task={task_name!r}): after "
        f"{timeout_s:g} s {'; '.join(reasons)}",
        missing=others,
        leased=sum(holders.values()),
        holders=holders,
    )
