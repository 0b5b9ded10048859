"""`PhaseBarrier`: all ranks of the trainer pass every phase of a refit, or all fail.

One rank drives the servers, which meanwhile read what the other ranks published. So the other ranks
must not continue, reuse memory or exit before a phase is finished. If one of them dies, the driver
must not install what came from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, TypeVar

from refit_mx.concurrency import BoundedCalls
from refit_mx.deadline import Deadline
from refit_mx.errors import FleetError, RefitConfigError, RefitError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed does not export its type

_Result = TypeVar("_Result")

_OK = "ok"
_FAILED = "failed: "
_MAX_TEXT = 500
_REPORT_S = 3.0
_LIST_MISSING_S = 1.0
"""Extra time after a deadline, for asking the store which ranks are missing or have failed."""


class Point(Enum):
    """Points at which all ranks meet, in this order."""

    RECEIVED = "received"
    PAUSED = "paused"
    FINISHED = "finished"
    RESUMED = "resumed"


class PhaseBarrier:
    """One rank's part of the barrier. All ranks begin the same rounds in the same order.

    Every call ends in time, even if the store's server is stopped and never answers. All ranks
    share the store, such as a ``TCPStore``; it needs no process group. The name is that of the
    barrier within the store.

    Raises:
        RefitConfigError: the rank is outside the world size.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, name: str = "refit") -> None:
        if not 0 <= rank < world_size:
            raise RefitConfigError(f"PhaseBarrier: rank {rank} of {world_size}")
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._name = name
        self._round = 0
        self._calls = BoundedCalls("refit-barrier")

    def begin(self) -> None:
        """Begin the next round."""
        self._round += 1

    def arrive(self, point: Point, *, timeout_s: float = _REPORT_S) -> None:
        """Report that this rank is at a point, without waiting for others.

        Raises:
            FleetError: the store refused, or its server is gone.
            RefitTimeoutError: the store did not answer in time.
        """
        deadline = Deadline(timeout_s, f"refit: reporting the point {point.value!r}")
        number = self._round
        self._bounded(lambda: self._write(number, [point], _OK), deadline)

    def meet(self, point: Point, deadline: Deadline) -> None:
        """Report that this rank is at a point, and wait for the others.

        Raises:
            FleetError: ranks reported failures, and the error names them; or the store's server is
                gone.
            RefitTimeoutError: ranks did not come in time and may have died, and the error names
                them; or the store did not answer in time.
        """
        number = self._round
        self._bounded(lambda: self._meet(number, point, deadline), deadline, _LIST_MISSING_S)

    def fail(self, point: Point, reason: str, *, timeout_s: float = _REPORT_S) -> None:
        """Report a failure of this rank at a point and all later points, so no rank waits there.

        ``point`` is the next point that this rank would have reached. The other ranks raise an
        error with the reason.

        Raises:
            FleetError: the store refused, or its server is gone.
            RefitTimeoutError: the store did not answer in time.
        """
        points = list(Point)
        deadline = Deadline(timeout_s, "refit: reporting a failure to other ranks")
        value = _FAILED + reason[:_MAX_TEXT]
        number = self._round
        self._bounded(lambda: self._write(number, points[points.index(point) :], value), deadline)

    def _bounded(
        self, call: Callable[[], _Result], deadline: Deadline, more_s: float = 0.0
    ) -> _Result:
        try:
            return self._calls.call(call, deadline.left_s + more_s)
        except RefitError:
            raise
        except TimeoutError:
            raise deadline.error("waiting for the store of the barrier, which is silent") from None
        except RuntimeError as error:
            # torch's stores report refusals and lost connections as RuntimeError.
            raise FleetError(f"refit: the store of the barrier: {error}", {}) from error

    # An abandoned call may still run in a later round, so each call has its own round's number.
    # Otherwise the failure of one round would fail the next.

    def _write(self, number: int, points: Iterable[Point], value: str) -> None:
        for point in points:
            # This rank's value of two rounds ago, which no rank reads any more.
            self._store.delete_key(self._key(number - 2, point, self._rank))
            self._store.set(self._key(number, point, self._rank), value)

    def _meet(self, number: int, point: Point, deadline: Deadline) -> None:
        self._write(number, [point], _OK)
        failed: dict[str, str] = {}
        missing: list[int] = []
        try:
            for rank, report in self._reports(number, point, deadline):
                if report is None:
                    missing.append(rank)
                elif report != _OK:
                    failed[f"rank {rank}"] = report.removeprefix(_FAILED)
        except RuntimeError:  # the store is lost; a failure of a rank matters more
            if not failed:
                raise
        if failed:
            raise FleetError(
                f"refit: at the point {point.value!r}, "
                + "; ".join(f"{rank}: {reason}" for rank, reason in failed.items()),
                failed,
            )
        if missing:
            raise deadline.error(
                f"waiting at the point {point.value!r} for ranks {', '.join(map(str, missing))}"
            )

    def _reports(
        self, number: int, point: Point, deadline: Deadline
    ) -> Iterator[tuple[int, str | None]]:
        """Yield each other rank and its report; None if it has none by the deadline."""
        timed_out = False
        for rank in range(self._world_size):
            if rank == self._rank:
                continue
            key = self._key(number, point, rank)
            if not timed_out:
                try:
                    self._store.wait([key], timedelta(seconds=max(0.001, deadline.left_s)))
                except RuntimeError:  # also a lost connection, for which `check` raises
                    timed_out = True
            # The remaining ranks may have reported failures: read these without waiting.
            if timed_out and not self._store.check([key]):
                yield rank, None
            else:
                yield rank, self._store.get(key).decode(errors="replace")

    def _key(self, number: int, point: Point, rank: int) -> str:
        return f"{self._name}/{number}/{point.value}/{rank}"


def follow(barrier: PhaseBarrier, *, timeout_s: float, failure: str | None = None) -> None:
    """Take part in a refit that another rank drives; call it on every rank but the driver.

    Args:
        barrier: this rank's barrier.
        timeout_s: time limit of the refit; reporting a failure may take 3 s more.
        failure: why this rank cannot take part; the refit then fails on all ranks.

    Raises:
        FleetError: the refit failed at the driver or another rank, ``failure`` was given, or the
            store's server is gone.
        RefitTimeoutError: the driver or another rank did not come in time, or the store did not
            answer.
    """
    deadline = Deadline(timeout_s, "refit that another rank drives")
    barrier.begin()
    if failure is not None:
        _report(barrier, next(iter(Point)), failure)
        raise FleetError(f"refit: this rank failed: {failure}", {"this rank": failure})
    for point in Point:
        try:
            barrier.meet(point, deadline)
        except Exception as error:  # whatever the error, others must not wait for this rank
            later = list(Point)[list(Point).index(point) + 1 :]
            if later:
                _report(barrier, later[0], f"{type(error).__name__}: {error}")
            raise


def _report(barrier: PhaseBarrier, point: Point, reason: str) -> None:
    # Ranks that do not get the report wait until their deadlines; this rank's error matters more.
    with contextlib.suppress(RefitError):
        barrier.fail(point, reason)
