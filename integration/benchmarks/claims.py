"""How long a claim of 32 takes as the partition grows, among claims of another system and alone.

Rows have one small field. In turns, one claim of ours follows one of TransferQueue's and the other
way round. So every claim finds its own system asleep and the caches full of other work, as it does
in a trainer that claims once a step. The partition is drained from its first row to its last; where
it has many more rows than claims that are timed, larger claims, which are not timed, lie between
them, so that the timed ones are spread over the whole of it.

Steady is one claim right after the other, without larger ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import ray
from integration.benchmarks.harness import Pair
from integration.benchmarks.summary import Summary

_FIELD = "sample_mask"
_COUNT = 32
_BLOCK = 10  # timed claims between two larger ones
_DROPPED = 2  # a task's first claims, which create what the store keeps for it


@dataclass(frozen=True)
class Growth:
    """One size of partition.

    Attributes:
        name: as it stands in the names of results.
        rows: in the partition.
        timed: claims to time, for each task.
        tasks: how many tasks drain it in turns, one after the other, and as many again steadily.
    """

    name: str
    rows: int
    timed: int
    tasks: int

    @property
    def plan(self) -> list[int]:
        """Sizes of one task's claims in turns, in order: those of 32 are timed."""
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
    """The seconds of one system's claims of 32, in their order.

    Attributes:
        turns: in turns with the other systems; the n-th of each system follow each other.
        steady: one after the other, by other tasks; empty where that was not measured.
    """

    turns: list[float]
    steady: list[float]

    @property
    def regimes(self) -> dict[str, Summary]:
        """By regime that was measured."""
        measured = {"in turns": self.turns, "steady": self.steady}
        return {name: Summary.of(seconds) for name, seconds in measured.items() if seconds}


def times_as_long(over: ClaimTimes, under: ClaimTimes) -> Summary:
    """How many times as long one system's claims take as another's, in turns.

    The value is the ratio of the two medians; the spread is that of the ratios of single turns.
    """
    turns = Summary.of(list(np.array(over.turns) / np.array(under.turns)))
    value = float(np.median(over.turns) / np.median(under.turns))
    return Summary(value, turns.p99, turns.spread, turns.count)


def measure_claims(
    pair: Pair, growth: Growth, systems: Sequence[str], steady: Sequence[str]
) -> dict[str, ClaimTimes]:
    """Fill a partition in each system and drain them.

    Args:
        pair: the processes.
        growth: the size of partition.
        systems: those that claim in turns.
        steady: those of them that claim steadily as well.

    Returns:
        System name to what its claims took.
    """
    partitions = {system: f"claims-{growth.name}-{system}" for system in systems}
    tasks = [f"turns-{number}" for number in range(growth.tasks)]
    steady_tasks = [f"steady-{number}" for number in range(growth.tasks)]
    for system, partition in partitions.items():
        ray.get(
            pair.producer.fill.remote(
                system, partition, growth.rows, _FIELD, [*tasks, *steady_tasks]
            )
        )
    pair.settle()
    found = {system: ClaimTimes([], []) for system in systems}
    for task in tasks:
        for system, seconds in _drain(pair, partitions, task, growth.plan).items():
            found[system].turns.extend(seconds)
    for system in steady:
        for task in steady_tasks:
            alone = _drain(pair, {system: partitions[system]}, task, [_COUNT] * growth.timed)
            found[system].steady.extend(alone[system])
    for system, partition in partitions.items():
        ray.get(pair.producer.end.remote(system, partition))
    return found


def _drain(
    pair: Pair, partitions: Mapping[str, str], task: str, plan: list[int]
) -> dict[str, list[float]]:
    """By system, the seconds of one task's timed claims."""
    answers = ray.get(pair.consumer.claims.remote(dict(partitions), task, _FIELD, plan))
    found = {}
    for system, (seconds, claimed) in answers.items():
        if claimed != sum(plan):
            raise AssertionError(
                f"{system}: {task!r} claimed {claimed:,} rows; expected {sum(plan):,}"
            )
        timed = [second for second, size in zip(seconds, plan, strict=True) if size == _COUNT]
        found[system] = timed[_DROPPED:]
    return found
