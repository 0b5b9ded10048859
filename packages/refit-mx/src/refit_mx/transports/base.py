"""`Transport`: the interface that moves bytes from sources' arenas to a receiver's scratch buffer.

A receiver fetches a version; the transfer is the phase of a fetch in which transports move bytes.

A receiver has one instance of each transport that it uses. A transport knows no tensors or digests:
it executes `ReadTable`s, and checks that each source still holds the version. It connects to a
source on the first read from it, and disconnects if the source is unused (`UNUSED_FETCHES`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from refit_mx.deadline import Deadline
from refit_mx.errors import SourceLostError
from refit_mx.manifest.format import Manifest
from refit_mx.manifest.reads import ReadTable

UNUSED_FETCHES = 4
"""Number of fetches for which an unused source stays connected, and its memory mapped."""


@dataclass(frozen=True)
class SourceReads:
    """Reads from the arena of one source into the scratch buffer."""

    source: Manifest
    reads: ReadTable


def source_lost(source: Manifest, why: str) -> SourceLostError:
    """Return the error for a source that was lost."""
    return SourceLostError(f"source {source.worker_id!r} {why}", (source.worker_id,))


@dataclass(frozen=True)
class ReadStats:
    """Amount and duration of a `Transport.read`."""

    nbytes: int  # bytes moved, without headers
    # Duration from the first request to the last byte; over TCP it includes connecting.
    seconds: float
    connected: int  # number of sources that had to be connected


class Transport(Protocol):
    """Reader of sources. One thread at a time may use an instance."""

    name: str
    """Name in configurations: ``nixl``, ``shm`` or ``tcp``."""
    max_read_bytes: int
    """Size limit of a read, so that it is verified while more arrives; a multiple of
    `refit_mx.manifest.format.BLOCK_BYTES`."""

    def register(self, scratch: torch.Tensor) -> None:
        """Prepare a buffer for reads: a contiguous uint8 tensor of one axis.

        Raises:
            RefitConfigError: the transport cannot read into this memory.
        """

    def unregister(self, scratch: torch.Tensor) -> None:
        """Forget a buffer, which must have no reads in progress."""

    def read(
        self,
        source_reads: Sequence[SourceReads],
        scratch: torch.Tensor,
        *,
        deadline: Deadline,
        on_done: Callable[[int, int, int], None] | None = None,
    ) -> ReadStats:
        """Execute all reads, from all sources at once; return when all bytes have arrived.

        Args:
            source_reads: one element per source.
            scratch: registered buffer.
            deadline: time limit, including connecting. Progress, also within a read, is recorded
                with `Deadline.record_progress`.
            on_done: callback for rows of reads that are complete, so that they are verified while
                more arrive. It gets an index of ``source_reads``, the first row, and the row after
                the last; each row is reported once. Several threads may call it at the same time.
                An error that it raises ends all reads.

        Raises:
            SourceLostError: a source died, restarted, or no longer holds the version; the error
                has its worker id. The buffer's content is undefined.
            RefitTimeoutError: the deadline passed. The buffer's content is undefined.
            ProtocolError: a source sent what the protocol does not allow.
        """

    def busy(self, scratch: torch.Tensor) -> bool:
        """Return whether an abandoned read may still write into the buffer.

        After `read` raised, this is true while a byte may still arrive. If nothing was abandoned,
        it is false at once; else it becomes false once the reads are complete or the agents of
        their sources are gone. The caller checks again before it uses the buffer.
        """

    def close(self) -> None:
        """Disconnect from all sources. May be called again."""
