"""`OpenReceives`: the leases of what is being received, or was and is not given back yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from refit_mx.control.client import ControlClient
from refit_mx.control.leases import VersionLease

_UNLEASE_S = 1.0


@dataclass(eq=False)
class _Open:
    lease: VersionLease
    control: ControlClient
    discard: Callable[[], None] = lambda: None


class OpenReceives:
    """Of one receiver, for one thread at a time; only what `dropping` gives may run in any."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._dropped: deque[str] = deque()

    def __contains__(self, version_id: str) -> bool:
        return version_id in self._open

    def begin(self, lease: VersionLease, control: ControlClient) -> None:
        """A version is being received.

        Args:
            lease: on it.
            control: the connection that the lease was made with.
        """
        self._open[lease.version_id] = _Open(lease, control)

    def dropping(self, version_id: str, discard: Callable[[], None]) -> Callable[[], None]:
        """What a finalizer may call when the weights of a version were dropped unclosed.

        The lease is renewed no more at once; `end_dropped` does the rest.

        Args:
            version_id: that was received.
            discard: its scratch memory, into which somebody may still look.
        """
        held, dropped = self._open[version_id], self._dropped
        held.discard = discard

        def drop() -> None:
            held.lease.abandon()
            dropped.append(version_id)

        return drop

    def end_dropped(self) -> None:
        """Give up the scratch memory and the leases of what was dropped unclosed."""
        while self._dropped:
            version_id = self._dropped.popleft()
            if version_id in self._open:
                self._open[version_id].discard()
                self.end(version_id)

    def end(self, version_id: str) -> None:
        """Give a lease back. Nothing happens if that was done."""
        held = self._open.pop(version_id, None)
        if held is not None:
            # Without an answer it lapses by itself; nobody has to wait for that.
            held.control.rpc_timeout_s = min(held.control.rpc_timeout_s, _UNLEASE_S)
            held.lease.close()

    def close(self) -> None:
        """Give all leases back."""
        for version_id in list(self._open):
            self.end(version_id)
