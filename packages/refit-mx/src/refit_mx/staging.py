"""Copying shards into an arena: where each comes to lie, its wire dtype, its digests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from refit_mx.byte_spans import host_bytes
from refit_mx.deadline import Deadline
from refit_mx.digests import block_digests, host_block_digests
from refit_mx.errors import RefitConfigError
from refit_mx.manifest import BLOCK_BYTES, ShardColumns, TensorTable
from refit_mx.shard_sources import LocalShard, dtype_name
from refit_mx.side_by_side import each
from refit_mx.tensor_types import ITEM_SIZES, Box

ALIGNMENT = 256
"""Of every shard in the arena: what CUDA gives too, so that views of any dtype are allowed."""
_JOB_BYTES = 32 << 20
_WITHOUT_INFINITY = (torch.float8_e4m3fn,)
"""Wire dtypes in which an infinity would become the largest number."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

WireDtype = str | Mapping[str, str] | None
Placement = tuple[tuple[str, tuple[int, ...], Box, str, int], ...]
"""Name, global shape, box, wire dtype and offset of each shard, without its tensor."""


@dataclass(frozen=True)
class StagingLayout:
    """Where shards come to lie.

    Attributes:
        shards: in the order of the rows.
        dtypes: of each on the wire.
        offsets: of each in the arena, in bytes.
        sizes: of each, in bytes.
        nbytes: that the arena needs.
    """

    shards: tuple[LocalShard, ...]
    dtypes: tuple[str, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int

    @property
    def placement(self) -> Placement:
        """To compare layouts without keeping their tensors."""
        return tuple(
            (shard.name, shard.global_shape, shard.box, dtype, offset)
            for shard, dtype, offset in zip(self.shards, self.dtypes, self.offsets, strict=True)
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes of the shards, without what lies between them."""
        return sum(self.sizes)

    @property
    def tensors(self) -> int:
        """Number of global tensors."""
        return len({shard.name for shard in self.shards})


def lay_out(shards: Sequence[LocalShard], wire_dtype: WireDtype) -> StagingLayout:
    """Decide where every shard comes to lie.

    Args:
        shards: of one publish.
        wire_dtype: of every floating-point tensor; or by tensor name, the others as they are; or
            None, all as they are. Other tensors are published as they are.

    Raises:
        RefitConfigError: a dtype is unknown or is not one of floating-point numbers, a name of
            ``wire_dtype`` is not among the shards, two shards of one tensor differ in dtype or
            global shape, or there is no shard.
    """
    if not shards:
        raise RefitConfigError("publish: no shards; expected at least one")
    if isinstance(wire_dtype, Mapping):
        unknown = wire_dtype.keys() - {shard.name for shard in shards}
        if unknown:
            raise RefitConfigError(
                f"wire_dtype names tensors that are not published: {', '.join(sorted(unknown)[:5])}"
            )
    seen: dict[str, tuple[str, tuple[int, ...]]] = {}
    dtypes, offsets, sizes, end = [], [], [], 0
    for shard in shards:
        dtype = _wire_dtype(shard, wire_dtype)
        first = seen.setdefault(shard.name, (dtype, shard.global_shape))
        if first != (dtype, shard.global_shape):
            raise RefitConfigError(
                f"{shard.name}: shards of {first[0]} {first[1]} and of {dtype} "
                f"{shard.global_shape}; expected one dtype and one global shape"
            )
        size = math.prod(shard.box.shape) * ITEM_SIZES[dtype]
        dtypes.append(dtype)
        offsets.append(end)
        sizes.append(size)
        end = -(-(end + size) // ALIGNMENT) * ALIGNMENT
    return StagingLayout(tuple(shards), tuple(dtypes), tuple(offsets), tuple(sizes), end)


def _wire_dtype(shard: LocalShard, wire_dtype: WireDtype) -> str:
    wanted = wire_dtype.get(shard.name) if isinstance(wire_dtype, Mapping) else wire_dtype
    if wanted is None or not shard.tensor.dtype.is_floating_point:
        if isinstance(wire_dtype, Mapping) and wanted is not None:
            raise RefitConfigError(
                f"{shard.name}: {shard.tensor.dtype} is published as it is, not as {wanted}"
            )
        return dtype_name(shard.name, shard.tensor.dtype)
    if wanted not in ITEM_SIZES or not getattr(torch, wanted).is_floating_point:
        known = [name for name in ITEM_SIZES if getattr(torch, name).is_floating_point]
        raise RefitConfigError(
            f"{shard.name}: wire dtype {wanted!r}; expected one of {', '.join(known)}"
        )
    return wanted


def stage(
    layout: StagingLayout, arena: torch.Tensor, *, threads: Executor, deadline: Deadline
) -> list[bytes]:
    """Copy every shard, cast to its wire dtype, and take its digests.

    Args:
        layout: of `lay_out`.
        arena: uint8, at least ``layout.nbytes``; nobody else uses it.
        threads: that copy.
        deadline: looked at between shards.

    Returns:
        The digests of each shard's blocks, one after the other.

    Raises:
        RefitConfigError: a number does not fit into its wire dtype.
        RefitTimeoutError: the deadline passed.
    """

    def work(rows: range) -> list[bytes]:
        done = []
        for row in rows:
            deadline.check("copying shards into the arena")
            done.append(copy_shard(layout, row, arena))
        return done

    jobs = _jobs(layout.sizes)
    # Copies on a CUDA device are ordered by the current stream, which is a thread's own.
    on_cpu = all(shard.tensor.device.type == "cpu" for shard in layout.shards)
    parts = each(threads, work, jobs) if on_cpu and arena.device.type == "cpu" else map(work, jobs)
    return [digests for part in parts for digests in part]


def _jobs(sizes: Sequence[int]) -> list[range]:
    """The rows in parts of about `_JOB_BYTES`."""
    jobs, first, held = [], 0, 0
    for row, size in enumerate(sizes):
        held += size
        if held >= _JOB_BYTES:
            jobs.append(range(first, row + 1))
            first, held = row + 1, 0
    if first < len(sizes):
        jobs.append(range(first, len(sizes)))
    return jobs


def copy_shard(layout: StagingLayout, row: int, arena: torch.Tensor) -> bytes:
    """Copy one shard to its place, cast to its wire dtype; returns the digests of its blocks.

    Raises:
        RefitConfigError: a number does not fit into it.
    """
    shard, dtype = layout.shards[row], getattr(torch, layout.dtypes[row])
    size, offset = layout.sizes[row], layout.offsets[row]
    if not size:
        return b""
    refuse_overflow(shard, dtype)
    place = arena[offset : offset + size].view(dtype).view(shard.box.shape)
    with torch.no_grad():
        if arena.device.type == "cpu" and shard.tensor.device.type == "cpu":
            memory = host_bytes(arena)[offset : offset + size].data
            return b"".join(_copied_blocks(shard.tensor.detach(), place, memory))
        place.copy_(shard.tensor)
    return block_digests(arena, offset, size)


def _copied_blocks(
    source: torch.Tensor, place: torch.Tensor, memory: memoryview
) -> Iterator[bytes]:
    """Copy on the CPU, a block at a time, and take its digest while it is in the processor's cache.

    Args:
        source: of any strides.
        place: of the same shape, contiguous, perhaps of another dtype.
        memory: the bytes of ``place``.

    Yields:
        Digests of the blocks that are complete.
    """
    if source.is_contiguous():
        source, place = source.reshape(-1), place.reshape(-1)
    size, rows = len(memory), len(place)
    row_bytes = size // rows
    step = max(1, BLOCK_BYTES // row_bytes)
    # Where nothing is cast NumPy takes a fifth less time for a block than PyTorch.
    same = (_integers(source), _integers(place)) if source.dtype == place.dtype else None
    digested = 0
    for first in range(0, rows, step):
        part = slice(first, first + step)
        if same is None:
            place[part].copy_(source[part])
        else:
            np.copyto(same[1][part], same[0][part])
        copied = min(size, (first + step) * row_bytes)
        whole = copied if copied == size else copied // BLOCK_BYTES * BLOCK_BYTES
        yield host_block_digests(memory, digested, whole)
        digested = whole


def _integers(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    """The same memory; NumPy lacks some of PyTorch's dtypes."""
    array: npt.NDArray[np.generic] = tensor.view(_INTEGERS[tensor.element_size()]).numpy()
    return array


def refuse_overflow(shard: LocalShard, wire: torch.dtype) -> None:
    """Refuse numbers that a wire dtype of a smaller range would make infinite, or clamp: what
    diverged must not look sound.

    Raises:
        RefitConfigError: there is one.
    """
    found = shard.tensor.dtype
    if found == wire or not found.is_floating_point:
        return
    most = torch.finfo(wire).max
    if most >= torch.finfo(found).max or (found, wire) == (torch.float32, torch.bfloat16):
        # bfloat16 has float32's range but for its last rounding step; nothing real lies there.
        return
    values = shard.tensor.detach()
    if values.element_size() == 1:
        values = values.to(torch.float32)
    sized = values.abs()
    kept = torch.isnan(sized) if wire in _WITHOUT_INFINITY else ~torch.isfinite(sized)
    largest = float(sized.masked_fill(kept, 0).amax())
    if largest > most:
        raise RefitConfigError(
            f"{shard.name}: {largest:g} does not fit into the wire dtype "
            f"{str(wire).removeprefix('torch.')}, whose largest number is {most:g}"
        )


def same_bytes(layout: StagingLayout, arena: torch.Tensor) -> bool:
    """Whether an arena holds exactly what `stage` would copy into it."""
    for row, shard in enumerate(layout.shards):
        size, offset = layout.sizes[row], layout.offsets[row]
        cast = shard.tensor.detach().to(getattr(torch, layout.dtypes[row])).contiguous()
        held = arena[offset : offset + size]
        if not torch.equal(cast.reshape(-1).view(torch.uint8).to(held.device), held):
            return False
    return True


def columns(layout: StagingLayout) -> tuple[TensorTable, ShardColumns]:
    """The tables of a manifest, from a layout."""
    index: dict[str, int] = {}
    table = TensorTable([], [], [])
    axes = max(1, *(len(shard.global_shape) for shard in layout.shards))
    count = len(layout.shards)
    tensor = np.empty(count, "<i4")
    start, shape = np.zeros((count, axes), "<i8"), np.ones((count, axes), "<i8")
    for row, (shard, dtype) in enumerate(zip(layout.shards, layout.dtypes, strict=True)):
        known = index.get(shard.name)
        if known is None:
            known = index[shard.name] = len(table.names)
            table.names.append(shard.name)
            table.dtypes.append(dtype)
            table.shapes.append(list(shard.global_shape))
        tensor[row] = known
        width = len(shard.global_shape)
        start[row, :width], shape[row, :width] = shard.box.start, shard.box.shape
    offset = np.array(layout.offsets, "<i8")
    return table, ShardColumns(
        axes, tensor.tobytes(), start.tobytes(), shape.tobytes(), offset.tobytes()
    )
