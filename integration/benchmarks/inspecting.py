"""What it costs to look at a large partition, and what that costs those who put.

Only ours has an inspector. Puts of 32 rows with one small field are timed twice: alone, and while
another process asks for summaries, counts and pages without a pause.
"""

from __future__ import annotations

import ray
from integration.benchmarks.harness import Pair
from integration.benchmarks.summary import Summary
from integration.benchmarks.systems import TASKS

_ROWS = 100_000
_FIELD = "sample_mask"
_LOOKS = 100
_PUTS = 200


def measure_inspecting(pair: Pair, system: str) -> dict[str, Summary]:
    """Fill a partition of 100,000 rows and look at it.

    Returns:
        What was timed to its summary, in seconds.
    """
    partition = f"inspected-{system}"
    ray.get(pair.producer.fill.remote(system, partition, _ROWS, _FIELD, list(TASKS)))
    pair.settle()
    seconds = ray.get(pair.consumer.inspect.remote(system, partition, _FIELD, _LOOKS, 0))
    seconds["put32"] = ray.get(
        pair.producer.put_small.remote(system, partition, _FIELD, "alone", _PUTS)
    )
    # It goes on looking until the producer has put its last row.
    looking = pair.consumer.inspect.remote(
        system, partition, _FIELD, _LOOKS, _ROWS + 2 * 32 * _PUTS
    )
    seconds["put32_inspected"] = ray.get(
        pair.producer.put_small.remote(system, partition, _FIELD, "inspected", _PUTS)
    )
    ray.get(looking)
    ray.get(pair.producer.end.remote(system, partition))
    return {name: Summary.of(values) for name, values in seconds.items()}
