"""`LocalShard`: the part of a global tensor that this process holds.

A publisher accepts any mixture of complete tensors, DTensors with any placements, and shards that
the caller describes.

`Cut` arranges a shard in the arena the way generators divide it. A generator with tensor
parallelism along the columns reads a part of every row. If the shard is stored by rows, that takes
one short read per row. The published digests cover no such part, so each generator must also
request digests. If the shard is cut at the same columns, each part is one range with published
digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from refit_mx.errors import RefitConfigError
from refit_mx.layout import ITEM_SIZES, MAX_AXES, Box, TargetTPLayout


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A part of a global tensor.

    Attributes:
        name: name of the global tensor in the trainer's state dict.
        global_shape: shape of the global tensor.
        box: position of the part in the global tensor; may be empty.
        tensor: data of shape ``box.shape``, with any strides, on any device.

    Raises:
        RefitConfigError: the box extends beyond the tensor, or ``tensor`` has another shape.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if not self.name:
            raise RefitConfigError("LocalShard: an empty name; expected that of a global tensor")
        if len(self.global_shape) > MAX_AXES:
            raise RefitConfigError(
                f"{self.name}: shape {self.global_shape}; expected at most {MAX_AXES} axes"
            )
        ends = [start + size for start, size in zip(self.box.start, self.box.shape, strict=True)]
        if len(ends) != len(self.global_shape) or any(
            end > size for end, size in zip(ends, self.global_shape, strict=True)
        ):
            raise RefitConfigError(
                f"{self.name}: {self.box} is not within the tensor's shape {self.global_shape}"
            )
        if tuple(self.tensor.shape) != self.box.shape:
            raise RefitConfigError(
                f"{self.name}: a tensor of shape {tuple(self.tensor.shape)}; "
                f"expected that of its box, {self.box.shape}"
            )

    @classmethod
    def full(cls, name: str, tensor: torch.Tensor) -> LocalShard:
        """Return a shard that is a complete global tensor."""
        shape = tuple(tensor.shape)
        return cls(name, shape, Box.full(shape), tensor)


Publishable = torch.Tensor | LocalShard | Iterable[LocalShard]


def local_shards(state_dict: Mapping[str, Publishable]) -> list[LocalShard]:
    """Return the shards of a state dict, in its order.

    A plain tensor is a complete global tensor. A DTensor gives its local part: FSDP2 with even or
    uneven shards, tensor parallelism, or both on a mesh of two axes. Tied weights, with one storage
    under two names, become one shard per name.

    Args:
        state_dict: name to tensor, or to one or more shards of that name.

    Raises:
        RefitConfigError: a DTensor has partial placements, a shard has another name than its key,
            or a dtype cannot be published.
    """
    shards: list[LocalShard] = []
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            of_name = [_of_tensor(name, value)]
        else:
            of_name = [value] if isinstance(value, LocalShard) else list(value)
        for shard in of_name:
            if shard.name != name:
                raise RefitConfigError(f"{name}: the shard under this name is of {shard.name!r}")
        shards += of_name
    return shards


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """Return the published name of a tensor's dtype.

    Raises:
        RefitConfigError: the dtype cannot be published.
    """
    published = str(dtype).removeprefix("torch.")
    if published not in ITEM_SIZES:
        raise RefitConfigError(
            f"{name}: dtype {published}; expected one of {', '.join(ITEM_SIZES)}, or a wire dtype"
        )
    return published


def _of_tensor(name: str, tensor: torch.Tensor) -> LocalShard:
    chunks = getattr(tensor, "__create_chunk_list__", None)
    # FSDP1's ShardedTensor and other wrappers have the shape of a tensor whose bytes they lack.
    wraps = hasattr(tensor, "local_shards") or hasattr(tensor, "__tensor_flatten__")
    if chunks is None and not wraps:
        return LocalShard.full(name, tensor.detach())
    # torch's checkpoints use `__create_chunk_list__` to get a DTensor's part. A plain tensor lacks
    # it, so torch.distributed.tensor is imported only if needed.
    from torch.distributed.tensor import DTensor

    if chunks is None or not isinstance(tensor, DTensor):
        raise RefitConfigError(
            f"{name}: {type(tensor).__name__}; expected a plain tensor, a DTensor or LocalShards"
        )
    if any(placement.is_partial() for placement in tensor.placements):
        raise RefitConfigError(
            f"{name}: placements {tensor.placements}; reduce partial values first"
        )
    local = tensor.to_local().detach()
    (chunk,) = chunks()
    if tuple(chunk.sizes) != tuple(local.shape):
        raise RefitConfigError(
            f"{name}: placements {tensor.placements} over {tuple(tensor.shape)} give this rank a "
            f"part of shape {tuple(chunk.sizes)}, but it has {tuple(local.shape)}"
        )
    return LocalShard(
        name, tuple(tensor.shape), Box(tuple(chunk.offsets), tuple(chunk.sizes)), local
    )


@dataclass(frozen=True)
class Cut:
    """Division of a tensor's shards at the borders of equal parts of the global tensor.

    Any generator may still read any slice; reads of these parts are fastest.

    Attributes:
        axis: axis to divide, counted from the first.
        parts: number of parts of the axis, divided as in `TargetTPLayout`; the tensor-parallel size
            of the generators, or a multiple.

    Raises:
        RefitConfigError: the axis is negative, or there is no part.
    """

    axis: int
    parts: int

    def __post_init__(self) -> None:
        if self.axis < 0 or self.parts < 1:
            raise RefitConfigError(
                f"Cut(axis={self.axis}, parts={self.parts}); expected an axis of 0 or more and "
                "at least one part"
            )


def cut_shards(shards: Sequence[LocalShard], cuts: Mapping[str, Cut]) -> list[LocalShard]:
    """Return the shards, divided into parts if ``cuts`` has their tensor; nothing is copied.

    Raises:
        RefitConfigError: a tensor lacks the axis of its cut.
    """
    parts: list[LocalShard] = []
    for shard in shards:
        cut = cuts.get(shard.name)
        parts += [shard] if cut is None else _parts(shard, cut)
    return parts


def _parts(shard: LocalShard, cut: Cut) -> Iterator[LocalShard]:
    axis, box = cut.axis, shard.box
    if axis >= len(shard.global_shape):
        raise RefitConfigError(
            f"{shard.name}: cut along axis {axis}; its shape is {shard.global_shape}"
        )
    if not box.size:
        yield shard
        return
    begin, end = box.start[axis], box.start[axis] + box.shape[axis]
    for part in range(cut.parts):
        wanted = TargetTPLayout(cut.parts, part).range_on(shard.global_shape[axis])
        start, stop = max(begin, wanted.start), min(end, wanted.stop)
        if start < stop:
            yield LocalShard(
                shard.name,
                shard.global_shape,
                Box(_with(box.start, axis, start), _with(box.shape, axis, stop - start)),
                shard.tensor.narrow(axis, start - begin, stop - start),
            )


def _with(numbers: tuple[int, ...], axis: int, number: int) -> tuple[int, ...]:
    return (*numbers[:axis], number, *numbers[axis + 1 :])
