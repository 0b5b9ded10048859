"""`PhaseBarrier`: every rank of the trainer passes every phase of a refit, or all of them fail.

One rank drives the servers. The others have nothing to do there, yet what they published is read
meanwhile, so they must not go on, reuse memory or leave before a phase is over; and if one of them
dies, the driver must not install what came from it as if all were well.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from enum import Enum
from typing import Protocol, TypeVar

from refit_mx.bounded_calls import BoundedCalls
from refit_mx.deadline import Deadline
from refit_mx.errors import FleetError, RefitConfigError, RefitError

_Found = TypeVar("_Found")

_OK = b"ok"
_FAILED = b"failed: "
_MOST_TEXT = 500
_TELL_S = 3.0
_NAMING_S = 1.0
"""After a deadline, for asking the store which ranks did not come."""


class Point(Enum):
    """Where all ranks meet, in this order."""

    PAUSED = "paused"
    RECEIVED = "received"
    FINISHED = "finished"
    RESUMED = "resumed"


class Store(Protocol):
    """What is used of ``torch.distributed.Store``; a ``TCPStore`` needs no process group."""

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Read one."""

    def check(self, keys: list[str]) -> bool:
        """Whether all are there."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Until all are there."""

    def delete_key(self, key: str) -> bool:
        """Forget one."""


class PhaseBarrier:
    """One rank's part. All ranks begin the same rounds in the same order, as with collectives.

    No call outlasts its time, also where the store's server is stopped and never answers.

    Args:
        store: shared by all ranks.
        rank: this one, from 0.
        world_size: number of ranks.
        name: of the barrier within the store.

    Raises:
        RefitConfigError: the rank is not one of the world.
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
        """The next round."""
        self._round += 1

    def arrive(self, point: Point, *, timeout_s: float = _TELL_S) -> None:
        """Say that this rank is there, without waiting for others.

        Raises:
            FleetError: the store refuses, or its server is gone.
            RefitTimeoutError: the store did not answer in time.
        """
        deadline = Deadline(timeout_s, f"refit: the point {point.value!r}")
        number = self._round
        self._bounded(lambda: self._say(number, [point], _OK), deadline)

    def meet(self, point: Point, deadline: Deadline) -> None:
        """Say that this rank is there, and wait for the others.

        Raises:
            FleetError: a rank said that it failed; names each. Or the store's server is gone.
            RefitTimeoutError: ranks did not come in time; names them. They may have died. Or the
                store did not answer in time.
        """
        number = self._round
        self._bounded(lambda: self._meet(number, point, deadline), deadline, _NAMING_S)

    def fail(self, point: Point, why: str, *, timeout_s: float = _TELL_S) -> None:
        """Say that this rank failed, at this point and all that follow, so that none waits for it.

        Args:
            point: the next one that this rank would have come to.
            why: for the error that the others raise.
            timeout_s: for the store to take it.

        Raises:
            FleetError: the store refuses, or its server is gone.
            RefitTimeoutError: the store did not answer in time.
        """
        points = list(Point)
        deadline = Deadline(timeout_s, "refit: telling other ranks of a failure")
        value = _FAILED + why[:_MOST_TEXT].encode()
        number = self._round
        self._bounded(lambda: self._say(number, points[points.index(point) :], value), deadline)

    def _bounded(
        self, call: Callable[[], _Found], deadline: Deadline, more_s: float = 0.0
    ) -> _Found:
        try:
            return self._calls.call(call, deadline.left_s + more_s)
        except RefitError:
            raise
        except TimeoutError:
            raise deadline.error("waiting for the store of the barrier, which is silent") from None
        except RuntimeError as error:
            # torch's stores say refusals and lost connections so.
            raise FleetError(f"refit: the store of the barrier: {error}", {}) from error

    # An abandoned call may still run in a later round, so each call keeps the number of its own:
    # else the failure of one round would fail the next.

    def _say(self, number: int, points: Iterable[Point], value: bytes) -> None:
        for point in points:
            # What this rank wrote two rounds ago; none reads it now.
            self._store.delete_key(self._key(number - 2, point, self._rank))
            self._store.set(self._key(number, point, self._rank), value)

    def _meet(self, number: int, point: Point, deadline: Deadline) -> None:
        self._say(number, [point], _OK)
        failed: dict[str, str] = {}
        for rank in self._others():
            key = self._key(number, point, rank)
            try:
                self._store.wait([key], timedelta(seconds=max(0.001, deadline.left_s)))
            except RuntimeError:
                # torch's stores say time-outs and lost connections so; `check` tells which ranks.
                break
            value = bytes(self._store.get(key))
            if value != _OK:
                failed[f"rank {rank}"] = value.removeprefix(_FAILED).decode(errors="replace")
        if failed:
            raise FleetError(
                f"refit: at the point {point.value!r}, "
                + "; ".join(f"{rank}: {why}" for rank, why in failed.items()),
                failed,
            )
        missing = self._missing(number, point)
        if missing:
            raise deadline.error(
                f"waiting at the point {point.value!r} for ranks {', '.join(map(str, missing))}"
            )

    def _others(self) -> Iterable[int]:
        return (rank for rank in range(self._world_size) if rank != self._rank)

    def _missing(self, number: int, point: Point) -> list[int]:
        return [
            rank
            for rank in self._others()
            if not self._store.check([self._key(number, point, rank)])
        ]

    def _key(self, number: int, point: Point, rank: int) -> str:
        return f"{self._name}/{number}/{point.value}/{rank}"


def follow(barrier: PhaseBarrier, *, timeout_s: float, failure: str | None = None) -> None:
    """Pass a refit that another rank drives. Every rank that drives nothing calls this.

    Args:
        barrier: this rank's.
        timeout_s: for the whole refit; after a failure, telling the others may take 3 s more.
        failure: why this rank cannot take part; the refit fails for all ranks then.

    Raises:
        FleetError: the refit failed, at the driver or another rank; or ``failure`` was given, or
            the store's server is gone.
        RefitTimeoutError: the driver or another rank did not come in time, or the store did not
            answer.
    """
    deadline = Deadline(timeout_s, "refit that another rank drives")
    barrier.begin()
    if failure is not None:
        _tell(barrier, Point.PAUSED, failure)
        raise FleetError(f"refit: this rank failed: {failure}", {"this rank": failure})
    for point in Point:
        try:
            barrier.meet(point, deadline)
        except Exception as error:
            later = list(Point)[list(Point).index(point) + 1 :]
            if later:
                _tell(barrier, later[0], f"{type(error).__name__}: {error}")
            raise


def _tell(barrier: PhaseBarrier, point: Point, why: str) -> None:
    # Others who are not told wait until their deadlines; this rank's own error says more.
    with contextlib.suppress(RefitError):
        barrier.fail(point, why)
