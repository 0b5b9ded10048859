"""Duration of a claim of 32 rows as the partition grows, cold and warm.

Rows have one small field. Cold claims alternate between the systems. So every claim meets an idle
system and caches full of other work, as in a trainer that claims once a step. The partition is
drained from its first row to its last. In a large partition, larger untimed claims spread the timed
ones over all rows.

Warm claims follow each other directly, without larger ones in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from integration.benchmarks.harness import Pair
from integration.benchmarks.summary import Summary

_FIELD = "sample_mask"
_COUNT = 32
_BLOCK = 10  # timed claims between two larger ones
_DROPPED = 2  # a task's first claims, in which the store sets up the task


@dataclass(frozen=True)
class Growth:
    """Size of a partition, and the claims on it.

    Attributes:
        name: part of the names of results.
        rows: number of rows.
        timed: number of timed claims per task.
        tasks: number of tasks that drain it with cold claims, and as many with warm ones.
    """

    name: str
    rows: int
    timed: int
    tasks: int

    @property
    def plan(self) -> list[int]:
        """Sizes of one task's cold claims, in order; those of 32 are timed."""
        between = (self.rows // self.timed - _COUNT) * _BLOCK
        plan = []
        for start in range(0, self.timed, _BLOCK):
            plan += [_COUNT] * min(_BLOCK, self.timed - start)
            if between > 0 and start + _BLOCK <= self.timed:
                plan.append(between)
        return plan


QUICK_GROWTH = (Growth("100k", 100_000, 200, 1),)
FULL_GROWTH = (
    Growth("1k", 1_000, 31, 12),
    Growth("10k", 10_000, 312, 2),
    Growth("100k", 100_000, 500, 1),
)


@dataclass(frozen=True)
class ClaimTimes:
    """Durations of one system's claims of 32, in seconds and in their order.

    Attributes:
        cold: cold claims; the n-th claims of all systems are neighbors in time.
        warm: warm claims, of other tasks; empty if not measured.
    """

    cold: list[float]
    warm: list[float]

    @property
    def regimes(self) -> dict[str, Summary]:
        """Summary of each measured regime."""
        measured = {"cold": self.cold, "warm": self.warm}
        return {name: Summary.of(seconds) for name, seconds in measured.items() if seconds}


def cold_ratio(over: ClaimTimes, under: ClaimTimes) -> Summary:
    """Return the duration of ``over``'s cold claims, divided by that of ``under``'s.

    The value is the ratio of the two medians; the spread is that of the ratios of single claims.
    """
    return Summary.of_ratio(over.cold, under.cold)


def measure_claims(
    pair: Pair, growth: Growth, systems: Sequence[str], warm: Sequence[str]
) -> dict[str, ClaimTimes]:
    """Fill a partition in each system and drain them.

    Args:
        pair: the processes.
        growth: the size of the partition.
        systems: systems that make cold claims.
        warm: systems among them that also make warm claims.

    Returns:
        System name to the durations of its claims.
    """
    partitions = {system: f"claims-{growth.name}-{system}" for system in systems}
    tasks = [f"cold-{number}" for number in range(growth.tasks)]
    warm_tasks = [f"warm-{number}" for number in range(growth.tasks)]
    for system, partition in partitions.items():
        ray.get(
            pair.producer.fill.remote(system, partition, growth.rows, _FIELD, [*tasks, *warm_tasks])
        )
    pair.freeze_garbage()
    times = {system: ClaimTimes([], []) for system in systems}
    for task in tasks:
        for system, seconds in _drain(pair, partitions, task, growth.plan).items():
            times[system].cold.extend(seconds)
    for system in warm:
        for task in warm_tasks:
            alone = _drain(pair, {system: partitions[system]}, task, [_COUNT] * growth.timed)
            times[system].warm.extend(alone[system])
    for system, partition in partitions.items():
        ray.get(pair.producer.end.remote(system, partition))
    return times


def _drain(
    pair: Pair, partitions: Mapping[str, str], task: str, plan: list[int]
) -> dict[str, list[float]]:
    """Return the seconds of one task's timed claims by system."""
    answers = ray.get(pair.consumer.claims.remote(dict(partitions), task, _FIELD, plan))
    timed = {}
    for system, (seconds, claimed) in answers.items():
        if claimed != sum(plan):
            raise AssertionError(
                f"{system}: {task!r} claimed {claimed:,} rows; expected {sum(plan):,}"
            )
        small = [second for second, size in zip(seconds, plan, strict=True) if size == _COUNT]
        timed[system] = small[_DROPPED:]
    return timed
