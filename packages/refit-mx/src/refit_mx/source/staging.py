"""Copying of shards into an arena: their places, wire dtypes and digests."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from refit_mx.concurrency import map_calls
from refit_mx.deadline import Deadline
from refit_mx.errors import RefitConfigError
from refit_mx.layout import ITEM_SIZES, Box
from refit_mx.manifest.byte_spans import host_bytes
from refit_mx.manifest.digests import block_digests, host_block_digests
from refit_mx.manifest.format import BLOCK_BYTES, ShardColumns, TensorTable
from refit_mx.memory.cuda import on_separate_stream, synchronize
from refit_mx.source.shards import LocalShard, dtype_name

ALIGNMENT = 256
"""Alignment of every shard in the arena: that of CUDA, so that views of any dtype work."""
_JOB_BYTES = 32 << 20
_WITHOUT_INFINITY = (torch.float8_e4m3fn,)
"""Wire dtypes without infinity. A cast turns an infinity into the largest value, or in some builds
of torch into NaN."""
_ROUNDED = (torch.float32, torch.bfloat16)
"""Source dtype and wire dtype of the casts that `check_rounding` checks."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

WireDtype = str | Mapping[str, str] | None
Placement = tuple[tuple[str, tuple[int, ...], Box, str, int], ...]
"""Name, global shape, box, wire dtype and offset of each shard, without its tensor."""


