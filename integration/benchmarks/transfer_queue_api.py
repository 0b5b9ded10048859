"""Speed of TransferQueue's own API on the packed backend and on SimpleStorage.

``python -m integration.benchmarks.transfer_queue_api`` starts one Ray per backend, each with a
TransferQueue started by ``transfer_queue.init`` and four worker processes. In every round, one
worker puts a batch, gets it back and puts single rows; then all four do so at once. The order of
the backends is random each time. A third job stores nothing: its puts take what is TransferQueue's
own. It prints durations and their ratios, and merges them into ``build/bench.json``.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
from integration.benchmarks.results_file import Entry, merge_entries
from integration.benchmarks.spawned import Spawned
from integration.benchmarks.summary import Summary
from integration.benchmarks.transfer_queue_job import (
    CASE,
    CONFIGURATIONS,
    NOTHING,
    UNITS,
    WORKERS,
    serve,
)

SEED = 20_261


def measure(rounds: int, warm_ups: int) -> dict[tuple[str, int, str], list[float]]:
    """Return the median seconds of the workers, per round, by backend, worker count and call."""
    sides = {name: Spawned(name, serve, name) for name in (*CONFIGURATIONS, NOTHING)}
    seconds: dict[tuple[str, int, str], list[float]] = {}
    order = random.Random(SEED)
    try:
        for side in sides.values():
            side.ready  # noqa: B018  # waits for it
        for number in range(warm_ups + rounds):
            for count in (1, WORKERS):
                for name in order.sample(list(sides), len(sides)):
                    for call, durations in sides[name].ask((f"{number}-{count}", count)).items():
                        if number >= warm_ups:
                            key = (name, count, call)
                            seconds.setdefault(key, []).append(float(np.median(durations)))
    finally:
        for side in sides.values():
            side.stop()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--warm-ups", type=int, default=3)
    parser.add_argument("--json", type=Path, default=Path("build/bench.json"))
    options = parser.parse_args()
    seconds = measure(options.rounds, options.warm_ups)
    print(f"{CASE.title}, {UNITS} units, {options.rounds} rounds")
    entries: list[Entry] = []
    for count in (1, WORKERS):
        for call in ("put", "put_row", "get"):
            simple, packed = (seconds[name, count, call] for name in CONFIGURATIONS)
            ratio = Summary.of_ratio(simple, packed)
            name = f"tq_api.{call}_{count}"
            entries += [
                Entry.ms(f"{name}.simple_ms", Summary.of(simple)),
                Entry.ms(f"{name}.packed_ms", Summary.of(packed)),
                Entry.of(f"{name}.ratio_vs_packed", ratio, "x", baseline="packed"),
            ]
            print(
                f"{call} by {count} at once: SimpleStorage {np.median(simple) * 1000:.1f} ms, "
                f"packed {np.median(packed) * 1000:.1f} ms, {ratio.value:.1f} times as fast "
                f"(IQR {ratio.spread:.1f})"
            )
        for call in ("put", "put_row"):
            nothing = seconds[NOTHING, count, call]
            entries.append(Entry.ms(f"tq_api.{call}_{count}.nothing_ms", Summary.of(nothing)))
            print(f"{call} by {count} at once, storing nothing: {np.median(nothing) * 1000:.1f} ms")
    merge_entries(options.json, entries)


if __name__ == "__main__":
    main()
