"""Puts and gets from another node, against those from the storage unit's node.

The nodes are two simulated machines of `integration.cluster`: they share processors, but neither
memory nor network. The storage unit and the driver are on the first. A client on each node does the
same in shuffled rounds. This module is also the driver's program: it prints its samples as JSON.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # Any: a configuration, and Ray handles

import ray
import torch
from integration.benchmarks.growth_sample import (
    BULK_BYTES,
    BULK_ROW_BYTES,
    BULK_ROWS,
    PER_TOKEN,
    ROWS,
    TASK,
    TOKENS,
)
from integration.benchmarks.growth_store import growing_config, small_columns
from integration.benchmarks.results_file import Entry
from integration.benchmarks.summary import Summary
from integration.cluster.machines import Machines
from integration.cluster.ray_nodes import RayNodes

from dataplane_tq import TQDataPlaneClient

SEED = 20_264
NODES_HEADINGS = [
    "operation",
    "same node p50 ms",
    "p99 ms",
    "other node p50 ms",
    "p99 ms",
    "other/same (IQR)",
    "MB",
    "GB/s same",
    "other",
]

_ROOT = Path(__file__).parents[2]
_SAME, _OTHER = "same", "other"
_NAMES = ("left", "right")
_ROUNDS, _WARM_UPS, _TIMES = 12, 2, 5
_TIMEOUT_S = 180.0
_PARTITION = "growth"


@dataclass(frozen=True)
class NodesResult:
    """Durations of operations from both nodes.

    Attributes:
        seconds: "same" or "other" node to its operations, each with its durations; the n-th of both
            nodes are of the same round.
    """

    seconds: Mapping[str, Mapping[str, list[float]]]

    def _ratio(self, operation: str) -> Summary:
        above, below = (self.seconds[node][operation] for node in (_OTHER, _SAME))
        return Summary.of_ratio(above, below)

    def rows(self) -> list[list[str]]:
        """Return rows for a table with `NODES_HEADINGS`."""
        rows = []
        for operation in self.seconds[_SAME]:
            same, other = (Summary.of(self.seconds[node][operation]) for node in (_SAME, _OTHER))
            ratio = self._ratio(operation)
            moved = ["", "", ""]
            if operation.endswith("_bulk"):
                rates = (f"{BULK_BYTES / each.value / 1e9:.2f}" for each in (same, other))
                moved = [f"{BULK_BYTES / 1e6:.0f}", *rates]
            times = (same.value, same.p99, other.value, other.p99)
            cells = [f"{seconds * 1e3:.3g}" for seconds in times]
            rows.append([operation, *cells, f"{ratio.value:.2f} ({ratio.spread:.2f})", *moved])
        return rows

    def entries(self) -> list[Entry]:
        """Return entries for the file of results."""
        entries = []
        for operation in self.seconds[_SAME]:
            name = f"growth.nodes_{operation}"
            for node in (_SAME, _OTHER):
                each = Summary.of(self.seconds[node][operation])
                entries.append(Entry.ms(f"{name}.{node}_p50_ms", each))
                entries.append(Entry.p99_ms(f"{name}.{node}_p99_ms", each))
            ratio = self._ratio(operation)
            entries.append(Entry.of(f"{name}.ratio_vs_same_node", ratio, "x", baseline=_SAME))
        return entries


def measure_nodes(announce: Callable[[str], None]) -> NodesResult:
    """Start two machines with a Ray node each, and measure.

    Args:
        announce: called with the title of the part.

    Raises:
        MachinesError: this process may not create machines, or the driver failed.
    """
    announce("growth: two nodes")
    folder = Path(tempfile.mkdtemp(prefix="gn-"))  # a short path: Ray's sockets are below it
    try:
        with Machines(*_NAMES) as machines:
            nodes = RayNodes(machines, folder)
            printed = nodes.head.run(
                [sys.executable, "-m", "integration.benchmarks.growth_nodes", nodes.address],
                env={**nodes.environment, "PYTHONPATH": str(_ROOT)},  # it starts in another folder
                timeout_s=_TIMEOUT_S,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return NodesResult(json.loads(printed.splitlines()[-1]))


class _Side:
    """Actor with a client on one node."""

    def __init__(self, cfg: Mapping[str, Any], name: str) -> None:
        self._client = TQDataPlaneClient(cfg, bootstrap=False)
        self._name = name
        self._number = 0
        self._small = small_columns(ROWS)
        self._bulk = torch.randint(0, 256, (BULK_ROWS, BULK_ROW_BYTES), dtype=torch.uint8)

    def run(self) -> dict[str, list[float]]:
        """Run every operation several times; return the seconds of each."""
        seconds: dict[str, list[float]] = {}

        def timed(
            operation: str, call: Callable[..., Any], *arguments: Any, **keywords: Any
        ) -> Any:
            began = time.perf_counter()
            answer = call(*arguments, **keywords)
            seconds.setdefault(operation, []).append(time.perf_counter() - began)
            return answer

        client, fields, bulk = self._client, list(self._small), {"bulk": self._bulk}
        cut = {"lengths": [TOKENS] * ROWS, "ragged": list(PER_TOKEN)}
        needed = ["input_ids"]
        for _ in range(_TIMES):
            ids, bulk_ids = self._ids(ROWS), self._ids(BULK_ROWS)
            timed("put32", client.put_columns, ids, _PARTITION, self._small, **cut)
            claimed = timed("claim32", client.claim_meta, _PARTITION, TASK, needed, ROWS)
            assert sorted(claimed.sample_ids) == sorted(ids)
            timed("get32", client.get_columns, ids, _PARTITION, fields)
            timed("put_bulk", client.put_columns, bulk_ids, _PARTITION, bulk)
            got = timed("get_bulk", client.get_columns, bulk_ids, _PARTITION, ["bulk"])
            assert torch.equal(got["bulk"], self._bulk)
            client.clear_samples([*ids, *bulk_ids], _PARTITION, force=True)
        return seconds

    def _ids(self, count: int) -> list[str]:
        self._number += 1
        return [f"{self._name}-{self._number:05d}-{row}" for row in range(count)]


def main(address: str) -> None:
    """Measure on a cluster, and print the samples as JSON."""
    ray.init(address=address, namespace="growth", logging_level="ERROR", log_to_driver=False)
    same, other = _NAMES
    cfg = growing_config(units=1, unit_bytes=512 << 20, capacity=10_000, unit_resources={same: 1})
    seconds: dict[str, dict[str, list[float]]] = {_SAME: {}, _OTHER: {}}
    order = random.Random(SEED)
    with TQDataPlaneClient(cfg, bootstrap=True) as client:
        client.register_partition(_PARTITION, [], 0, [TASK])
        actor: Any = ray.remote(_Side)
        sides = {
            node: actor.options(num_cpus=0.1, resources={name: 1}).remote(cfg, node)
            for node, name in ((_SAME, same), (_OTHER, other))
        }
        for number in range(_WARM_UPS + _ROUNDS):
            for node in order.sample(list(sides), len(sides)):
                timed = ray.get(sides[node].run.remote(), timeout=_TIMEOUT_S)
                for operation, values in timed.items() if number >= _WARM_UPS else ():
                    seconds[node].setdefault(operation, []).extend(values)
    ray.shutdown()
    print(json.dumps(seconds))


if __name__ == "__main__":
    main(sys.argv[1])