@dataclass(frozen=True)
class StagingLayout:
    """Places of shards in an arena, with a wire dtype, offset and size in bytes for each.

    ``nbytes`` is the required size of the arena.
    """

    shards: tuple[LocalShard, ...]
    dtypes: tuple[str, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    nbytes: int

    @property
    def placement(self) -> Placement:
        """Places without tensors, for comparing layouts."""
        return tuple(
            (shard.name, shard.global_shape, shard.box, dtype, offset)
            for shard, dtype, offset in zip(self.shards, self.dtypes, self.offsets, strict=True)
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes of the shards, without the gaps between them."""
        return sum(self.sizes)

    @property
    def tensors(self) -> int:
        """Number of global tensors."""
        return len({shard.name for shard in self.shards})


def lay_out(shards: Sequence[LocalShard], wire_dtype: WireDtype) -> StagingLayout:
    """Assign a place to every shard of a publish.

    The wire dtype is that of every floating-point tensor, or a mapping by tensor name. Tensors that
    are not in the mapping or not floating-point are published unchanged.

    Raises:
        RefitConfigError: a dtype is unknown or not floating-point, a name in ``wire_dtype`` is not
            published, two shards of one tensor differ in dtype or global shape, or there is no
            shard.
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
    """Copy every shard, cast to its wire dtype; return the digests of each shard's blocks.

    The arena is uint8 memory of at least ``layout.nbytes`` that nothing else uses. The deadline is
    checked between shards.

    Raises:
        RefitConfigError: a value does not fit its wire dtype.
        RefitTimeoutError: the deadline passed.
    """

    def work(rows: range) -> list[bytes]:
        done = []
        for row in rows:
            deadline.check("copying shards into the arena")
            done.append(copy_shard(layout, row, arena))
        return done

    # The threads' streams are not ordered after the caller's, on which updates may be queued.
    synchronize([arena.device, *(shard.tensor.device for shard in layout.shards)])
    parts = map_calls(threads, work, _jobs(layout.sizes))
    return [digests for part in parts for digests in part]


def _jobs(sizes: Sequence[int]) -> list[range]:
    """Divide the rows into ranges of about `_JOB_BYTES`."""
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
    """Copy one shard to its place, cast to its wire dtype; return the digests of its blocks.

    Raises:
        RefitConfigError: a value does not fit the wire dtype.
    """
    shard, dtype = layout.shards[row], getattr(torch, layout.dtypes[row])
    size, offset = layout.sizes[row], layout.offsets[row]
    if not size:
        return b""
    place = arena[offset : offset + size].view(dtype).view(shard.box.shape)
    device = shard.tensor.device if arena.device.type == "cpu" else arena.device
    with torch.no_grad(), on_separate_stream(device):
        check_range(shard, dtype)
        if arena.device.type == "cpu" and shard.tensor.device.type == "cpu":
            memory = host_bytes(arena)[offset : offset + size].data
            return b"".join(_copied_blocks(shard.name, shard.tensor.detach(), place, memory))
        place.copy_(shard.tensor)
        check_rounding(shard.name, shard.tensor.detach(), place)
        return block_digests(arena, offset, size)


def _copied_blocks(
    name: str, source: torch.Tensor, place: torch.Tensor, memory: memoryview
) -> Iterator[bytes]:
    """Copy on the CPU; yield the digests of the copied blocks while these are in the cache.

    The source may have any strides. Its copy ``place``, whose bytes are ``memory``, is contiguous
    and may have another dtype.
    """
    if source.is_contiguous():
        source, place = source.reshape(-1), place.reshape(-1)
    size, rows = len(memory), len(place)
    row_bytes = size // rows
    step = max(1, BLOCK_BYTES // row_bytes)
    # Without a cast, NumPy copies a block in a fifth less time than PyTorch.
    integers = (_integers(source), _integers(place)) if source.dtype == place.dtype else None
    digested = 0
    for first in range(0, rows, step):
        part = slice(first, first + step)
        if integers is None:
            place[part].copy_(source[part])
            check_rounding(name, source[part], place[part])
        else:
            np.copyto(integers[1][part], integers[0][part])
        copied = min(size, (first + step) * row_bytes)
        complete = copied if copied == size else copied // BLOCK_BYTES * BLOCK_BYTES
        yield host_block_digests(memory, digested, complete)
        digested = complete


def _integers(tensor: torch.Tensor) -> npt.NDArray[np.generic]:
    """Return the same memory as integers, since NumPy lacks some of PyTorch's dtypes."""
    array: npt.NDArray[np.generic] = tensor.view(_INTEGERS[tensor.element_size()]).numpy()
    return array


def check_range(shard: LocalShard, wire: torch.dtype) -> None:
    """Refuse values that a smaller wire dtype would make infinite or clamp.

    Otherwise diverged weights would look valid.

    Raises:
        RefitConfigError: a value is out of range.
    """
    dtype = shard.tensor.dtype
    if dtype == wire or not dtype.is_floating_point:
        return
    maximum = torch.finfo(wire).max
    if maximum >= torch.finfo(dtype).max or (dtype, wire) == _ROUNDED:
        return
    largest = _largest(shard.tensor.detach(), wire)
    if largest > maximum:
        raise _out_of_range(shard.name, largest, wire)


def check_rounding(name: str, values: torch.Tensor, cast: torch.Tensor) -> None:
    """Refuse finite float32 values that the cast to bfloat16 has rounded to infinity.

    bfloat16 has float32's range, so rounding gives infinity only for values close to its end.
    Inspecting the cast, which is still in the cache, costs less than `check_range`.

    Raises:
        RefitConfigError: a value was rounded to infinity.
    """
    if (values.dtype, cast.dtype) != _ROUNDED or not _may_have_infinity(cast):
        return
    largest = _largest(values, cast.dtype)
    if torch.tensor(largest).to(cast.dtype).isinf():
        raise _out_of_range(name, largest, cast.dtype)


def _may_have_infinity(cast: torch.Tensor) -> bool:
    """Return whether bfloat16 values have an infinity or a NaN."""
    if cast.device.type == "cpu":
        # Bits of infinity are 0x7F80, those of NaN higher; negative numbers have the sign bit
        # 0x8000 too. So the largest int16 is the largest magnitude of positive numbers, and the
        # largest uint16 that of negative numbers. NumPy finds both faster than PyTorch.
        bits = cast.view(torch.int16).numpy()
        return bool(bits.max() >= 0x7F80 or bits.view(np.uint16).max() >= 0xFF80)
    return not bool(torch.stack(torch.aminmax(cast)).isfinite().all())


def _largest(values: torch.Tensor, wire: torch.dtype) -> float:
    """Return the largest magnitude that the wire dtype must be able to represent."""
    if values.element_size() == 1:
        values = values.to(torch.float32)
    magnitudes = values.abs()
    ignored = torch.isnan(magnitudes) if wire in _WITHOUT_INFINITY else ~torch.isfinite(magnitudes)
    return float(magnitudes.masked_fill(ignored, 0).amax())


def _out_of_range(name: str, largest: float, wire: torch.dtype) -> RefitConfigError:
    return RefitConfigError(
        f"{name}: {largest:g} does not fit into the wire dtype "
        f"{str(wire).removeprefix('torch.')}, whose largest number is {torch.finfo(wire).max:g}"
    )


def holds_equal_bytes(layout: StagingLayout, arena: torch.Tensor) -> bool:
    """Return whether an arena holds exactly what `stage` would copy into it."""
    for row, shard in enumerate(layout.shards):
        size, offset = layout.sizes[row], layout.offsets[row]
        cast = shard.tensor.detach().to(getattr(torch, layout.dtypes[row])).contiguous()
        held = arena[offset : offset + size]
        # A contiguous tensor of one element may have any strides, which view() refuses.
        flat = cast.as_strided((cast.numel(),), (1,))
        if not torch.equal(flat.view(torch.uint8).to(held.device), held):
            return False
    return True


def manifest_columns(layout: StagingLayout) -> tuple[TensorTable, ShardColumns]:
    """Return the tensors and shards of a layout, as a manifest has them."""
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
