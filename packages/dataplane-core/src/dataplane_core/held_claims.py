"""`HeldClaims`: the leases that a process holds, to be renewed until they are settled."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Container

from dataplane_core.client import LEASE, DataPlaneClient
from dataplane_core.errors import DataPlaneError, LeaseLostError, PartitionNotFoundError
from dataplane_core.meta import KVBatchMeta

Left = tuple[KVBatchMeta | None, LeaseLostError | PartitionNotFoundError | None]
"""Samples of a claim that were still held, None if none was, and what was said of the others."""


class HeldClaims:
    """Claims under leases, by token, less what of them was settled; for use from several threads.

    Args:
        client: what renews, settles and releases them.
    """

    def __init__(self, client: DataPlaneClient) -> None:
        self._client = client
        self._held: dict[str, KVBatchMeta] = {}
        self._lock = threading.Lock()

    @property
    def samples(self) -> int:
        """Samples of all claims."""
        with self._lock:
            return sum(meta.size for meta in self._held.values())

    def add(self, meta: KVBatchMeta) -> None:
        """Hold a claim, if it has a lease.

        A claim that is known stays as it is: who adds it late knows less of it. One that is over
        by then is forgotten when it cannot be renewed.
        """
        token = meta.extra_info.get(LEASE)
        if token is not None:
            with self._lock:
                self._held.setdefault(token, meta)

    def forget(self, meta: KVBatchMeta) -> KVBatchMeta | None:
        """These samples of a claim are held no longer; returns those that were."""
        token = meta.extra_info[LEASE]
        with self._lock:
            held = self._held.pop(token, None)
            if held is None:
                return None
            found = places(held, set(meta.sample_ids))
            rest = held.drop(found)
            if rest is not None:
                self._held[token] = rest
        return held.subset(found) if found else None

    def acknowledge(self, meta: KVBatchMeta) -> Left:
        """Settle samples of a claim, as far as it still holds them.

        They are not renewed from before the store is asked: a renewal would find them lost.

        Raises:
            DataPlaneError: as `DataPlaneClient.acknowledge`, of a store that is away; the samples
                are held as before.
        """
        forgotten = self.forget(meta)
        try:
            return _as_far_as_held(self._client.acknowledge, meta)
        except BaseException:
            if forgotten is not None:
                self._hold_again(forgotten)
            raise

    def renewed(self, meta: KVBatchMeta) -> Left:
        """Renew samples of a claim, and hold those that it still holds.

        Raises:
            DataPlaneError: as `DataPlaneClient.renew`, of a store that is away.
        """
        left, lost = _as_far_as_held(self._client.renew, meta)
        gone = meta if left is None else meta.drop(places(meta, set(left.sample_ids)))
        if gone is not None:
            self.forget(gone)
        if left is not None:
            self.add(left)
        return left, lost

    def renew(self) -> None:
        """Renew all, and forget what was lost."""
        with self._lock:
            held = list(self._held.items())
        for token, meta in held:
            try:
                left, lost = _as_far_as_held(self._client.renew, meta)
            except DataPlaneError:
                continue  # a store that is away for a moment: tried again in time
            if lost is None:
                continue
            with self._lock:  # said to the loop when it acknowledges
                if self._held.get(token) is not meta:
                    continue  # a part was settled meanwhile, and may be what was found lost
                if left is None:
                    del self._held[token]
                else:
                    self._held[token] = left

    def release(self, kept: Container[str]) -> None:
        """Give all samples back but those of ``kept``."""
        with self._lock:
            held = list(self._held.values())
        for meta in held:
            unfinished = meta.drop(places(meta, kept))
            if unfinished is not None:
                self.forget(unfinished)
                release(self._client, unfinished)

    def _hold_again(self, meta: KVBatchMeta) -> None:
        token = meta.extra_info[LEASE]
        with self._lock:
            held = self._held.get(token)
            if held is not None:
                added = meta.drop(places(meta, set(held.sample_ids)))
                meta = held if added is None else held.concat(added)
            self._held[token] = meta


def places(meta: KVBatchMeta, sample_ids: Container[str]) -> list[int]:
    """Where in a claim these samples are."""
    return [place for place, each in enumerate(meta.sample_ids) if each in sample_ids]


def release(client: DataPlaneClient, meta: KVBatchMeta) -> None:
    """Give a claim back as far as that is possible; if not, its lease expires."""
    if LEASE in meta.extra_info:
        with contextlib.suppress(DataPlaneError):
            _as_far_as_held(client.release, meta)


def _as_far_as_held(operation: Callable[[KVBatchMeta], None], meta: KVBatchMeta) -> Left:
    """Do what is done to all samples or none to those that the claim still holds.

    A sample that was cleared by force or withdrawn ends the lease of no other. Where a store does
    not say which are lost, all are taken for it.
    """
    left: KVBatchMeta | None = meta
    lost: LeaseLostError | PartitionNotFoundError | None = None
    while left is not None:
        try:
            operation(left)
        except LeaseLostError as error:
            lost = lost or error
            gone = places(left, set(error.sample_ids))
            left = left.drop(gone) if gone else None
        except PartitionNotFoundError as error:
            lost, left = lost or error, None
        else:
            break
    return left, lost
