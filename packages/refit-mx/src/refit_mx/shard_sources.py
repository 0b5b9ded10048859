"""`LocalShard`: a part of a global tensor that this process holds, and how to find all of them.

A publisher takes any mixture: whole tensors, DTensors with any placements, and shards that the
caller describes itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from refit_mx.errors import RefitConfigError
from refit_mx.tensor_types import ITEM_SIZES, MOST_AXES, Box


@dataclass(frozen=True, eq=False)
class LocalShard:
    """One part of one global tensor.

    Attributes:
        name: of the global tensor, as the trainer's state dict has it.
        global_shape: of the whole tensor.
        box: which part of it this is; may be empty.
        tensor: the part, of ``box.shape``; any strides, any device.

    Raises:
        RefitConfigError: the box reaches out of the tensor, or ``tensor`` has another shape.
    """

    name: str
    global_shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        if not self.name:
            raise RefitConfigError("LocalShard: an empty name; expected that of a global tensor")
        if len(self.global_shape) > MOST_AXES:
            raise RefitConfigError(
                f"{self.name}: shape {self.global_shape}; expected at most {MOST_AXES} axes"
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
    def whole(cls, name: str, tensor: torch.Tensor) -> LocalShard:
        """All of a global tensor."""
        shape = tuple(tensor.shape)
        return cls(name, shape, Box.whole(shape), tensor)


Publishable = torch.Tensor | LocalShard | Iterable[LocalShard]


def local_shards(state_dict: Mapping[str, Publishable]) -> list[LocalShard]:
    """The shards of a state dict, in its order.

    A plain tensor is the whole of a global tensor. Of a DTensor the local part is taken: FSDP2 with
    even and uneven shards, tensor parallel, both on a mesh of two axes. Weights that are tied, so
    that one storage stands under two names, become one shard under each name.

    Args:
        state_dict: name to tensor, or to a shard or shards of that name which the caller describes.

    Raises:
        RefitConfigError: a DTensor with partial placements, a shard under another name, or a dtype
            that cannot be published.
    """
    found: list[LocalShard] = []
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            made = [_of_tensor(name, value)]
        else:
            made = [value] if isinstance(value, LocalShard) else list(value)
        for shard in made:
            if shard.name != name:
                raise RefitConfigError(f"{name}: a shard of {shard.name!r} stands under this name")
        found += made
    return found


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The published name of a tensor's dtype.

    Raises:
        RefitConfigError: it cannot be published.
    """
    found = str(dtype).removeprefix("torch.")
    if found not in ITEM_SIZES:
        raise RefitConfigError(
            f"{name}: dtype {found}; expected one of {', '.join(ITEM_SIZES)}, or a wire dtype"
        )
    return found


def _of_tensor(name: str, tensor: torch.Tensor) -> LocalShard:
    chunks = getattr(tensor, "__create_chunk_list__", None)
    if chunks is None:
        return LocalShard.whole(name, tensor.detach())
    # A DTensor. This is how torch's checkpoints ask it for its part; a plain tensor has no such
    # method, so that torch.distributed.tensor need not be imported here.
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        raise RefitConfigError(
            f"{name}: {type(tensor).__name__}; expected a plain tensor, a DTensor or LocalShards"
        )
    if any(placement.is_partial() for placement in tensor.placements):
        raise RefitConfigError(
            f"{name}: placements {tensor.placements}; partial values have to be reduced first"
        )
    local = tensor.to_local().detach()
    (chunk,) = chunks()
    if tuple(chunk.sizes) != tuple(local.shape):
        raise RefitConfigError(
            f"{name}: placements {tensor.placements} over {tuple(tensor.shape)} say that this "
            f"rank's part has the shape {tuple(chunk.sizes)}, and it has {tuple(local.shape)}"
        )
    return LocalShard(
        name, tuple(tensor.shape), Box(tuple(chunk.offsets), tuple(chunk.sizes)), local
    )
