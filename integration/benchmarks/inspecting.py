"""Cost of inspecting a large partition, and its cost for concurrent puts.

Only the data plane has an inspector. Puts of 32 rows with one small field are timed twice: alone,
and while another process requests summaries, counts and pages without a pause.
"""

from __future__ import annotations

import ray
from integration.benchmarks.harness import Pair
from integration.benchmarks.summary import Summary
from integration.benchmarks.systems import TASKS

_ROWS = 100_000
_FIELD = "sample_mask"
_INSPECTIONS = 100
_PUTS = 200


def measure_inspecting(pair: Pair, system: str) -> dict[str, Summary]:
    """Fill a partition of 100,000 rows and inspect it.

    Returns:
        Name of each operation to the summary of its seconds.
    """
    partition = f"inspected-{system}"
    ray.get(pair.producer.fill.remote(system, partition, _ROWS, _FIELD, list(TASKS)))
    pair.freeze_garbage()
    seconds = ray.get(pair.consumer.inspect.remote(system, partition, _FIELD, _INSPECTIONS, 0))
    seconds["put32"] = ray.get(
        pair.producer.put_small.remote(system, partition, _FIELD, "alone", _PUTS)
    )
    # The consumer inspects until the producer has put its last row.
    inspecting = pair.consumer.inspect.remote(
        system, partition, _FIELD, _INSPECTIONS, _ROWS + 2 * 32 * _PUTS
    )
    seconds["put32_inspected"] = ray.get(
        pair.producer.put_small.remote(system, partition, _FIELD, "inspected", _PUTS)
    )
    ray.get(inspecting)
    ray.get(pair.producer.end.remote(system, partition))
    return {name: Summary.of(values) for name, values in seconds.items()}
