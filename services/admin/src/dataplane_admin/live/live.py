"""`Live`: one thread that looks into the data plane, and what requests may ask of it themselves.

Requests read `Live.snapshot` and so never wait for the data plane. What no snapshot can hold, such
as one page of samples, is asked in a thread of its own that a request waits for within a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar

import structlog

from dataplane_admin.live.connect import Connector
from dataplane_admin.live.scan import Scanner
from dataplane_admin.live.snapshot import Snapshot
from dataplane_admin.live.stuck import find_stuck
from dataplane_admin.live.trend import Trends
from dataplane_core import DataPlaneError, DataPlaneInspector, UnsupportedError

T = TypeVar("T")

MOST_PARTITIONS = 500
"""Partitions of which trends and scans are kept."""

_MOST_ASKING = 4
_WANTED_S = 60.0
# How often a page is told that time goes on, though nothing else changed.
_AGES_S = 5.0
_MOST_BACKOFF_S = 30.0
_STOP_S = 5.0

logger = structlog.get_logger("dataplane_admin.live")


class NotAttached(Exception):
    """The data plane is not there to be asked."""


class TooManyAsk(Exception):
    """As many questions are under way as may be."""


class AskedTooLong(Exception):
    """The data plane did not answer in time."""


class Live:
    """Looks into a data plane until closed.

    Args:
        connector: reaches it.
        poll_s: seconds between two looks.
        ask_s: deadline of `ask`, in seconds.
        stuck_after_s: age from which unclaimed samples and claims count as stuck.
        has_claimed: whether a task of a partition is known to claim, beside what polls show.
    """

    def __init__(
        self,
        connector: Connector,
        *,
        poll_s: float,
        ask_s: float,
        stuck_after_s: float,
        has_claimed: Callable[[str, str], bool] = lambda _partition, _task: False,
    ) -> None:
        self._connector = connector
        self._poll_s = poll_s
        self._ask_s = ask_s
        self._stuck_after_s = stuck_after_s
        self._has_claimed = has_claimed
        self._inspector: DataPlaneInspector | None = None
        self._snapshot = Snapshot(error=f"{connector.source}: not reached yet")
        self._changed_s = time.monotonic()
        self._wanted: dict[str, float] = {}
        self._trends = Trends()
        self._scanner = Scanner()
        self._asking = threading.BoundedSemaphore(_MOST_ASKING)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dataplane-admin-live", daemon=True)

    @property
    def source(self) -> str:
        """What is looked into, for people."""
        return self._connector.source

    @property
    def snapshot(self) -> Snapshot:
        """The newest look."""
        return self._snapshot

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Stop looking; waits a few seconds for a look that is under way."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def want(self, partition_id: str) -> None:
        """Say that somebody looks at a partition, so that it is scanned before others."""
        wanted = {**self._wanted, partition_id: time.monotonic()}
        self._wanted = dict(sorted(wanted.items(), key=lambda one: -one[1])[:MOST_PARTITIONS])

    def deadline_s(self) -> float:
        """Until when, by `time.monotonic`, questions that are one answer may take from now on."""
        return time.monotonic() + self._ask_s

    def ask(self, question: Callable[[DataPlaneInspector], T], until_s: float | None = None) -> T:
        """``question`` of the data plane, answered within the deadline.

        Args:
            question: asked in a thread of its own.
            until_s: of `deadline_s`, where there are several questions; None for a deadline of
                its own.

        Raises:
            NotAttached: there is none.
            TooManyAsk: too many questions are under way, of this or other requests.
            AskedTooLong: no answer in time. The question may still be carried out.
            Exception: what the question raises.
        """
        inspector = self._inspector
        if inspector is None:
            raise NotAttached(self._snapshot.error or f"{self.source}: not reached yet")
        left_s = self._ask_s if until_s is None else max(0.0, until_s - time.monotonic())
        if not self._asking.acquire(timeout=left_s):
            raise TooManyAsk(
                f"{self.source}: {_MOST_ASKING} questions have been under way for {self._ask_s:g} s"
            )
        if until_s is not None:
            left_s = max(0.0, until_s - time.monotonic())
        errand = _Errand(question, inspector, self._asking.release)
        threading.Thread(target=errand.run, name="dataplane-admin-ask", daemon=True).start()
        if not errand.done.wait(left_s):
            raise AskedTooLong(f"{self.source}: no answer within {self._ask_s:g} s")
        return errand.result()

    def _run(self) -> None:
        failures = 0
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                self._look()
                failures = 0
            except Exception as error:  # noqa: BLE001  # an onlooker outlives what it looks at
                failures += 1
                self._fail(error, first=failures == 1)
            pause = self._poll_s
            if failures:
                pause = min(_MOST_BACKOFF_S, max(0.1, self._poll_s) * 2 ** min(failures - 1, 10))
            self._ending.wait(max(0.0, pause - (time.monotonic() - began)))
        self._inspector = None
        self._connector.disconnect()

    def _look(self) -> None:
        inspector = self._inspector or self._connector.connect()
        self._inspector = inspector
        partitions = tuple(inspector.list_partitions())
        at_ns, read_s = time.time_ns(), time.monotonic()
        followed = partitions[:MOST_PARTITIONS]
        trends = self._trends.add(at_ns, followed)
        wanted = [one for one, since in self._wanted.items() if read_s - since < _WANTED_S]
        scans = self._scanner.scan(inspector, followed, wanted, self._ending.is_set)
        self._publish(
            Snapshot(
                attached=True,
                at_ns=at_ns,
                read_s=read_s,
                partitions=partitions,
                storage=tuple(_told(inspector.list_storage, list)),
                totals=_told(inspector.read_totals, dict),
                trends=trends,
                scans=scans,
                stuck=find_stuck(
                    inspector, followed, trends, scans, self._stuck_after_s, self._has_claimed
                ),
            )
        )

    def _fail(self, error: Exception, *, first: bool) -> None:
        self._inspector = None
        self._connector.disconnect()
        if isinstance(error, DataPlaneError):
            reason = str(error)
        else:
            reason = f"{type(error).__name__}: {error}"
            if first:
                logger.error("live_look_failed", source=self.source, exc_info=error)
        if first:
            logger.warning("data_plane_not_reached", source=self.source, reason=reason)
        self._publish(replace(self._snapshot, attached=False, error=f"{self.source}: {reason}"))

    def _publish(self, snapshot: Snapshot) -> None:
        now = time.monotonic()
        last = self._snapshot
        if snapshot.face() != last.face() or now - self._changed_s >= _AGES_S:
            self._changed_s = now
            self._snapshot = replace(snapshot, revision=last.revision + 1)
        else:
            self._snapshot = replace(snapshot, revision=last.revision)


class _Errand(Generic[T]):
    """One question, and its answer or failure once ``done``."""

    def __init__(
        self,
        question: Callable[[DataPlaneInspector], T],
        inspector: DataPlaneInspector,
        release: Callable[[], None],
    ) -> None:
        self.done = threading.Event()
        self._question = question
        self._inspector = inspector
        self._release = release
        self._answer: list[T] = []
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._answer.append(self._question(self._inspector))
        except Exception as error:  # noqa: BLE001  # raised again where it is waited for
            self._error = error
        finally:
            self._release()
            self.done.set()

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._answer[0]


def _told(question: Callable[[], T], nothing: Callable[[], T]) -> T:
    """The answer; nothing of a store that does not tell."""
    try:
        return question()
    except UnsupportedError:
        return nothing()
