"""`HeldClaims`: the leases that a process holds, to be renewed until they are settled."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Container

from dataplane_core.client import LEASE, DataPlaneClient
from dataplane_core.errors import DataPlaneError, LeaseLostError
from dataplane_core.meta import KVBatchMeta


class HeldClaims:
    """Claims under leases, by token, less what of them was settled; for use from several threads.

    Args:
        client: what renews and releases them.
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

    def forget(self, meta: KVBatchMeta) -> None:
        """These samples of a claim are held no longer."""
        token = meta.extra_info[LEASE]
        with self._lock:
            held = self._held.pop(token, None)
            rest = None if held is None else held.drop(places(held, set(meta.sample_ids)))
            if rest is not None:
                self._held[token] = rest

    def renew(self) -> None:
        """Renew all, and forget those whose lease was lost."""
        with self._lock:
            held = list(self._held.items())
        for token, meta in held:
            try:
                self._client.renew(meta)
            except LeaseLostError:
                with self._lock:  # said to the loop when it acknowledges
                    if self._held.get(token) is meta:
                        del self._held[token]
            except DataPlaneError:
                continue  # a store that is away for a moment: tried again in time

    def release(self, kept: Container[str]) -> None:
        """Give all samples back but those of ``kept``."""
        with self._lock:
            held = list(self._held.values())
        for meta in held:
            unfinished = meta.drop(places(meta, kept))
            if unfinished is not None:
                self.forget(unfinished)
                release(self._client, unfinished)


def places(meta: KVBatchMeta, sample_ids: Container[str]) -> list[int]:
    """Where in a claim these samples are."""
    return [place for place, each in enumerate(meta.sample_ids) if each in sample_ids]


def release(client: DataPlaneClient, meta: KVBatchMeta) -> None:
    """Give a claim back as far as that is possible; if not, its lease runs out."""
    if LEASE in meta.extra_info:
        with contextlib.suppress(DataPlaneError):
            client.release(meta)
