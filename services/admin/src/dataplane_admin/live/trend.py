"""How a partition's numbers went over the last polls."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dataplane_core import PartitionSummary

POLLS = 120
"""How many polls are remembered."""

_MOST_CLAIMING = 10_000


@dataclass(frozen=True)
class TaskTrend:
    """One task's numbers at the moments of its partition's trend."""

    unclaimed: tuple[int, ...]
    taken: tuple[int, ...]
    """Leased and settled together."""
    settled: tuple[int, ...]


@dataclass(frozen=True)
class Trend:
    """One partition's numbers, the oldest poll first.

    Attributes:
        times_ns: when it was read, in nanoseconds since 1970.
        put: samples put since it was registered, at each of those moments.
        tasks: task to its numbers.
        claiming: tasks that took samples at any poll, also in a partition of this name before.
    """

    times_ns: tuple[int, ...] = ()
    put: tuple[int, ...] = ()
    tasks: Mapping[str, TaskTrend] = field(default_factory=dict)
    claiming: frozenset[str] = frozenset()

    @property
    def seconds(self) -> float:
        """The time it covers."""
        return (self.times_ns[-1] - self.times_ns[0]) / 1e9 if self.times_ns else 0.0

    def gained_per_s(self, values: Sequence[int]) -> float | None:
        """What was added to ``values`` a second; None until two polls are there.

        What was taken away, by a clear for example, does not count against it.
        """
        if self.seconds <= 0:
            return None
        gains = (max(0, later - earlier) for earlier, later in pairwise(values))
        return sum(gains) / self.seconds

    def slope_per_s(self, values: Sequence[int]) -> float | None:
        """By how much ``values`` grew a second; None until two polls are there."""
        return (values[-1] - values[0]) / self.seconds if self.seconds > 0 else None

    def unchanged_s(self, values: Sequence[int]) -> float:
        """For how many seconds, up to the newest poll, nothing was added to ``values``."""
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
    """Remembers the last `POLLS` polls of each partition that is there. Not thread-safe."""

    def __init__(self) -> None:
        self._points: dict[str, deque[_Point]] = {}
        self._claiming: OrderedDict[tuple[str, str], None] = OrderedDict()

    def add(self, time_ns: int, partitions: Iterable[PartitionSummary]) -> Mapping[str, Trend]:
        """The trends with one more poll; those of partitions that are gone are forgotten."""
        points: dict[str, deque[_Point]] = {}
        for one in partitions:
            known = self._points.get(one.partition_id, deque(maxlen=POLLS))
            if known and time_ns <= known[-1].time_ns:  # the clock was set back
                known.clear()
            tasks = {
                task.name: (task.unclaimed, task.leased + task.settled, task.settled)
                for task in one.tasks
            }
            known.append(_Point(time_ns, one.put, tasks))
            points[one.partition_id] = known
            for name, (_, taken, _) in tasks.items():
                if taken:
                    self._claiming[one.partition_id, name] = None
                    self._claiming.move_to_end((one.partition_id, name))
        while len(self._claiming) > _MOST_CLAIMING:
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
