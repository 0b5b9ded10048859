"""`TargetColumns`: what a receiver wants, as columns, checked against what is published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from refit_mx.errors import LayoutError
from refit_mx.plan.shards import ShardTable
from refit_mx.plan.target_tensors import TargetPart, TargetTensor
from refit_mx.plan.tensor_columns import DTYPES
from refit_mx.tensor_types import ITEM_SIZES, MOST_AXES

ALIGNMENT = 256
"""Bytes; of the beginning of each target in scratch. What CUDA gives, and any dtype is content."""
_CODES = {name: code for code, name in enumerate(DTYPES)}


@dataclass(frozen=True, eq=False)
class TargetColumns:
    """The parts of targets, one a row; and where they lie in scratch.

    Attributes:
        offsets: int64 (targets,), of each target's first byte in scratch.
        nbytes: of all targets, without the gaps between them.
        scratch_bytes: with the gaps.
        target: int64 (parts,), index of the target.
        tensor: int64 (parts,), row of the `ShardTable`'s tensors.
        start: int64 (parts, axes), of the box in the published tensor, filled up with 0; as many
            axes as any published tensor has, at least 1.
        stop: int64 (parts, axes), filled up with 1.
        base: int64 (parts,), of the part's first byte in scratch.
        stride: int64 (parts, axes), bytes in scratch from one element to the next along each
            axis of the published tensor; of no meaning where the part has one element.
    """

    offsets: npt.NDArray[np.int64]
    nbytes: int
    scratch_bytes: int
    target: npt.NDArray[np.int64]
    tensor: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]
    base: npt.NDArray[np.int64]
    stride: npt.NDArray[np.int64]

    @classmethod
    def of(cls, targets: Sequence[TargetTensor], shards: ShardTable) -> TargetColumns:
        """Lay the targets out one after the other.

        Raises:
            LayoutError: a target's name comes twice; a part is of a tensor that no source names, or
                that is published with another dtype or shape, or without that box.
        """
        _check_names(targets)
        parts = [part for target in targets for part in target.parts]
        target = np.repeat(
            np.arange(len(targets)), np.array([len(t.parts) for t in targets], dtype=np.int64)
        )
        rows = shards.tensor_rows
        tensor = np.array([rows.get(part.tensor, -1) for part in parts], dtype=np.int64)
        axes, start = _padded([part.box.start for part in parts], 0)
        _, shape = _padded([part.box.shape for part in parts], 1)
        dtype = np.array([_CODES[t.dtype] for t in targets], dtype=np.int64)
        _check_published(targets, parts, target, dtype, tensor, axes, start + shape, shards)

        item_size = np.array([ITEM_SIZES[name] for name in DTYPES], dtype=np.int64)[dtype]
        _, own_shape = _padded([t.shape for t in targets], 1, last=True)
        own_stride = np.empty_like(own_shape)
        own_stride[:, -1] = item_size
        for axis in range(MOST_AXES - 2, -1, -1):
            # An empty axis has no strides worth keeping, and no byte is read into it.
            own_stride[:, axis] = own_stride[:, axis + 1] * own_shape[:, axis + 1]
        nbytes = own_shape.prod(axis=1) * item_size
        ends = np.cumsum(-(-nbytes // ALIGNMENT) * ALIGNMENT)
        offsets = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(targets)]

        _, at = _padded([part.at for part in parts], 0, last=True)
        base = offsets[target] + (at * own_stride[target]).sum(axis=1)
        # The axes of box and target are matched from the last one. Where either has none, the box
        # has one element along the axis, and any stride will do.
        matching = np.minimum(np.arange(MOST_AXES) + MOST_AXES - axes[:, None], MOST_AXES - 1)
        stride = np.take_along_axis(own_stride[target], matching, axis=1)
        most = max(1, int(shards.tensors.axes.max(initial=0)))
        start, shape, stride = start[:, :most], shape[:, :most], stride[:, :most]
        return cls(
            offsets,
            int(nbytes.sum()),
            int(ends[-1]) if len(targets) else 0,
            target,
            tensor,
            start,
            start + shape,
            base,
            stride,
        )


def _padded(
    numbers: Collection[tuple[int, ...]], fill: int, *, last: bool = False
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How many numbers each row has, and the rows, filled up behind or, if ``last``, before."""
    counts = np.array([len(row) for row in numbers], dtype=np.int64)
    width = max(MOST_AXES, int(counts.max(initial=0)))
    columns = np.full((len(counts), width), fill, dtype=np.int64)
    place = np.arange(width)
    held = place >= width - counts[:, None] if last else place < counts[:, None]
    columns[held] = np.fromiter(chain.from_iterable(numbers), np.int64, int(counts.sum()))
    # A box of too many axes is refused later, by the number of its axes.
    return counts, columns[:, :MOST_AXES]


def _check_names(targets: Sequence[TargetTensor]) -> None:
    names = Counter(target.name for target in targets)
    if len(names) != len(targets):
        twice, times = names.most_common(1)[0]
        raise LayoutError(f"target {twice!r} comes {times} times; expected different names")


def _check_published(
    targets: Sequence[TargetTensor],
    parts: Sequence[TargetPart],
    target: npt.NDArray[np.int64],
    dtype: npt.NDArray[np.int64],
    tensor: npt.NDArray[np.int64],
    axes: npt.NDArray[np.int64],
    stop: npt.NDArray[np.int64],
    shards: ShardTable,
) -> None:
    """That what is wanted of each tensor fits what is published as that tensor."""
    sources = f"{len(shards.manifests)} sources of version {shards.manifests[0].version_id!r}"
    unknown = np.flatnonzero(tensor < 0).tolist()
    if unknown:
        first = unknown[0]
        raise LayoutError(
            f"target {targets[target[first]].name!r} needs {parts[first].tensor!r}, which none of "
            f"the {sources} publishes; they name {len(shards.tensor_rows)} tensors, and lack "
            f"{len({parts[index].tensor for index in unknown})} of those that are needed"
        )
    published = shards.tensors
    known_axes, known_shape = _padded(
        [part.box.shape if part.global_shape is None else part.global_shape for part in parts], 1
    )
    told = np.array([part.global_shape is not None for part in parts], dtype=np.bool_)
    full = published.shape[tensor]
    wrong = (
        (published.dtype[tensor] != dtype[target])
        | (published.axes[tensor] != axes)
        | (stop > full).any(axis=1)
        | (told & ((known_axes != axes) | (known_shape != full).any(axis=1)))
    )
    misfits = np.flatnonzero(wrong).tolist()
    if misfits:
        index = misfits[0]
        part, spec = parts[index], published.spec(int(tensor[index]))
        wanted = (
            f"of shape {part.global_shape}" if part.global_shape is not None else "of any shape"
        )
        raise LayoutError(
            f"target {targets[target[index]].name!r} needs {part.tensor!r} as "
            f"{targets[target[index]].dtype} {wanted}, of it {part.box}; the {sources} publish "
            f"{spec.dtype} of shape {spec.shape} ({len(misfits)} parts do not fit)"
        )
