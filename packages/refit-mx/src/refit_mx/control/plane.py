"""`ControlPlane`: the state with its store and a clock, safe to call from many threads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from refit_mx.control.limits import Limits
from refit_mx.control.records import Code, Refusal, VersionState
from refit_mx.control.sources import SourceTable
from refit_mx.control.state import ControlState
from refit_mx.control.store import MemoryStore, Store

T = TypeVar("T")
_STORE_TIMEOUT_S = 30.0
_SWEEP_S = 0.5
_PAUSE_MS = 1000
"""Longest normal gap between two readings of the clock; a longer one means the process paused."""


@dataclass(frozen=True)
class Counts:
    """Number of records in the control plane, by kind.

    Versions are counted by state until they are forgotten, live workers by role. Sources are the
    READY ones of ``P2pService``.
    """

    versions: dict[str, int]
    workers: dict[str, int]
    shards: int
    leases: int
    sources: int


class ControlPlane:
    """The state of a server, with its store and a clock.

    A call returns once its changes are stored. If the store fails, the state may differ from what
    is stored, so all later calls are refused; a restart reads the store.

    Args:
        store: storage of the records; None keeps them in memory only.
        limits: bounds on what is retained, and for how long.
        restart_grace_s: minimum time for which a live worker or lease stays live after a restart,
            or its own time to live if that is shorter. It also applies after the process or its
            virtual machine was paused, for example by SIGSTOP.
        clock: Unix time in milliseconds that never goes back; None uses the machine's.
    """

    def __init__(
        self,
        store: Store | None = None,
        *,
        limits: Limits | None = None,
        restart_grace_s: float = 30.0,
        clock: Callable[[], int] | None = None,
    ) -> None:
        self._store = store or MemoryStore()
        self._clock = clock or _anchored_clock()
        self._lock = threading.Lock()
        self._state = ControlState(limits)
        self.failed: str | None = None
        """Error of the store; None while it works."""
        self._closed = threading.Event()
        self._grace_s = restart_grace_s
        self._seen_ms = self._clock()
        self.sources = SourceTable()
        try:
            self._state.expiry.load(
                self._store.load(), now_ms=self._seen_ms, grace_s=restart_grace_s
            )
            self._wait(self._store_changes())
        except BaseException:  # close the file also on an interrupt
            self._store.close()
            raise
        self._sweeper = threading.Thread(target=self._sweep, name="refit-sweep", daemon=True)
        self._sweeper.start()

    def call(self, step: Callable[[ControlState, int], T]) -> T:
        """Run ``step`` with the state and the current time in milliseconds; store its changes.

        Other threads change the state as soon as ``step`` returns. So ``step`` must return
        messages, not records.

        Raises:
            Refusal: from the step, or UNAVAILABLE if the store failed.
        """
        refusal: Refusal | None = None
        with self._lock:
            self._check()
            try:
                return_value = step(self._state, self._now_ms())
            except Refusal as error:
                refusal = error
            stored = self._store_changes()  # what expired before a refusal stays expired
        self._wait(stored)
        if refusal is not None:
            raise refusal
        return return_value

    def counts(self) -> Counts:
        """Return the number of records, by kind."""

        def count(state: ControlState, now_ms: int) -> Counts:
            state.expiry.expire_until(now_ms)
            ledger = state.ledger
            by_state = Counter(version.state for version in ledger.versions.values())
            live = (each for each in ledger.workers.values() if each.is_live(now_ms))
            return Counts(
                versions={each.name.lower(): by_state[each] for each in VersionState},
                workers=dict(Counter(each.role.name.lower() for each in live)),
                shards=sum(len(shards) for shards in ledger.shards.values()),
                leases=sum(len(leases) for leases in ledger.leases.values()),
                sources=self.sources.ready(now_ms),
            )

        return self.call(count)

    def now_ms(self) -> int:
        """Return the time of this control plane's clock."""
        with self._lock:
            return self._now_ms()

    def close(self) -> None:
        """Stop, and close the store. May be called again."""
        self._closed.set()
        self._sweeper.join()
        self._store.close()

    def _now_ms(self) -> int:
        """Return the time. After a pause, first extend the records that were live before it."""
        since_ms, self._seen_ms = self._seen_ms, self._clock()
        if self._seen_ms - since_ms > _PAUSE_MS:
            self._state.expiry.extend_grace(since_ms, self._seen_ms, grace_s=self._grace_s)
            self.sources.extend_grace(since_ms, self._seen_ms)
        return self._seen_ms

    def _check(self) -> None:
        if self.failed is not None:
            raise Refusal(Code.UNAVAILABLE, f"the state cannot be stored: {self.failed}")

    def _store_changes(self) -> Future[None] | None:
        changes = self._state.ledger.take_changes()
        return self._store.write(changes) if changes else None

    def _wait(self, stored: Future[None] | None) -> None:
        if stored is None:
            return
        try:
            stored.result(_STORE_TIMEOUT_S)
        except TimeoutError as error:
            # The future's own error has no text.
            self.failed = str(error) or f"no answer from the store within {_STORE_TIMEOUT_S:g} s"
            self._check()
        except Exception as error:  # noqa: BLE001 - any error means that the state is not stored
            self.failed = f"{type(error).__name__}: {error}"
            self._check()

    def _sweep(self) -> None:
        # This does not wait until its changes are stored: a slow store must neither delay the next
        # sweep, nor look like a pause.
        while not self._closed.wait(_SWEEP_S):
            with self._lock:
                if self.failed is not None:
                    return
                self._state.expiry.expire_until(self._now_ms())
                stored = self._store_changes()
            if stored is not None:
                stored.add_done_callback(self._check_stored)

    def _check_stored(self, stored: Future[None]) -> None:
        with contextlib.suppress(Refusal):
            self._wait(stored)


def _anchored_clock() -> Callable[[], int]:
    # Unix time at the start, then the monotonic clock: setting the machine's clock must not expire
    # leases and workers. Nor must suspending the machine: Linux stops this clock meanwhile.
    offset = time.time() - time.monotonic()
    return lambda: int((time.monotonic() + offset) * 1000)
