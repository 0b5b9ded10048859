"""Whether what arrives can be kept: asked of the writer itself, and not too often."""

from __future__ import annotations

import threading
import time

from dataplane_admin.store import Batch, Store, StoreError

_PROBE_S = 2.0
_LEAST_ROOM_BYTES = 1 << 20


class Health:
    """Remembers how the newest probe of the store went. Safe to be asked from several threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._trouble: str | None = None
        self._probed_s: float | None = None
        self._lock = threading.Lock()

    def trouble(self, *, at_most_s: float) -> str | None:
        """One sentence on why nothing can be written, None if it can.

        Args:
            at_most_s: how old the answer may be, in seconds. A new one writes an empty batch,
                which the store counts as a revision.
        """
        with self._lock:
            now = time.monotonic()
            if self._probed_s is None or now - self._probed_s > at_most_s:
                self._trouble = self._probe()
                self._probed_s = now
            return self._trouble

    def _probe(self) -> str | None:
        try:
            self._store.write(Batch(), timeout_s=_PROBE_S)
            room = self._store.room_bytes()
        except (StoreError, OSError) as error:
            return str(error)
        # An empty batch still finds room in pages that are there, when nothing else does.
        if room is not None and room < _LEAST_ROOM_BYTES:
            return f"the store's disk is full: {room} bytes left"
        return None
