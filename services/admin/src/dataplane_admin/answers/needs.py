"""Which fields each task claims with, as its newest claims told.

Nothing declares it: a claim names its fields, and its event tells them.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataplane_admin.answers.newest_claims import Bounded, NewestClaims
from dataplane_admin.store import ClaimRow, Store
from dataplane_admin.store.texts import storable

_MOST = 1_000


class Needs:
    """What tasks need, bounded in number. Safe to be asked from several threads."""

    def __init__(self, store: Store) -> None:
        self._known: Bounded[tuple[str, str], tuple[str, ...]] = Bounded(_MOST)
        self._newest = NewestClaims(store, self._learn)

    def of(self, partition: str, task: str) -> tuple[str, ...] | None:
        """The fields; None if no claim told."""
        return self._known.get((storable(partition), storable(task)))

    def refresh(self) -> None:
        """Read the events that came since the last time; at once if another thread is doing so."""
        self._newest.refresh()

    def _learn(self, claims: Sequence[ClaimRow], complete: bool) -> None:
        for one in claims:
            if one.fields is not None:
                self._known[one.partition, one.task] = one.fields
