"""`VersionLease`: a receiver's lease on a version, renewed by a thread until it is closed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from refit_mx.closing import Closeable
from refit_mx.errors import ControlError, ControlUnavailableError, LeaseLostError, RefitTimeoutError


class VersionLease(Closeable):
    """A lease from `ControlClient.lease`; a context manager that releases it.

    Its time to live counts from the moment before each renewal is sent, so the receiver never
    believes that it lasts longer than the control plane allows. The function ``renew`` registers or
    renews the lease and returns its id; ``release`` deletes the lease with an id.

    Raises:
        RefitError: the first ``renew`` failed.
    """

    def __init__(
        self,
        version_id: str,
        worker_id: str,
        *,
        ttl_s: float,
        renew: Callable[[], str],
        release: Callable[[str], None],
    ) -> None:
        self.version_id = version_id
        self.worker_id = worker_id
        self._ttl_s = ttl_s
        self._renew = renew
        self._release = release
        self._lost: str | None = None
        self._abandoned = False
        self._closing = threading.Event()
        sent_at = time.monotonic()
        self.lease_id = renew()
        """Id in the control plane."""
        self._until = sent_at + ttl_s
        self._thread = threading.Thread(
            target=self._keep_renewed, name=f"refit-lease-{version_id}", daemon=True
        )
        self._thread.start()

    @property
    def left_s(self) -> float:
        """Seconds for which the lease is sure to last; 0 once it is lost or closed."""
        if self._lost is not None or self._closing.is_set():
            return 0.0
        return max(0.0, self._until - time.monotonic())

    def check(self) -> None:
        """Check that the lease has held without a gap.

        Raises:
            LeaseLostError: it has not; what was read under it may belong to another version.
        """
        if self._lost is not None:
            raise LeaseLostError(self._lost)
        if self._closing.is_set():
            raise LeaseLostError(f"lease on version {self.version_id!r} was released")
        if not self.left_s:
            raise LeaseLostError(
                f"lease on version {self.version_id!r} was not renewed for {self._ttl_s:g} s"
            )

    def abandon(self) -> None:
        """Stop renewing the lease, so that it expires within its time to live.

        Safe in a finalizer, which may run in any thread at any point: it takes no lock and does not
        wait. `close` still releases the lease at once.
        """
        self._abandoned = True

    def close(self) -> None:
        """Release the lease; if the control plane does not answer, the lease expires.

        May be called again.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        # If the call fails, the lease expires.
        with contextlib.suppress(ControlError, RefitTimeoutError):
            self._release(self.lease_id)

    def _keep_renewed(self) -> None:
        pause_s = self._ttl_s / 3
        while not self._closing.wait(pause_s) and not self._abandoned:
            sent_at = time.monotonic()
            if sent_at >= self._until:
                self._lost = (
                    f"lease on version {self.version_id!r} was not renewed for {self._ttl_s:g} s"
                )
                return
            try:
                lease_id = self._renew()
            except (ControlUnavailableError, RefitTimeoutError):
                pause_s = min(self._ttl_s / 10, 1.0)  # retry soon, while the lease lasts
                continue
            except ControlError as error:
                self._lost = f"lease on version {self.version_id!r} was lost: {error}"
                return
            if lease_id != self.lease_id:
                self._lost = f"lease on version {self.version_id!r} expired before it was renewed"
                self.lease_id = lease_id
                return
            self._until = sent_at + self._ttl_s
            pause_s = self._ttl_s / 3
