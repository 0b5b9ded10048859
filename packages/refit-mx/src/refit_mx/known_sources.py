"""`KnownSources`: the next manifest of a publisher whose last one is known, from its source server.

A frame over a connection that is open takes a fraction of the processor time of a call of gRPC,
which is what counts where many receivers of a machine ask at once.
"""

from __future__ import annotations

import threading
import time

import msgspec

from refit_mx.deadline import Deadline
from refit_mx.errors import RefitError
from refit_mx.manifest import Manifest
from refit_mx.source_client import SourceClient

_KEPT_S = 60.0
_MOST_KEPT = 256
"""Connections to publishers that a receiver keeps."""


class KnownSources:
    """Safe to use from several threads.

    Args:
        most_bytes: of a manifest.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        # By the endpoint of their manifests, with the time at which each was used last, of the
        # monotonic clock.
        self._sources: dict[str, tuple[SourceClient, float]] = {}

    def remember(self, endpoint: str, manifest: Manifest) -> None:
        """A publisher answered at ``endpoint`` with this. Nothing happens if it is known."""
        with self._lock:
            known = endpoint in self._sources
        if not known:
            # Who it is is kept, and not the megabytes.
            who = msgspec.structs.replace(manifest.brief(), digests=b"")
            self._keep(endpoint, SourceClient(who), 0.0)

    def manifest(self, endpoint: str, version_id: str, deadline: Deadline) -> bytes | None:
        """The manifest of a version, encoded.

        Returns:
            None if the publisher is not known, or does not answer as the one that was: it is
            forgotten then, and may be asked in the usual way.
        """
        with self._lock:
            client, used = self._sources.pop(endpoint, (None, 0.0))
        if client is None:
            return None
        # What lies between may have forgotten a connection that was not used for long.
        if time.monotonic() - used > _KEPT_S:
            client.close()
        try:
            data = client.manifest(
                version_id=version_id, most_bytes=self._most_bytes, deadline=deadline
            )
        except RefitError:
            client.close()
            return None
        self._keep(endpoint, client, time.monotonic())
        return data

    def close(self) -> None:
        """Disconnect, and forget all. May be called again, and they be remembered again."""
        with self._lock:
            sources = list(self._sources.values())
            self._sources.clear()
        for client, _ in sources:
            client.close()

    def _keep(self, endpoint: str, client: SourceClient, used: float) -> None:
        with self._lock:
            spare = self._sources.pop(endpoint, None)
            self._sources[endpoint] = (client, used)
            # Publishers that were restarted have other ports; the oldest are the first to go.
            gone = next(iter(self._sources)) if len(self._sources) > _MOST_KEPT else None
            oldest = self._sources.pop(gone) if gone is not None else None
        for unused in (spare, oldest):
            if unused is not None:
                unused[0].close()
