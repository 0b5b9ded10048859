"""`HeldClaims`: the leases that a process holds and renews until they are acknowledged."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Container

from dataplane_core.client import DataPlaneClient
from dataplane_core.errors import LeaseLostError, PartitionNotFoundError
from dataplane_core.meta import LEASE, KVBatchMeta

LeaseOutcome = tuple[KVBatchMeta | None, LeaseLostError | PartitionNotFoundError | None]
"""Held samples of a claim (None if it holds none), and the error for those that it lost."""


class HeldClaims:
    """Claims under leases, by token, without their acknowledged samples. Thread-safe.

    Args:
        client: the client that renews, acknowledges and releases the claims.
    """

    def __init__(self, client: DataPlaneClient) -> None:
        self._client = client
        self._held: dict[str, KVBatchMeta] = {}
        self._lock = threading.Lock()

    @property
    def samples(self) -> int:
        """Number of samples of all claims."""
        with self._lock:
            return sum(meta.size for meta in self._held.values())

    def add(self, meta: KVBatchMeta) -> None:
        """Hold a claim, if it has a lease.

        A claim that is held already stays as it is: its entry may be newer than ``meta``. A claim
        whose lease has expired already is forgotten when its renewal fails.
        """
        token = meta.extra_info.get(LEASE)
        if token is not None:
            with self._lock:
                self._held.setdefault(token, meta)

    def forget(self, meta: KVBatchMeta) -> KVBatchMeta | None:
        """Stop holding these samples of a claim; return those that were held."""
        token = meta.extra_info[LEASE]
        with self._lock:
            held = self._held.pop(token, None)
            if held is None:
                return None
            forgotten = indices_of(held, set(meta.sample_ids))
            rest = held.drop(forgotten)
            if rest is not None:
                self._held[token] = rest
        return held.subset(forgotten) if forgotten else None

    def acknowledge(self, meta: KVBatchMeta) -> LeaseOutcome:
        """Acknowledge those samples of a claim that it still holds.

        They are forgotten before the call, so that no renewal finds them lost meanwhile.

        Raises:
            DataPlaneError: the store is unavailable, as `DataPlaneClient.acknowledge`; the samples
                are held as before.
        """
        forgotten = self.forget(meta)
        try:
            return _apply_to_held(self._client.acknowledge, meta)
        except BaseException:  # also after an interrupt, unacknowledged samples must be renewed
            if forgotten is not None:
                self._restore(forgotten)
            raise

    def renew_claim(self, meta: KVBatchMeta) -> LeaseOutcome:
        """Renew samples of a claim; forget those that it no longer holds.

        Raises:
            DataPlaneError: the store is unavailable, as `DataPlaneClient.renew`.
        """
        left, lost = _apply_to_held(self._client.renew, meta)
        gone = meta if left is None else meta.drop(indices_of(meta, set(left.sample_ids)))
        if gone is not None:
            self.forget(gone)
        if left is not None:
            self.add(left)
        return left, lost

    def renew_all(self) -> None:
        """Renew all claims; forget the samples that were lost."""
        with self._lock:
            held = list(self._held.items())
        for token, meta in held:
            try:
                left, lost = _apply_to_held(self._client.renew, meta)
            except Exception:  # noqa: BLE001, S112  # an adapter may raise anything
                continue  # the store is unavailable for now; the next round retries
            if lost is None:
                continue
            with self._lock:  # the loop gets the error when it acknowledges
                if self._held.get(token) is not meta:
                    continue  # part was acknowledged meanwhile, which the renewal reports as lost
                if left is None:
                    del self._held[token]
                else:
                    self._held[token] = left

    def release(self, kept: Container[str]) -> None:
        """Release all samples except ``kept``."""
        with self._lock:
            held = list(self._held.values())
        for meta in held:
            unfinished = meta.drop(indices_of(meta, kept))
            if unfinished is not None:
                self.forget(unfinished)
                release(self._client, unfinished)

    def _restore(self, meta: KVBatchMeta) -> None:
        token = meta.extra_info[LEASE]
        with self._lock:
            held = self._held.get(token)
            if held is not None:
                added = meta.drop(indices_of(meta, set(held.sample_ids)))
                meta = held if added is None else held.concat(added)
            self._held[token] = meta


def indices_of(meta: KVBatchMeta, sample_ids: Container[str]) -> list[int]:
    """Return the positions of these samples in a claim."""
    return [index for index, each in enumerate(meta.sample_ids) if each in sample_ids]


def release(client: DataPlaneClient, meta: KVBatchMeta) -> None:
    """Release what a claim still holds; if the store is unavailable, its lease expires."""
    if LEASE in meta.extra_info:
        with contextlib.suppress(Exception):  # an adapter may raise anything
            _apply_to_held(client.release, meta)


def _apply_to_held(operation: Callable[[KVBatchMeta], None], meta: KVBatchMeta) -> LeaseOutcome:
    """Apply an all-or-nothing operation to the samples that the claim still holds.

    If a sample was withdrawn or cleared by force, the claim keeps its other samples. If the store
    does not report which samples are lost, all of them count as lost.
    """
    left: KVBatchMeta | None = meta
    lost: LeaseLostError | PartitionNotFoundError | None = None
    while left is not None:
        try:
            operation(left)
        except LeaseLostError as error:
            lost = lost or error
            gone = indices_of(left, set(error.sample_ids))
            left = left.drop(gone) if gone else None
        except PartitionNotFoundError as error:
            lost, left = lost or error, None
        else:
            break
    return left, lost
