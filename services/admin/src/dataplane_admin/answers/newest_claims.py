"""Reads of a store the claims that came since the last look, for what is learned from them.

Names are those of the store, which `storable` makes of what tasks and partitions are called:
whoever looks something up under a name passes it through that.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar

from dataplane_admin.store import ClaimRow, Store

# Events looked through at a time: of more, when the service starts for example, the newest ones.
_PAGE = 20_000

_Name = TypeVar("_Name")
_Known = TypeVar("_Known")


class NewestClaims:
    """Tells of claims as they come.

    Args:
        store: that is read.
        learn: called with the claims, and whether none was passed over; by one thread at a time.
    """

    def __init__(self, store: Store, learn: Callable[[Sequence[ClaimRow], bool], None]) -> None:
        self._store = store
        self._learn = learn
        self._read_to = 0
        self._revision = -1
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Read what came since the last time; at once if another thread is doing so.

        Raises:
            StoreUnavailable: the store cannot be asked; the next call asks it again.
        """
        revision = self._store.revision
        if revision == self._revision or not self._lock.acquire(blocking=False):
            return
        try:
            claims, read_to, complete = self._store.newest_claims(self._read_to, _PAGE)
            self._learn(claims, complete)
            self._read_to, self._revision = read_to, revision
        finally:
            self._lock.release()


class Bounded(OrderedDict[_Name, _Known]):
    """Forgets what was set first once there are more than ``most``."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, name: _Name, known: _Known) -> None:
        """Set it, as the newest."""
        super().__setitem__(name, known)
        self.move_to_end(name)
        while len(self) > self._most:
            self.popitem(last=False)
