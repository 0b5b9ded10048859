"""`ReceivedWeights`: verified tensors in scratch memory, with statistics of the receive."""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from refit_mx.closing import Closeable
from refit_mx.control.leases import VersionLease
from refit_mx.errors import PhaseError
from refit_mx.manifest.format import Registry

STAGES = ("lease", "discover", "plan", "fetch", "verify", "compile", "install")


@dataclass
class RefitStats:
    """Statistics of one receive or refit.

    Attributes:
        version_id: version in the control plane.
        transport: ``nixl``, ``shm`` or ``tcp``.
        sources: worker ids of the sources that were read.
        attempts: number of attempts; 1 if the first succeeded.
        nbytes: bytes moved by the last attempt, which are all bytes of the targets.
        fetched_bytes: bytes of all completed fetches, including fetches of wrong bytes.
        source_verified_bytes: bytes verified by digests requested from the sources.
        seconds: duration by stage of `STAGES`, summed over all attempts; a stage that fails does
            not count. Verification during the fetch counts as ``fetch``, not as ``verify``.
        total_seconds: total duration.
    """

    version_id: str
    transport: str = ""
    sources: tuple[str, ...] = ()
    attempts: int = 0
    nbytes: int = 0
    fetched_bytes: int = 0
    source_verified_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    total_seconds: float = 0.0

    @property
    def gb_per_s(self) -> float:
        """Rate of the fetch in 1e9 bytes per second; 0 if nothing was moved."""
        return self.fetched_bytes / self.seconds["fetch"] / 1e9 if self.seconds["fetch"] else 0.0


@contextmanager
def timed(stats: RefitStats, stage: str) -> Iterator[None]:
    """Add the duration of a block to that of a stage, unless the block fails."""
    started = time.monotonic()
    yield
    stats.seconds[stage] += time.monotonic() - started


class ReceivedWeights(Mapping[str, torch.Tensor], Closeable):
    """Verified tensors by target name, C-ordered, in scratch memory.

    Use it as a context manager: on exit the memory goes to the next receive, so its tensors must
    not be used any more. If it is garbage-collected unclosed, a ``ResourceWarning`` is issued and
    its lease is not renewed any more; its memory is freed with the last tensor in it.

    Attributes:
        version_id: version of the tensors.
        registry: how the publishers prepared the bytes; None if unstated.
        published: names of all tensors that the sources publish for the version.
        stats: statistics of the receive.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        registry: Registry | None,
        published: AbstractSet[str],
        stats: RefitStats,
        on_close: Callable[[], None],
        on_drop: Callable[[], None],
    ) -> None:
        self.version_id = stats.version_id
        self.registry = registry
        self.published = published
        self.stats = stats
        self._tensors = dict(tensors)
        self._on_close: Callable[[], None] | None = on_close
        self._drop = weakref.finalize(self, _dropped, self.version_id, on_drop)
        self._drop.atexit = False

    def __getitem__(self, name: str) -> torch.Tensor:
        self._check_open()
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        self._check_open()
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def close(self) -> None:
        """Release the memory and the lease. May be called again."""
        on_close, self._on_close = self._on_close, None
        self._drop.detach()
        self._tensors = {}
        if on_close is not None:
            on_close()

    def _check_open(self) -> None:
        if self._on_close is None:
            raise PhaseError(
                f"the weights of version {self.version_id} were released; "
                "use them inside the `with` block"
            )


def _dropped(version_id: str, on_drop: Callable[[], None]) -> None:
    on_drop()
    warnings.warn(
        f"the received weights of version {version_id} were not closed",
        ResourceWarning,
        stacklevel=2,
    )


@dataclass(eq=False)
class _Open:
    lease: VersionLease
    discard: Callable[[], None] = lambda: None


class OpenReceives:
    """Leases of a receiver's versions that are not released yet.

    Only one thread at a time may use it, except for the function that `dropping` returns.
    """

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._dropped: deque[str] = deque()

    def __contains__(self, version_id: str) -> bool:
        return version_id in self._open

    def begin(self, lease: VersionLease) -> VersionLease:
        """Record that a version is being received; return its lease."""
        self._open[lease.version_id] = _Open(lease)
        return lease

    def dropping(self, version_id: str, discard: Callable[[], None]) -> Callable[[], None]:
        """Return a function for the finalizer of weights that are dropped unclosed.

        It stops renewing the lease at once. `end_dropped` releases the lease later, and calls
        ``discard`` for the scratch memory, which tensors may still use.
        """
        held, dropped = self._open[version_id], self._dropped
        held.discard = discard

        def drop() -> None:
            held.lease.abandon()
            dropped.append(version_id)

        return drop

    def end_dropped(self) -> None:
        """Discard the scratch memory and release the leases of weights dropped unclosed."""
        while self._dropped:
            version_id = self._dropped.popleft()
            if version_id in self._open:
                self._open[version_id].discard()
                self.end(version_id)

    def end(self, version_id: str) -> None:
        """Release the lease on a version, unless released already."""
        held = self._open.pop(version_id, None)
        if held is not None:
            held.lease.close()

    def close(self) -> None:
        """Release all leases."""
        for version_id in list(self._open):
            self.end(version_id)
