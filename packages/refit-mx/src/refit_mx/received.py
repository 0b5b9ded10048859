"""`ReceivedWeights`: verified tensors in scratch memory, and what it took to get them there."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType

import torch

from refit_mx.errors import PhaseError
from refit_mx.manifest import Registry

STAGES = ("lease", "discover", "plan", "fetch", "verify", "compile", "install")


@dataclass
class RefitStats:
    """What one receive or refit did.

    Attributes:
        version_id: of the control plane.
        transport: ``nixl`` or ``tcp``.
        sources: worker ids that bytes came from.
        attempts: that were made; 1 if the first succeeded.
        nbytes: moved by the last attempt; equal to what was needed.
        asked_bytes: of these, verified by asking the source for the digests of what was read.
        seconds: by stage, `STAGES`, summed over all attempts. What was verified while more arrived
            is in ``fetch``, not in ``verify``.
        total_seconds: of everything.
    """

    version_id: str
    transport: str = ""
    sources: tuple[str, ...] = ()
    attempts: int = 0
    nbytes: int = 0
    asked_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    total_seconds: float = 0.0

    @property
    def gb_per_s(self) -> float:
        """Of the fetch alone, in 1e9 bytes; 0 where nothing was moved."""
        return self.nbytes / self.seconds["fetch"] / 1e9 if self.seconds["fetch"] else 0.0


class ReceivedWeights(Mapping[str, torch.Tensor]):
    """Target name to tensor, C-ordered, in scratch memory. Verified.

    A context manager: after it was left, the memory belongs to the next receive, so no tensor of it
    may be used any more. One that is dropped unclosed is told as a ``ResourceWarning``; its lease
    is not renewed any more, and its memory goes with the last tensor of it.

    Attributes:
        version_id: whose bytes these are.
        registry: how the publishers prepared them; None if they do not say.
        stats: of the receive.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        registry: Registry | None,
        stats: RefitStats,
        on_close: Callable[[], None],
        on_drop: Callable[[], None],
    ) -> None:
        self.version_id = stats.version_id
        self.registry = registry
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
        """Give the memory and the lease back. May be called again."""
        on_close, self._on_close = self._on_close, None
        self._drop.detach()
        self._tensors = {}
        if on_close is not None:
            on_close()

    def __enter__(self) -> ReceivedWeights:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._on_close is None:
            raise PhaseError(
                f"the weights of version {self.version_id} were given back; "
                "use them inside the `with` block"
            )


def _dropped(version_id: str, on_drop: Callable[[], None]) -> None:
    on_drop()
    warnings.warn(
        f"the received weights of version {version_id} were not closed",
        ResourceWarning,
        stacklevel=2,
    )
