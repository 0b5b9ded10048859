"""`LeaseWatch`: tells leases that somebody renews from those whose holder is gone."""

from __future__ import annotations

from dataplane_core.client import DataPlaneClient

_ROUNDING_S = 1e-6


class LeaseWatch:
    """Watches the claims of a task from its first look on.

    Args:
        client: one with ``capabilities.inspection``.
        partition_id: the partition.
        task_name: the consumer task.
    """

    def __init__(self, client: DataPlaneClient, partition_id: str, task_name: str) -> None:
        self._client = client
        self._partition_id = partition_id
        self._task_name = task_name
        self._first: dict[str, float] = {}
        self._renewed: set[str] = set()

    def all_renewed(self) -> bool:
        """Look; True if each claim there is was renewed since it was first seen here.

        False without claims. Of more than the inspector lists, the oldest are watched.
        """
        claims = self._client.list_claims(self._partition_id)
        ours = [claim for claim in claims if claim.task == self._task_name]
        for claim in ours:
            # From the claim to its lease's end, which only a renewal moves; both parts are of one
            # moment of the store's clock.
            reach = claim.age_s + claim.expires_in_s
            first = self._first.setdefault(claim.claim, reach)
            if claim.expires_in_s > 0 and reach > first + _ROUNDING_S:
                self._renewed.add(claim.claim)
        return bool(ours) and all(claim.claim in self._renewed for claim in ours)
