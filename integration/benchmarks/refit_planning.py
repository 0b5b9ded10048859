"""How long one receiver of a large fleet plans: 100,000 tensors from 64 trainers to 128 generators.

Nothing moves. What is timed is all that stands between the manifests as they arrive and the first
read: decoding and checking them, the plan, and what has to be verified. The next version of the
same structure comes in brief and keeps the plan. There is no other system that plans from such
tables; the target is two seconds.
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

from refit_mx import TargetTensor, TargetTPLayout, TensorSpec, tp_target
from refit_mx.manifest import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    Manifest,
    ShardColumns,
    Structure,
    TensorTable,
    encode_table,
)
from refit_mx.plan.pieces import in_pieces
from refit_mx.plan.planner import plan_reads
from refit_mx.plan.shards import ShardTable
from refit_mx.transports.tcp import TcpTransport
from refit_mx.verify import row_checks

PLANNING_HEADINGS = ["one of 128 receivers, 100,000 tensors, 64 sources", "p50 s", "IQR", "n"]
TENSORS, SOURCES, TARGETS = 100_000, 64, 128
ROWS, COLUMNS = 1024, 512
_ITEM = 2  # bfloat16
_ROUNDS = 5


@dataclass(frozen=True)
class PlanningResult:
    """What was measured.

    Attributes:
        seconds: by what was done, of each round.
        manifest_bytes: of one source.
        brief_bytes: of one source's next version.
    """

    manifest_bytes: int
    brief_bytes: int
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def rows(self) -> list[list[str]]:
        """For a table with `PLANNING_HEADINGS`."""
        found = []
        for name, seconds in self.seconds.items():
            summary = Summary.of(seconds)
            found.append(
                [name, f"{summary.value:.2f}", f"{summary.spread:.2f}", str(summary.count)]
            )
        sizes = f"{self.manifest_bytes / 1e6:.1f} MB, in brief {self.brief_bytes / 1e6:.1f}"
        return [*found, [f"a manifest has {sizes}", "", "", ""]]

    def entries(self) -> list[Entry]:
        """For the file of results."""
        summary = Summary.of(self.seconds[_ALL])
        name = "refit.plan_100k_64to128.s"
        return [Entry(name, summary.value, "s", None, summary.spread, summary.count)]


_DECODED, _PLANNED, _CHECKS, _ALL, _AGAIN = (
    "manifests decoded and checked",
    "plan",
    "what is verified",
    "all of it",
    "the next version of the same structure",
)


def measure_planning(tell: Callable[[str], None]) -> PlanningResult:
    """Plan, several times.

    Args:
        tell: called with what is measured next.
    """
    tell("planning of 100,000 tensors, 64 to 128")
    specs = [TensorSpec(f"layer.{i}.weight", "bfloat16", (ROWS, COLUMNS)) for i in range(TENSORS)]
    table = encode_table(
        TensorTable(
            [spec.name for spec in specs],
            [spec.dtype for spec in specs],
            [list(spec.shape) for spec in specs],
        )
    )
    offered = [_manifest(len(specs), table, source) for source in range(SOURCES)]
    encoded = [manifest.encode() for manifest in offered]
    briefs = [manifest.brief().encode() for manifest in offered]
    kept = [Structure(each.table_digest, each.table, each.shards) for each in offered]
    targets = [_target(spec, number) for number, spec in enumerate(specs)]
    result = PlanningResult(len(encoded[0]), len(briefs[0]))
    for _ in range(_ROUNDS):
        marks = [time.perf_counter()]
        shards = ShardTable.of([Manifest.decode(data) for data in encoded])
        marks.append(time.perf_counter())
        plan = in_pieces(shards, plan_reads(shards, targets, seed=0), TcpTransport.piece_bytes)
        marks.append(time.perf_counter())
        row_checks(shards, plan)
        marks.append(time.perf_counter())
        assert plan.nbytes == sum(target.nbytes for target in targets)
        for name, first, last in zip((_DECODED, _PLANNED, _CHECKS), marks, marks[1:], strict=False):
            result.seconds[name].append(last - first)
        result.seconds[_ALL].append(marks[-1] - marks[0])
        began = time.perf_counter()
        decoded = [Manifest.decode(data) for data in briefs]
        completed = [each.completed(part) for each, part in zip(decoded, kept, strict=True)]
        assert shards.of_next(completed) is not None
        result.seconds[_AGAIN].append(time.perf_counter() - began)
        del shards, plan
    return result


def _target(spec: TensorSpec, number: int) -> TargetTensor:
    """Of the first generator: rows of most tensors, columns of every hundredth."""
    return tp_target(spec, TargetTPLayout(TARGETS, 0, shard_axis=number % 100 == 99))


def _manifest(count: int, table: tuple[bytes, bytes], source: int) -> Manifest:
    """Even rows of every tensor, as FSDP has them."""
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
