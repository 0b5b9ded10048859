"""The part of ``P2pService`` that RL refit uses: generators publish what they have installed.

Sources are held in memory only. After a server restart, a ModelExpress source that the server does
not know publishes itself again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from refit_mx.control.records import Code, Refusal

SILENT_AFTER_MS = 90_000
"""Time after which a silent source is STALE; ModelExpress sends a heartbeat every 30 s."""
MAX_SOURCES = 10_000
MAX_BYTES = 256 << 20
"""Size limit of the data that all sources published."""
READY = 2
STALE = 3


@dataclass
class Source:
    """A worker that publishes tensors.

    ``mx_source_id`` is the hash of the published identity. ``identity`` is a serialized
    ``SourceIdentity``, ``metadata`` a serialized ``WorkerMetadata``. The status is numbered as in
    ``p2p.proto``. The load is None if the source did not measure it.
    """

    mx_source_id: str
    worker_id: str
    model_name: str
    worker_rank: int
    identity: bytes
    metadata: bytes
    status: int
    updated_at_ms: int
    source_load: float | None = None

    @property
    def size(self) -> int:
        """Bytes that the source published."""
        return len(self.identity) + len(self.metadata)

    def status_at(self, now_ms: int) -> int:
        """Return the status, STALE if the source has been silent for too long."""
        return STALE if now_ms - self.updated_at_ms >= SILENT_AFTER_MS else self.status


class SourceTable:
    """Published sources; safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sources: dict[tuple[str, str], Source] = {}
        self._bytes = 0

    def publish(self, source: Source) -> None:
        """Add a source, or replace its earlier data.

        Raises:
            Refusal: RESOURCE_EXHAUSTED if there are too many sources or bytes.
        """
        with self._lock:
            key = (source.mx_source_id, source.worker_id)
            if not self._has_capacity(key, source):
                self._drop_silent(source.updated_at_ms)
                if not self._has_capacity(key, source):
                    raise Refusal(
                        Code.RESOURCE_EXHAUSTED,
                        f"{len(self._sources)} sources have published {self._bytes} bytes; "
                        f"expected at most {MAX_SOURCES} sources and {MAX_BYTES} bytes",
                    )
            self._bytes += source.size - (self._sources[key].size if key in self._sources else 0)
            self._sources[key] = source

    def update(
        self,
        mx_source_id: str,
        worker_id: str,
        *,
        status: int,
        source_load: float | None,
        now_ms: int,
    ) -> bool:
        """Update a source's status; return whether the source is known."""
        with self._lock:
            source = self._sources.get((mx_source_id, worker_id))
            if source is None:
                return False
            source.status, source.updated_at_ms = status, now_ms
            if source_load is not None:
                source.source_load = source_load
            return True

    def extend_grace(self, since_ms: int, now_ms: int) -> None:
        """Extend live sources by a pause of the server, in which none could send an update."""
        with self._lock:
            for source in self._sources.values():
                if source.status_at(since_ms) != STALE:
                    source.updated_at_ms += now_ms - since_ms

    def get(self, mx_source_id: str, worker_id: str) -> Source | None:
        """Return one source; None if it is unknown."""
        with self._lock:
            return self._sources.get((mx_source_id, worker_id))

    def all(self) -> list[Source]:
        """Return all sources, most recently updated first."""
        with self._lock:
            return sorted(
                self._sources.values(), key=lambda each: (-each.updated_at_ms, each.worker_id)
            )

    def ready(self, now_ms: int) -> int:
        """Return the number of READY sources."""
        with self._lock:
            return sum(1 for each in self._sources.values() if each.status_at(now_ms) == READY)

    def _has_capacity(self, key: tuple[str, str], source: Source) -> bool:
        known = self._sources.get(key)
        replaced = known.size if known is not None else 0
        return (
            known is not None or len(self._sources) < MAX_SOURCES
        ) and self._bytes + source.size - replaced <= MAX_BYTES

    def _drop_silent(self, now_ms: int) -> None:
        for key, source in list(self._sources.items()):
            if source.status_at(now_ms) == STALE:
                self._bytes -= source.size
                del self._sources[key]
