"""Trends: a partition's numbers over the last polls, or over a longer time at larger intervals."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dataplane_core import PartitionSummary

POLLS = 120
"""Maximum number of polls in a trend."""

_MAX_CLAIMING = 10_000


@dataclass(frozen=True)
class TaskTrend:
    """One task's numbers at the polls of its partition's trend."""

    unclaimed: tuple[int, ...]
    claimed: tuple[int, ...]
    """Number of leased and acknowledged samples together."""
    acknowledged: tuple[int, ...]


@dataclass(frozen=True)
class Trend:
    """One partition's numbers, oldest poll first.

    Attributes:
        times_ns: times of the polls, in nanoseconds since 1970.
        put: samples put since registration, at each poll.
        claiming: tasks that claimed at any poll, also in an earlier partition of this name.
    """

    times_ns: tuple[int, ...] = ()
    put: tuple[int, ...] = ()
    tasks: Mapping[str, TaskTrend] = field(default_factory=dict)
    claiming: frozenset[str] = frozenset()

    @property
    def seconds(self) -> float:
        """Seconds between the first and the last poll."""
        return (self.times_ns[-1] - self.times_ns[0]) / 1e9 if self.times_ns else 0.0

    def gained_per_s(self, values: Sequence[int]) -> float | None:
        """Return the growth of ``values`` per second; None before the second poll.

        Decreases, such as by a clear, count as 0.
        """
        if self.seconds <= 0:
            return None
        gains = (max(0, later - earlier) for earlier, later in pairwise(values))
        return sum(gains) / self.seconds

    def slope_per_s(self, values: Sequence[int]) -> float | None:
        """Return the net change of ``values`` per second; None before the second poll."""
        return (values[-1] - values[0]) / self.seconds if self.seconds > 0 else None

    def unchanged_s(self, values: Sequence[int]) -> float:
        """Return for how many seconds, up to the newest poll, ``values`` has not grown."""
        for place in range(len(values) - 1, 0, -1):
            if values[place] > values[place - 1]:
                return (self.times_ns[-1] - self.times_ns[place]) / 1e9
        return self.seconds


@dataclass(frozen=True)
class _Point:
    time_ns: int
    put: int
    tasks: Mapping[str, tuple[int, int, int]]


class Trends:
    """The last `POLLS` polls of each present partition. Not thread-safe.

    Polls less than ``interval_s`` seconds after the last stored poll are skipped.
    """

    def __init__(self, interval_s: float = 0.0) -> None:
        self._interval_ns = int(interval_s * 1e9)
        self._points: dict[str, deque[_Point]] = {}
        self._claiming: OrderedDict[tuple[str, str], None] = OrderedDict()

    def add(self, time_ns: int, partitions: Iterable[PartitionSummary]) -> Mapping[str, Trend]:
        """Add a poll and return the trends; drop those of partitions that are gone."""
        points: dict[str, deque[_Point]] = {}
        for partition in partitions:
            known = self._points.get(partition.partition_id, deque(maxlen=POLLS))
            if known and time_ns <= known[-1].time_ns:  # the clock was set back
                known.clear()
            if known and time_ns < known[-1].time_ns + self._interval_ns:
                points[partition.partition_id] = known
                continue
            tasks = {
                task.name: (task.unclaimed, task.leased + task.acknowledged, task.acknowledged)
                for task in partition.tasks
            }
            known.append(_Point(time_ns, partition.put, tasks))
            points[partition.partition_id] = known
            for name, (_, claimed, _) in tasks.items():
                if claimed:
                    self._claiming[partition.partition_id, name] = None
                    self._claiming.move_to_end((partition.partition_id, name))
        while len(self._claiming) > _MAX_CLAIMING:
            self._claiming.popitem(last=False)
        self._points = points
        return {
            partition_id: _trend(held, self._claimers(partition_id, held[-1].tasks))
            for partition_id, held in points.items()
        }

    def _claimers(self, partition_id: str, tasks: Iterable[str]) -> frozenset[str]:
        return frozenset(name for name in tasks if (partition_id, name) in self._claiming)


def _trend(points: Sequence[_Point], claiming: frozenset[str]) -> Trend:
    return Trend(
        times_ns=tuple(point.time_ns for point in points),
        put=tuple(point.put for point in points),
        tasks={
            name: TaskTrend(
                *zip(*(point.tasks.get(name, (0, 0, 0)) for point in points), strict=True)
            )
            for name in points[-1].tasks
        },
        claiming=claiming,
    )
