"""`RankStatus`: the state of a worker of a vLLM server.

`refit_mx.engine.status.RefitStatus`, in vLLM's workers, produces it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from refit_mx.fleet.calls import ServerCallError


class FetchStatus(msgspec.Struct, frozen=True):
    """The fetch of a version into a worker's scratch memory; ``received`` means compiled, too."""

    version_id: str
    state: Literal["running", "received", "failed"]
    error: str | None = None


class RankStatus(msgspec.Struct, frozen=True):
    """State of one worker, with the fields of `refit_mx.engine.status.RefitStatus.refit_status`."""

    nonce: str
    vllm: str
    backend: str | None
    session: bool
    rank: int = 0
    initialized: bool = False
    version_id: str | None = None
    fenced: str | None = None
    error: str | None = None
    fetch: FetchStatus | None = None

    def has_received(self, version_id: str) -> bool:
        """Return whether the worker has fetched all of a version."""
        fetch = self.fetch
        return fetch is not None and fetch.version_id == version_id and fetch.state == "received"

    def __str__(self) -> str:
        """Describe the state, for an error."""
        parts = [
            "weights of the launch" if self.version_id is None else f"version {self.version_id}",
            "initialized" if self.initialized else "not initialized",
            "session open" if self.session else "no session",
            f"fenced: {self.fenced}" if self.fenced else "",
            f"{self.fetch.version_id} {self.fetch.state}" if self.fetch else "nothing fetched",
            self.error or (self.fetch.error if self.fetch and self.fetch.error else ""),
        ]
        return f"rank {self.rank}: {', '.join(part for part in parts if part)}"


# Any: JSON.
def parse_statuses(path: str, answer: dict[str, Any]) -> tuple[RankStatus, ...]:
    """Parse an answer of ``/collective_rpc``, in the order of the ranks."""
    try:
        ranks = msgspec.convert(answer.get("results"), tuple[RankStatus, ...])
    except msgspec.ValidationError as error:
        raise ServerCallError(f"{path}: refit_status: {error}", status=200) from None
    if not ranks:
        raise ServerCallError(f"{path}: refit_status: no rank has answered", status=200)
    return ranks
