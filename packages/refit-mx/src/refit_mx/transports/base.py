"""`Transport`: what moves bytes from the arenas of sources into a receiver's scratch buffer.

One instance a receiver. A transport knows nothing of tensors, versions or digests: it carries out
`ReadTable`s. It reads only from the sources that it is asked to read from, connects to them when it
first does, and remembers nothing of a source that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from refit_mx.deadline import Deadline
from refit_mx.manifest import Manifest
from refit_mx.reads import ReadTable

UNUSED_FETCHES = 4
"""A source that so many fetches did not read from is disconnected, and its memory let go of."""


@dataclass(frozen=True)
class Fetch:
    """What to read from one source.

    Attributes:
        source: its manifest.
        reads: from its arena into the scratch buffer.
    """

    source: Manifest
    reads: ReadTable


@dataclass(frozen=True)
class FetchStats:
    """What a fetch did.

    Attributes:
        nbytes: moved, without headers.
        seconds: from the first byte asked for to the last one there.
        connected: sources that had to be connected to.
    """

    nbytes: int
    seconds: float
    connected: int


class Transport(Protocol):
    """Reads from sources. One thread at a time may use an instance."""

    name: str
    """``nixl``, ``shm`` or ``tcp``; as configurations name it."""
    piece_bytes: int
    """Of a read at most, so that it is verified while more arrives; a multiple of
    `refit_mx.manifest.BLOCK_BYTES`."""

    def register(self, scratch: torch.Tensor) -> None:
        """Make a buffer ready to be read into; it is one contiguous uint8 tensor of one axis.

        Raises:
            RefitConfigError: the transport cannot read into this memory.
        """

    def unregister(self, scratch: torch.Tensor) -> None:
        """Forget a buffer. Only of one that nothing is read into any more."""

    def fetch(
        self,
        fetches: Sequence[Fetch],
        scratch: torch.Tensor,
        *,
        deadline: Deadline,
        on_done: Callable[[int, int, int], None] | None = None,
    ) -> FetchStats:
        """Read everything, from all sources at once. All of it is there when this returns.

        Args:
            fetches: one a source.
            scratch: registered before.
            deadline: for all of it, connecting included. It is told as bytes come, also within a
                read: `Deadline.moved`.
            on_done: called as parts arrive, in a thread that brings them, maybe in several at the
                same time; with the index of a fetch and the first row and the row behind the last
                one of its reads that are complete; every row is told once. So what has arrived can
                be verified while more arrives. What it raises ends the fetch.

        Raises:
            SourceLostError: a source died, was restarted, or no longer holds the version; names its
                worker. The buffer's content is undefined.
            RefitTimeoutError: the deadline passed. The buffer's content is undefined.
            ProtocolError: a source sent what it must not.
        """

    def busy(self, scratch: torch.Tensor) -> bool:
        """Whether an abandoned read may still write into the buffer.

        After `fetch` raised, this stays true until the transport knows that no byte can come any
        more: at once where nothing was abandoned, else when the agent of each source that was being
        read from is gone. The caller asks again before it uses the buffer.
        """

    def close(self) -> None:
        """Disconnect from all sources. May be called again."""
