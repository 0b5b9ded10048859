"""Health of the store, from rate-limited probe writes."""

from __future__ import annotations

import threading
import time

from dataplane_admin.store import Batch, Store, StoreError

_PROBE_S = 2.0
_MIN_FREE_BYTES = 1 << 20


class Health:
    """Result of the newest probe of the store. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._trouble: str | None = None
        self._probed_s: float | None = None
        self._lock = threading.Lock()

    def trouble(self, *, max_age_s: float) -> str | None:
        """Return one sentence on why the store is not writable, None if it is.

        Args:
            max_age_s: maximum age of the result in seconds. A new probe writes an empty batch,
                which does not change the store's revision.
        """
        with self._lock:
            now = time.monotonic()
            if self._probed_s is None or now - self._probed_s > max_age_s:
                self._trouble = self._probe()
                self._probed_s = now
            return self._trouble

    def _probe(self) -> str | None:
        try:
            self._store.write(Batch(), timeout_s=_PROBE_S)
            free_bytes = self._store.free_bytes()
        except (StoreError, OSError) as error:
            return str(error)
        # An empty batch fits into existing pages even when the disk is full.
        if free_bytes is not None and free_bytes < _MIN_FREE_BYTES:
            return f"the store's disk is full: {free_bytes} bytes left"
        return None
