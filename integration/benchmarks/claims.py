"""How long a claim of 32 takes as the partition grows.

Rows have one small field. A partition is drained from its first row to its last; where it has many
more rows than claims that are timed, larger claims, which are not timed, lie between them, so that
the timed ones are spread over the whole of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import ray
from integration.benchmarks.harness import Pair, Summary, shuffled_rounds
from integration.benchmarks.systems import TASKS

_FIELD = "sample_mask"
_COUNT = 32
_BLOCK = 10  # claims of one system before it is the other's turn
_DROPPED = 2  # a task's first claims, which create what the store keeps for it


@dataclass(frozen=True)
class Growth:
    """One size of partition.

    Attributes:
        name: as it stands in the names of results.
        rows: in the partition.
        timed: claims to time, for each task.
        tasks: how many tasks drain it, one after the other; the last of all claims without turns.
    """

    name: str
    rows: int
    timed: int
    tasks: int

    @property
    def plan(self) -> list[int]:
        """Sizes of one task's claims in order: those of 32 are timed."""
        skipped = max(0, self.rows // self.timed - _COUNT)
        return [_COUNT, skipped] * self.timed if skipped else [_COUNT] * self.timed


QUICK_GROWTH = (Growth("100k", 100_000, 100, 1),)
FULL_GROWTH = (
    Growth("1k", 1_000, 31, 5),
    Growth("10k", 10_000, 312, 2),
    Growth("100k", 100_000, 500, 1),
)


@dataclass(frozen=True)
class ClaimTimes:
    """The seconds of one system's claims of 32.

    Attributes:
        turns: in turns with the other systems.
        steady: one after the other, by another task.
    """

    turns: Summary
    steady: Summary


def measure_claims(pair: Pair, growth: Growth, systems: Sequence[str]) -> dict[str, ClaimTimes]:
    """Fill a partition in each system and drain them in turns.

    Returns:
        System name to what its claims took.
    """
    partitions = {system: f"claims-{growth.name}-{system}" for system in systems}
    for system, partition in partitions.items():
        ray.get(pair.producer.fill.remote(system, partition, growth.rows, _FIELD))
    pair.settle()
    seconds: dict[str, list[float]] = {system: [] for system in systems}
    block = _BLOCK * (1 if growth.plan[1] == _COUNT else 2)
    starts = range(0, len(growth.plan), block)
    for task in TASKS[: growth.tasks]:
        timed: dict[str, list[float]] = {system: [] for system in systems}
        claimed = dict.fromkeys(systems, 0)
        for start, order in zip(starts, shuffled_rounds(systems, len(starts)), strict=True):
            plan = growth.plan[start : start + block]
            for system in order:
                times, count = ray.get(
                    pair.consumer.claims.remote(system, partitions[system], task, _FIELD, plan)
                )
                claimed[system] += count
                timed[system] += [
                    time for time, size in zip(times, plan, strict=True) if size == _COUNT
                ]
        for system in systems:
            if claimed[system] != sum(growth.plan):
                raise AssertionError(
                    f"{system}: {claimed[system]} of {growth.rows:,} rows claimed by {task!r}; "
                    f"expected {sum(growth.plan)}"
                )
            seconds[system] += timed[system][_DROPPED:]
    steady = {
        system: ray.get(
            pair.consumer.claims.remote(
                system, partition, TASKS[-1], _FIELD, [_COUNT] * growth.timed
            )
        )[0][_DROPPED:]
        for system, partition in partitions.items()
    }
    for system, partition in partitions.items():
        ray.get(pair.producer.end.remote(system, partition))
    return {
        system: ClaimTimes(Summary.of(seconds[system]), Summary.of(steady[system]))
        for system in systems
    }
