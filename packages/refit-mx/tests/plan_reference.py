"""A reference for plans: published tensors, sources that hold boxes of them, and reads carried out
byte by byte. Slow and simple on purpose; it shares no code with the planner.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from refit_mx.manifest import (
    BLOCK_BYTES,
    Manifest,
    Registry,
    ShardColumns,
    TensorTable,
    encode_table,
)
from refit_mx.plan.planner import Plan, plan_reads
from refit_mx.plan.shards import ShardTable
from refit_mx.plan.targets import TargetTensor
from refit_mx.tensor_types import Box, TensorSpec

Bytes = npt.NDArray[np.uint8]
Held = Sequence[tuple[str, Box]]


@dataclass
class Model:
    """Published tensors: the bytes of each, ``shape + (item size,)``."""

    specs: dict[str, TensorSpec]
    content: dict[str, Bytes]

    @classmethod
    def of(cls, specs: Iterable[TensorSpec], seed: int = 0) -> Model:
        """Random bytes, so that an element in a wrong place is noticed."""
        rng = np.random.default_rng(seed)
        named = {spec.name: spec for spec in specs}
        return cls(
            named,
            {
                name: rng.integers(0, 256, (*spec.shape, spec.item_size), dtype=np.uint8)
                for name, spec in named.items()
            },
        )


@dataclass
class Sources:
    """Sources of one version, and the arena of each."""

    manifests: list[Manifest]
    arenas: list[Bytes]
    held: list[Held]


def manifest(
    specs: Sequence[TensorSpec],
    held: Held,
    offsets: Sequence[int],
    arena: Bytes,
    *,
    number: int = 0,
    host: str = "127.0.0.1",
    version_id: str = "v1",
    model_name: str = "model",
    registry: Registry | None = None,
) -> Manifest:
    """Of a source that has ``held`` at ``offsets`` of its arena."""
    rows = {spec.name: row for row, spec in enumerate(specs)}
    axes = max((len(spec.shape) for spec in specs), default=0)
    start = [(*box.start, *(0,) * (axes - len(box.start))) for _, box in held]
    shape = [(*box.shape, *(1,) * (axes - len(box.shape))) for _, box in held]
    digests = b""
    for (name, box), offset in zip(held, offsets, strict=True):
        nbytes = box.size * specs[rows[name]].item_size
        for at in range(offset, offset + nbytes, BLOCK_BYTES):
            block = arena[at : min(at + BLOCK_BYTES, offset + nbytes)]
            digests += xxhash.xxh3_128_digest(block.tobytes())
    table_digest, table = encode_table(
        TensorTable(
            [spec.name for spec in specs],
            [spec.dtype for spec in specs],
            [list(spec.shape) for spec in specs],
        )
    )
    return Manifest(
        model_name=model_name,
        version_id=version_id,
        source_slot_id=f"slot-{number}",
        worker_id=f"worker-{number}",
        incarnation=f"life-{number}",
        endpoint=f"{host}:{7000 + number}",
        registry=registry,
        arena_address=4096 * (number + 1),
        arena_bytes=len(arena),
        nixl=None,
        table_digest=table_digest,
        table=table,
        shards=ShardColumns(
            axes=axes,
            tensor=np.array([rows[name] for name, _ in held], "<i4").tobytes(),
            start=np.array(start, "<i8").tobytes(),
            shape=np.array(shape, "<i8").tobytes(),
            offset=np.array(offsets, "<i8").tobytes(),
        ),
        digests=digests,
    )


def publish(
    model: Model, held_by: Sequence[Held], *, seed: int = 0, hosts: Sequence[str] = ()
) -> Sources:
    """Lay the shards of each source into an arena of its own, with gaps of other bytes between."""
    rng = np.random.default_rng(seed)
    manifests = []
    arenas = []
    for number, held in enumerate(held_by):
        offsets = []
        memory = [rng.integers(0, 256, int(rng.integers(0, 9)), dtype=np.uint8)]
        for name, box in held:
            offsets.append(sum(map(len, memory)))
            memory.append(model.content[name][box.slices()].reshape(-1))
            memory.append(rng.integers(0, 256, int(rng.integers(0, 9)), dtype=np.uint8))
        arena = np.concatenate(memory)
        arenas.append(arena)
        # A source names what it has, in an order of its own.
        names = {name for name, _ in held}
        specs = [spec for spec in model.specs.values() if spec.name in names or number % 2 == 0]
        if number % 3 == 2:
            specs.reverse()
        host = hosts[number] if hosts else "127.0.0.1"
        manifests.append(manifest(specs, held, offsets, arena, number=number, host=host))
    return Sources(manifests, arenas, list(held_by))


def carried_out(plan: Plan, sources: Sources) -> tuple[Bytes, Bytes]:
    """Scratch after the reads, and how often each of its bytes was written."""
    scratch = np.zeros(plan.scratch_bytes, dtype=np.uint8)
    written = np.zeros(plan.scratch_bytes, dtype=np.uint8)
    for source, reads in plan.fetches:
        arena = sources.arenas[source]
        for src, dst, run, n1, src1, dst1, n2, src2, dst2 in reads.rows.tolist():
            assert min(run, n1, n2) >= 1
            for j, i in itertools.product(range(n2), range(n1)):
                a, b = src + j * src2 + i * src1, dst + j * dst2 + i * dst1
                assert 0 <= a <= a + run <= len(arena)
                assert 0 <= b <= b + run <= len(scratch)
                scratch[b : b + run] = arena[a : a + run]
                written[b : b + run] += 1
    return scratch, written


def wanted_bytes(target: TargetTensor, model: Model) -> Bytes:
    """What a target has to hold, filled in element by element."""
    item_size = model.specs[target.parts[0].tensor].item_size if target.parts else 1
    content = np.zeros((*target.shape, item_size), dtype=np.uint8)
    for part in target.parts:
        for element in np.ndindex(part.box.shape):
            place = list(part.at)
            for axis in range(1, min(len(place), len(element)) + 1):
                place[-axis] += element[-axis]
            of = tuple(a + b for a, b in zip(part.box.start, element, strict=True))
            content[tuple(place)] = model.content[part.tensor][of]
    return content.reshape(-1)


def is_held(
    targets: Sequence[TargetTensor], held_by: Sequence[Held], excluded: Iterable[int] = ()
) -> bool:
    """Whether each wanted element is in some source that is not excluded."""
    skipped = set(excluded)
    for target in targets:
        for part in target.parts:
            for element in np.ndindex(part.box.shape):
                at = [a + b for a, b in zip(part.box.start, element, strict=True)]
                if not any(
                    name == part.tensor
                    and all(
                        start <= i < start + size
                        for i, start, size in zip(at, box.start, box.shape, strict=True)
                    )
                    for number, held in enumerate(held_by)
                    if number not in skipped
                    for name, box in held
                ):
                    return False
    return True


def check_plan(
    plan: Plan, shards: ShardTable, targets: Sequence[TargetTensor], sources: Sources, model: Model
) -> None:
    """That the plan reads each wanted byte once, and each from where it says."""
    scratch, written = carried_out(plan, sources)
    once = np.zeros(plan.scratch_bytes, dtype=np.uint8)
    assert len(plan.offsets) == len(targets)
    end = 0
    for target, offset in zip(targets, plan.offsets.tolist(), strict=True):
        assert offset % 256 == 0
        assert offset >= end
        end = offset + target.nbytes
        assert end <= plan.scratch_bytes
        assert scratch[offset:end].tobytes() == wanted_bytes(target, model).tobytes(), target.name
        once[offset:end] = 1
    assert (written == once).all(), "a byte was written twice, never, or between targets"
    needed = sum(target.nbytes for target in targets)
    assert plan.nbytes == needed
    assert sum(reads.nbytes for _, reads in plan.fetches) == needed
    assert int(plan.bytes_by_source.sum()) == needed
    assert len({source for source, _ in plan.fetches}) == len(plan.fetches)
    assert len(plan.shard_of_read) == len(plan.fetches)
    for (source, reads), shard_of_read in zip(plan.fetches, plan.shard_of_read, strict=True):
        assert plan.bytes_by_source[source] == reads.nbytes > 0
        assert len(shard_of_read) == len(reads)
        offsets = np.frombuffer(sources.manifests[source].shards.offset, "<i8")
        for row, shard in zip(reads.rows.tolist(), shard_of_read.tolist(), strict=True):
            src, _, run, n1, src1, _, n2, src2, _ = row
            name, box = sources.held[source][shard]
            first = int(offsets[shard])
            last = src + run + (n1 - 1) * src1 + (n2 - 1) * src2
            assert first <= src
            assert last <= first + box.size * model.specs[name].item_size
            assert shards.boxes(source).nbytes[shard] == box.size * model.specs[name].item_size


def plan_checked(
    model: Model,
    held_by: Sequence[Held],
    targets: Sequence[TargetTensor],
    *,
    exclude: Iterable[int] = (),
    seed: int = 0,
    prefer_local: str | None = None,
    hosts: Sequence[str] = (),
) -> Plan:
    """Publish, plan and check in one."""
    sources = publish(model, held_by, seed=seed, hosts=hosts)
    shards = ShardTable.of(sources.manifests)
    out = [f"worker-{number}" for number in exclude]
    plan = plan_reads(shards, targets, exclude=out, seed=seed, prefer_local=prefer_local)
    assert not {source for source, _ in plan.fetches} & set(exclude)
    check_plan(plan, shards, targets, sources, model)
    return plan


def chunks(size: int, ranks: int) -> list[tuple[int, int]]:
    """First row and number of rows of each rank, divided as `torch.chunk` does."""
    rows = math.ceil(size / ranks) if size else 0
    starts = [min(size, rank * rows) for rank in range(ranks)]
    return [(start, min(size, start + rows) - start) for start in starts]


def sharded(spec: TensorSpec, axis: int, ranks: int) -> list[Box]:
    """The box of each rank."""
    return [
        Box(
            tuple(start if a == axis else 0 for a in range(len(spec.shape))),
            tuple(rows if a == axis else size for a, size in enumerate(spec.shape)),
        )
        for start, rows in chunks(spec.shape[axis], ranks)
    ]
