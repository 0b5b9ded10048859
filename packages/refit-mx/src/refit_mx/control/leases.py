"""`VersionLease`: a receiver's hold on a version, renewed by a thread until it is closed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType

from refit_mx.errors import (
    ControlError,
    ControlUnavailableError,
    LeaseLostError,
    RefitTimeoutError,
    VersionNotFoundError,
    VersionNotReadyError,
)


class VersionLease:
    """Made by `ControlClient.lease`; a context manager that gives the lease back.

    The lease is counted from before each renewal was sent, so it is never believed to last longer
    than the control plane lets it.

    Args:
        version_id: that is held.
        worker_id: of the receiver.
        ttl_s: for which a renewal lasts.
        renew: registers the lease or its renewal, and gives its id.
        give_back: deletes the lease of an id.

    Raises:
        RefitError: whatever ``renew`` raises the first time.
    """

    def __init__(
        self,
        version_id: str,
        worker_id: str,
        *,
        ttl_s: float,
        renew: Callable[[], str],
        give_back: Callable[[str], None],
    ) -> None:
        self.version_id = version_id
        self.worker_id = worker_id
        self._ttl_s = ttl_s
        self._renew = renew
        self._give_back = give_back
        self._lost: str | None = None
        self._abandoned = False
        self._closing = threading.Event()
        asked = time.monotonic()
        self.lease_id = renew()
        """As the control plane knows it."""
        self._until = asked + ttl_s
        self._thread = threading.Thread(
            target=self._keep, name=f"refit-lease-{version_id}", daemon=True
        )
        self._thread.start()

    @property
    def left_s(self) -> float:
        """Seconds for which the lease is sure to last; 0 once it is lost or closed."""
        if self._lost is not None or self._closing.is_set():
            return 0.0
        return max(0.0, self._until - time.monotonic())

    def check(self) -> None:
        """Return if the lease has held without a gap.

        Raises:
            LeaseLostError: it has not; what was read under it may be another version's.
        """
        if self._lost is not None:
            raise LeaseLostError(self._lost)
        if self._closing.is_set():
            raise LeaseLostError(f"lease on version {self.version_id!r} was given back")
        if not self.left_s:
            raise LeaseLostError(
                f"lease on version {self.version_id!r} was not renewed for {self._ttl_s:g} s"
            )

    def abandon(self) -> None:
        """Renew the lease no more, so that it lapses within its time to live.

        Takes no lock and waits for nothing, as a finalizer must not, which runs in any thread and
        at any place. `close` gives the lease back at once, also after this.
        """
        self._abandoned = True

    def close(self) -> None:
        """Give the lease back. Where the control plane does not answer it lapses by itself.

        May be called again.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        # Where that fails nothing more can be done: its time to live ends it.
        with contextlib.suppress(ControlError, RefitTimeoutError):
            self._give_back(self.lease_id)

    def __enter__(self) -> VersionLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _keep(self) -> None:
        pause_s = self._ttl_s / 3
        while not self._closing.wait(pause_s) and not self._abandoned:
            asked = time.monotonic()
            if asked >= self._until:
                self._lost = (
                    f"lease on version {self.version_id!r} was not renewed for {self._ttl_s:g} s"
                )
                return
            try:
                lease_id = self._renew()
            except (ControlUnavailableError, RefitTimeoutError):
                pause_s = min(self._ttl_s / 10, 1.0)  # again soon, while it still lasts
                continue
            except (VersionNotFoundError, VersionNotReadyError, ControlError) as error:
                self._lost = f"lease on version {self.version_id!r} was lost: {error}"
                return
            if lease_id != self.lease_id:
                self._lost = f"lease on version {self.version_id!r} lapsed before it was renewed"
                self.lease_id = lease_id
                return
            self._until = asked + self._ttl_s
            pause_s = self._ttl_s / 3
