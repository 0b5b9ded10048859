"""Interleaved repetitions of all systems, their samples and ratios."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any  # Any: Ray handles have no static types

import ray
from integration.benchmarks.cases import Case
from integration.benchmarks.summary import Summary
from integration.benchmarks.systems import Operation
from integration.benchmarks.worker import Timed

SEED = 20_260
_AFTER_PUT = (
    Operation.GET,
    Operation.SLICES8,
    Operation.ONE_FIELD,
    Operation.WRITE_BACK,
    Operation.CLAIM_32,
    Operation.CLAIM_ALL,
)


@dataclass
class Samples:
    """Samples by case, system and operation; the n-th of each belongs to the n-th round.

    Attributes:
        seconds: duration of the operation.
        faults: pages that were touched for the first time during the operation.
    """

    seconds: dict[tuple[str, str, Operation], list[float]] = field(
        default_factory=lambda: defaultdict(list)
    )
    faults: dict[tuple[str, str, Operation], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def has(self, case: str, system: str, operation: Operation) -> bool:
        """Return True if the operation was measured."""
        return (case, system, operation) in self.seconds

    def summary(self, case: str, system: str, operation: Operation) -> Summary:
        """Summarize the seconds of one operation."""
        return Summary.of(self.seconds[case, system, operation])

    def ratio(self, case: str, operation: Operation, *, over: str, under: str) -> Summary:
        """Return the duration of ``over`` divided by that of ``under``.

        The value is the ratio of the two medians; the spread is that of the ratios per round.
        """
        above = self.seconds[case, over, operation]
        below = self.seconds[case, under, operation]
        return Summary.of_ratio(above, below)


@dataclass(frozen=True)
class Pair:
    """Producer and consumer process, connected to the same systems.

    Attributes:
        producer: handle of a `Worker`.
        consumer: handle of another `Worker`.
        operations: system name to its operations.
    """

    producer: Any
    consumer: Any
    operations: Mapping[str, frozenset[Operation]]

    def freeze_garbage(self) -> None:
        """Freeze garbage collection in both processes: see `freeze_garbage`."""
        ray.get([self.producer.freeze_garbage.remote(), self.consumer.freeze_garbage.remote()])


def shuffled_rounds(systems: Sequence[str], repetitions: int) -> list[list[str]]:
    """Return the order of the systems in each round, shuffled per round."""
    order = random.Random(SEED)
    return [order.sample(list(systems), len(systems)) for _ in range(repetitions)]


def measure_case(
    pair: Pair,
    case: Case,
    systems: Sequence[str],
    samples: Samples,
    *,
    repetitions: int,
    warm_ups: int,
    freeze_stores: Callable[[], None],
) -> None:
    """Run every operation of every system on one case, and check every system's answer once.

    Args:
        pair: the processes.
        case: the size of the batch.
        systems: names of the systems, in any order.
        samples: receives the seconds of the measured rounds.
        repetitions: number of measured rounds.
        warm_ups: number of rounds before them, at least one; the first checks the answers.
        freeze_stores: called once before the measured rounds, for the processes of the stores.
    """
    ray.get([pair.producer.prepare.remote(case), pair.consumer.prepare.remote(case)])
    for number, order in enumerate(shuffled_rounds(systems, warm_ups + repetitions)):
        if number == warm_ups:
            pair.freeze_garbage()
            freeze_stores()
        for system in order:
            partition = f"{case.name}-{system}-{number}"
            timed = _run_round(pair, system, case, partition, check=number == 0)
            if number >= warm_ups:
                for operation, done in timed.items():
                    samples.seconds[case.name, system, operation].append(done.seconds)
                    samples.faults[case.name, system, operation].append(done.faults)


def _run_round(
    pair: Pair, system: str, case: Case, partition: str, *, check: bool
) -> dict[Operation, Timed]:
    operations = pair.operations[system]
    producer, consumer = pair.producer, pair.consumer
    ray.get(producer.begin.remote(system, partition, case.rows))
    put: Timed = ray.get(producer.run.remote(system, Operation.PUT, partition, None))
    timed = {Operation.PUT: put}
    for operation in _AFTER_PUT:
        if operation in operations:
            run = consumer.run.remote(system, operation, partition, put.handle)
            timed[operation] = ray.get(run)
    if Operation.GET in timed:
        get = timed[Operation.GET]
        timed[Operation.PUT_GET] = Timed(put.seconds + get.seconds, put.faults + get.faults, None)
        if check:
            ray.get(consumer.check.remote(system, partition, put.handle))
    if Operation.CLEAR in operations:
        timed[Operation.CLEAR] = ray.get(
            producer.run.remote(system, Operation.CLEAR, partition, None)
        )
    ray.get(producer.end.remote(system, partition))
    return timed
