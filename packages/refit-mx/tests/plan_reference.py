"""A reference for plans: published tensors, sources that hold boxes, and reads byte by byte.

It is slow and simple on purpose, and shares no code with the planner. Imports internals: manifests
are made without publishing weights.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from refit_mx import Box, Manifest, Plan, Registry, ShardTable, TargetTensor, TensorSpec, plan_reads
from refit_mx.manifest.format import BLOCK_BYTES, ShardColumns, TensorTable, encode_table

Bytes = npt.NDArray[np.uint8]
Held = Sequence[tuple[str, Box]]


@dataclass
class Model:
    """Published tensors: the bytes of each, ``shape + (item size,)``."""

    specs: dict[str, TensorSpec]
    content: dict[str, Bytes]

    @classmethod
    def of(cls, specs: Iterable[TensorSpec], seed: int = 0) -> Model:
        """Make a model of random bytes, so that a misplaced element is noticed."""
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
    version_id: str = "v1",
    model_name: str = "model",
    registry: Registry | None = None,
) -> Manifest:
    """Return the manifest of a source that has ``held`` at ``offsets`` of its arena."""
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
        endpoint=f"127.0.0.1:{7000 + number}",
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


def publish(model: Model, held_by: Sequence[Held], *, seed: int = 0) -> Sources:
    """Copy the shards of each source into a separate arena, with random bytes between them."""
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
        # Tensors have different orders; sources with odd numbers list only what they hold.
        names = {name for name, _ in held}
        specs = [spec for spec in model.specs.values() if spec.name in names or number % 2 == 0]
        if number % 3 == 2:
            specs.reverse()
        manifests.append(manifest(specs, held, offsets, arena, number=number))
    return Sources(manifests, arenas, list(held_by))


def carried_out(plan: Plan, sources: Sources) -> tuple[Bytes, Bytes]:
    """Carry out a plan's reads; return the scratch memory and the number of writes to each byte.

    A row of reads copies ``run`` bytes at each of ``n1 * n2`` places: source offset
    ``src + j * src2 + i * src1`` to scratch offset ``dst + j * dst2 + i * dst1``.
    """
    scratch = np.zeros(plan.scratch_bytes, dtype=np.uint8)
    written = np.zeros(plan.scratch_bytes, dtype=np.uint8)
    for source, reads in plan.source_reads:
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


def picked(target: TargetTensor, content: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return a target's expected content, from arrays with one axis more than their tensors."""
    if not target.parts:
        return np.zeros((*target.shape, 1), np.uint8)
    like = content[target.parts[0].tensor]
    expected = np.zeros((*target.shape, like.shape[-1]), like.dtype)
    for part in target.parts:
        block = content[part.tensor][part.box.slices()]
        # A part with more axes than the target has extra leading axes of size 1; one with fewer
        # axes is one element of a stack.
        more = len(target.shape) - len(part.box.shape)
        shape = (1,) * more + part.box.shape[max(0, -more) :]
        place = tuple(slice(a, a + n) for a, n in zip(part.at, shape, strict=True))
        expected[place] = block.reshape(*shape, -1) if block.size else 0
    return expected


def is_held(targets: Sequence[TargetTensor], held_by: Sequence[Held]) -> bool:
    """Return whether each wanted element is in a source."""
    for part in (part for target in targets for part in target.parts):
        missing = np.ones([a + n for a, n in zip(part.box.start, part.box.shape, strict=True)])
        for held in held_by:
            for name, box in held:
                if name == part.tensor:
                    missing[box.slices()] = 0
        if missing[part.box.slices()].any():
            return False
    return True


def check_plan(
    plan: Plan, shards: ShardTable, targets: Sequence[TargetTensor], sources: Sources, model: Model
) -> None:
    """Check that a plan reads each wanted byte once, from the shard that it names."""
    scratch, written = carried_out(plan, sources)
    once = np.zeros(plan.scratch_bytes, dtype=np.uint8)
    assert len(plan.offsets) == len(targets)
    end = 0
    for target, offset in zip(targets, plan.offsets.tolist(), strict=True):
        assert offset % 256 == 0
        assert offset >= end
        end = offset + target.nbytes
        assert end <= plan.scratch_bytes
        assert scratch[offset:end].tobytes() == picked(target, model.content).tobytes(), target.name
        once[offset:end] = 1
    assert (written == once).all(), "a byte was written twice, never, or between targets"
    needed = sum(target.nbytes for target in targets)
    assert plan.nbytes == needed
    assert sum(reads.nbytes for _, reads in plan.source_reads) == needed
    assert int(plan.bytes_by_source.sum()) == needed
    assert len({source for source, _ in plan.source_reads}) == len(plan.source_reads)
    assert len(plan.shard_of_read) == len(plan.source_reads)
    for (source, reads), shard_of_read in zip(plan.source_reads, plan.shard_of_read, strict=True):
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
    seed: int = 0,
) -> Plan:
    """Publish a model, plan reads, check the plan and return it."""
    sources = publish(model, held_by, seed=seed)
    shards = ShardTable.of(sources.manifests)
    plan = plan_reads(shards, targets, seed=seed)
    check_plan(plan, shards, targets, sources, model)
    return plan


def chunks(size: int, ranks: int) -> list[tuple[int, int]]:
    """Return the first row and the number of rows of each rank, like `torch.chunk`."""
    rows = math.ceil(size / ranks) if size else 0
    starts = [min(size, rank * rows) for rank in range(ranks)]
    return [(start, min(size, start + rows) - start) for start in starts]


def sharded(spec: TensorSpec, axis: int, ranks: int) -> list[Box]:
    """Return the box of each rank."""
    return [
        Box(
            tuple(start if a == axis else 0 for a in range(len(spec.shape))),
            tuple(rows if a == axis else size for a, size in enumerate(spec.shape)),
        )
        for start, rows in chunks(spec.shape[axis], ranks)
    ]
