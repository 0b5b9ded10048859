"""`Structures`: what stays of a source's manifest from version to version, asked for once.

The names and boxes of a large model are several megabytes a source, and every receiver needs them
of every source. Only the digests of the bytes are new with each version.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection
from contextlib import closing

from refit_mx.deadline import Deadline
from refit_mx.errors import ProtocolError
from refit_mx.manifest import Manifest, Structure
from refit_mx.source_client import SourceClient


class Structures:
    """Asks sources for structures, and keeps them. Safe to use from several threads.

    Args:
        most_bytes: of one.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: dict[bytes, Structure] = {}
        self._tables: dict[bytes, bytes] = {}

    def complete(self, manifest: Manifest, deadline: Deadline) -> Manifest:
        """A manifest with its table and shards.

        Args:
            manifest: as it came; one that is complete is returned as it is.
            deadline: for asking its source, if its structure is not known yet.

        Raises:
            SourceLostError: the source cannot be reached, or does not hold the version any more.
            RefitTimeoutError: the deadline passed.
            ProtocolError: what it answers is not what the manifest names.
        """
        if not manifest.in_brief:
            return manifest
        with self._lock:
            known = self._kept.get(manifest.structure_digest)
        return manifest.completed(known or self._ask(manifest, deadline))

    def keep_only(self, digests: Collection[bytes]) -> None:
        """Forget all others."""
        with self._lock:
            self._kept = {
                digest: found for digest, found in self._kept.items() if digest in digests
            }
            tables = {found.table_digest for found in self._kept.values()}
            self._tables = {
                digest: table for digest, table in self._tables.items() if digest in tables
            }

    def _ask(self, manifest: Manifest, deadline: Deadline) -> Structure:
        with closing(SourceClient(manifest)) as client:
            data = client.structure(
                version_id=manifest.version_id, most_bytes=self._most_bytes, deadline=deadline
            )
        if hashlib.sha256(data).digest() != manifest.structure_digest:
            raise ProtocolError(
                f"source {manifest.worker_id!r} at {manifest.endpoint}: its structure of version "
                f"{manifest.version_id!r} is not the one that its manifest names"
            )
        found = Structure.decode(data)
        with self._lock:
            # Sources of one model have equal tables: one copy of them is enough.
            table = self._tables.setdefault(found.table_digest, found.table)
            if table == found.table:
                found = Structure(found.table_digest, table, found.shards)
            return self._kept.setdefault(manifest.structure_digest, found)
