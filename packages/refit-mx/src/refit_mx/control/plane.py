"""`ControlPlane`: the state, its store and a clock, safe to call from many threads."""

from __future__ import annotations

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
"""The sweep looks at the clock more often; if it did not, the process did not run."""


@dataclass(frozen=True)
class Counts:
    """How much the control plane holds.

    Attributes:
        versions: by state.
        workers: live ones, by role.
        shards: of versions that are not forgotten.
        leases: live ones.
        sources: of ``P2pService`` that are READY.
    """

    versions: dict[str, int]
    workers: dict[str, int]
    shards: int
    leases: int
    sources: int


class ControlPlane:
    """The one state of a server.

    A call is answered when what it changed is in the store. If the store fails, what clients were
    told and what is kept may differ, so every later call is refused; a restart reads what is kept.

    Args:
        store: where records are kept.
        limits: what is kept, and for how long.
        restart_grace_s: what was live when the server stopped stays so for this long after its
            start at least, or its own time to live if that is shorter. Likewise when the process
            goes on after a pause, such as SIGSTOP or that of a virtual machine.
        clock: Unix time in milliseconds that never goes back; None takes the machine's.
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
        self._failed: str | None = None
        self._closed = threading.Event()
        self._grace_s = restart_grace_s
        self._seen_ms = self._clock()
        self.sources = SourceTable()
        try:
            self._state.load(self._store.load(), now_ms=self._seen_ms, grace_s=restart_grace_s)
            self._wait(self._keep())
        except BaseException:
            self._store.close()
            raise
        self._sweeper = threading.Thread(target=self._sweep, name="refit-sweep", daemon=True)
        self._sweeper.start()

    @property
    def failed(self) -> str | None:
        """Why the store failed; None while it works."""
        return self._failed

    def call(self, step: Callable[[ControlState, int], T]) -> T:
        """Let ``step`` work on the state, given the time in milliseconds; keep what it changed.

        What it returns is shared with other threads, so it makes messages of records itself.

        Raises:
            Refusal: the step's own, or UNAVAILABLE if the store failed.
        """
        with self._lock:
            self._check()
            try:
                return_value = step(self._state, self._now_ms())
            except Refusal:
                # What lapsed before the refusal stays lapsed.
                self._keep()
                raise
            kept = self._keep()
        self._wait(kept)
        return return_value

    def counts(self) -> Counts:
        """How much there is.

        Raises:
            Refusal: UNAVAILABLE if the store failed.
        """

        def count(state: ControlState, now_ms: int) -> Counts:
            state.expire(now_ms=now_ms)
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
        """The plane's clock."""
        with self._lock:
            return self._now_ms()

    def close(self) -> None:
        """Stop, and finish the store. May be called again."""
        self._closed.set()
        self._sweeper.join()
        self._store.close()

    def _now_ms(self) -> int:
        """The time; the first call after a pause makes up for it before anything can lapse."""
        since_ms, self._seen_ms = self._seen_ms, self._clock()
        if self._seen_ms - since_ms > _PAUSE_MS:
            self._state.excuse(since_ms, now_ms=self._seen_ms, grace_s=self._grace_s)
            self.sources.excuse(since_ms, self._seen_ms)
        return self._seen_ms

    def _check(self) -> None:
        if self._failed is not None:
            raise Refusal(Code.UNAVAILABLE, f"the state cannot be kept: {self._failed}")

    def _keep(self) -> Future[None] | None:
        changes = self._state.take_changes()
        return self._store.keep(changes) if changes else None

    def _wait(self, kept: Future[None] | None) -> None:
        if kept is None:
            return
        try:
            kept.result(_STORE_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - whatever it was, the state is not kept
            self._failed = f"{type(error).__name__}: {error}"
            self._check()

    def _sweep(self) -> None:
        while not self._closed.wait(_SWEEP_S):
            try:
                self.call(lambda state, now_ms: state.expire(now_ms=now_ms))
            except Refusal:
                return


def _anchored_clock() -> Callable[[], int]:
    # Unix time at the start, then the monotonic clock: a machine's clock that is set must not make
    # leases and workers lapse. Nor must a machine that sleeps: Linux stops this clock meanwhile.
    offset = time.time() - time.monotonic()
    return lambda: int((time.monotonic() + offset) * 1000)
