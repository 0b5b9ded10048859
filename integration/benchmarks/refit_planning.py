"""Planning of one receiver in a large fleet: 100,000 tensors, 64 trainers, 128 generators.

No weights move. The benchmark times all work between the receipt of the manifests and the first
read: decoding and checking them, the plan, and the list of digests to verify. The manifests of a
next version with the same structure are brief, and reuse the plan. No other system plans from such
tables, so there is no baseline; the target is two seconds. Imports internals: the parts of a fetch
are timed one by one.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from integration.benchmarks.results_file import Entry
from integration.benchmarks.summary import Summary

from refit_mx import (
    Manifest,
    ShardTable,
    TargetTensor,
    TargetTPLayout,
    TensorSpec,
    plan_reads,
    tp_target,
)
from refit_mx.manifest.format import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    ShardColumns,
    Structure,
    TensorTable,
    encode_table,
)
from refit_mx.plan.block_splits import split_at_blocks
from refit_mx.receive.verify import row_checks
from refit_mx.transports.tcp import TcpTransport

PLANNING_HEADINGS = ["one of 128 receivers, 100,000 tensors, 64 sources", "p50 s", "IQR", "n"]
TENSORS, SOURCES, TARGETS = 100_000, 64, 128
ROWS, COLUMNS = 1024, 512
_ITEM = 2  # bfloat16
_ROUNDS = 5


@dataclass(frozen=True)
class PlanningResult:
    """Result of the planning benchmark.

    Attributes:
        manifest_bytes: size of one source's manifest.
        brief_bytes: size of the manifest of its next version.
        seconds: operation to its duration in each round.
    """

    manifest_bytes: int
    brief_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def rows(self) -> list[list[str]]:
        """Return rows for a table with `PLANNING_HEADINGS`."""
        rows = []
        for name, seconds in self.seconds.items():
            summary = Summary.of(seconds)
            rows.append([name, f"{summary.value:.2f}", f"{summary.spread:.2f}", str(summary.count)])
        sizes = f"{self.manifest_bytes / 1e6:.1f} MB, brief {self.brief_bytes / 1e6:.1f} MB"
        return [*rows, [f"size of a manifest: {sizes}", "", "", ""]]

    def entries(self) -> list[Entry]:
        """Return entries for the file of results."""
        return [Entry.of("refit.plan_100k_64to128.s", Summary.of(self.seconds[_TOTAL]), "s")]


_DECODE, _PLAN, _CHECKS, _TOTAL, _NEXT = (
    "decode and check manifests",
    "plan",
    "list digests to verify",
    "total",
    "next version with the same structure",
)


def measure_planning(announce: Callable[[str], None]) -> PlanningResult:
    """Plan repeatedly.

    Args:
        announce: called with the title of the part.
    """
    announce("planning of 100,000 tensors, 64 to 128")
    specs = [TensorSpec(f"layer.{i}.weight", "bfloat16", (ROWS, COLUMNS)) for i in range(TENSORS)]
    table = encode_table(
        TensorTable(
            [spec.name for spec in specs],
            [spec.dtype for spec in specs],
            [list(spec.shape) for spec in specs],
        )
    )
    manifests = [_manifest(len(specs), table, source) for source in range(SOURCES)]
    encoded = [manifest.encode() for manifest in manifests]
    briefs = [manifest.brief().encode() for manifest in manifests]
    structures = [Structure(each.table_digest, each.table, each.shards) for each in manifests]
    targets = [_target(spec, number) for number, spec in enumerate(specs)]
    result = PlanningResult(len(encoded[0]), len(briefs[0]))
    for _ in range(_ROUNDS):
        marks = [time.perf_counter()]
        shards = ShardTable.of([Manifest.decode(data) for data in encoded])
        marks.append(time.perf_counter())
        plan = split_at_blocks(
            shards, plan_reads(shards, targets, seed=0), TcpTransport.max_read_bytes
        )
        marks.append(time.perf_counter())
        row_checks(shards, plan)
        marks.append(time.perf_counter())
        assert plan.nbytes == sum(target.nbytes for target in targets)
        for name, first, last in zip((_DECODE, _PLAN, _CHECKS), marks, marks[1:], strict=False):
            result.seconds[name].append(last - first)
        result.seconds[_TOTAL].append(marks[-1] - marks[0])
        began = time.perf_counter()
        decoded = [Manifest.decode(data) for data in briefs]
        completed = [each.completed(part) for each, part in zip(decoded, structures, strict=True)]
        assert shards.for_next_version(completed) is not None
        result.seconds[_NEXT].append(time.perf_counter() - began)
        del shards, plan
    return result


def _target(spec: TensorSpec, number: int) -> TargetTensor:
    """Return the first generator's part: rows of a tensor, or columns of every hundredth one."""
    return tp_target(spec, TargetTPLayout(TARGETS, 0, shard_axis=number % 100 == 99))


def _manifest(count: int, table: tuple[bytes, bytes], source: int) -> Manifest:
    """Return the manifest of a source with equal runs of rows of every tensor, as FSDP has them."""
    height = ROWS // SOURCES
    nbytes = height * COLUMNS * _ITEM
    start, shape = np.zeros((count, 2), "<i8"), np.zeros((count, 2), "<i8")
    start[:, 0] = source * height
    shape[:] = height, COLUMNS
    shards = ShardColumns(
        axes=2,
        tensor=np.arange(count, dtype="<i4").tobytes(),
        start=start.tobytes(),
        shape=shape.tobytes(),
        offset=(np.arange(count, dtype="<i8") * nbytes).tobytes(),
    )
    structure = Structure(*table, shards).encode()
    return Manifest(
        model_name="model",
        version_id="v1",
        source_slot_id=f"fsdp-{source}",
        worker_id=f"worker-{source}",
        incarnation=f"life-{source}",
        endpoint=f"10.0.0.{source}:7000",
        registry=None,
        arena_address=4096,
        arena_bytes=count * nbytes,
        nixl=None,
        table_digest=table[0],
        table=table[1],
        shards=shards,
        structure_digest=hashlib.sha256(structure).digest(),
        digests=bytes(count * -(-nbytes // BLOCK_BYTES) * DIGEST_BYTES),
    )
