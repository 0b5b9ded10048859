"""`TargetColumns`: a receiver's targets in columns, checked against the published tensors."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from refit_mx.errors import LayoutError
from refit_mx.layout import MAX_AXES
from refit_mx.manifest.reads import Int64s
from refit_mx.plan.shards import ShardTable
from refit_mx.plan.target_tensors import TargetPart, TargetTensor
from refit_mx.plan.tensor_columns import DTYPE_CODES, ITEM_SIZE_OF_CODE

ALIGNMENT = 256
"""Alignment of targets in scratch, in bytes: that of CUDA, sufficient for any dtype."""


@dataclass(frozen=True, eq=False)
class TargetColumns:
    """The parts of targets, one per row, and their places in scratch."""

    offsets: Int64s  # (targets,), first byte of each target in scratch
    nbytes: int  # size of all targets, without the gaps between them
    scratch_bytes: int  # size of all targets with the gaps
    target: Int64s  # (parts,), index of the target
    tensor: Int64s  # (parts,), row of the `ShardTable`'s tensors
    # (parts, axes), start of the box in the published tensor, padded with 0; has as many axes as
    # the widest published tensor, at least 1.
    start: Int64s
    stop: Int64s  # (parts, axes), padded with 1
    base: Int64s  # (parts,), first byte of the part in scratch
    # (parts, axes), bytes in scratch between neighbors along each axis of the published tensor;
    # arbitrary where the part has one element along it.
    stride: Int64s

    @classmethod
    def of(cls, targets: Sequence[TargetTensor], shards: ShardTable) -> TargetColumns:
        """Place the targets one after another in scratch.

        Raises:
            LayoutError: a part's tensor is not published, has another dtype or shape, or does not
                contain the part's box.
        """
        parts = [part for target in targets for part in target.parts]
        target = np.repeat(
            np.arange(len(targets)), np.array([len(t.parts) for t in targets], dtype=np.int64)
        )
        rows = shards.tensor_rows
        tensor = np.array([rows.get(part.tensor, -1) for part in parts], dtype=np.int64)
        axes, start = _padded([part.box.start for part in parts], 0)
        _, shape = _padded([part.box.shape for part in parts], 1)
        dtype = np.array([DTYPE_CODES[t.dtype] for t in targets], dtype=np.int64)
        _check_published(targets, parts, target, dtype, tensor, axes, start + shape, shards)

        item_size = ITEM_SIZE_OF_CODE[dtype]
        _, target_shape = _padded([t.shape for t in targets], 1, align_last=True)
        target_stride = np.empty_like(target_shape)
        target_stride[:, -1] = item_size
        for axis in range(MAX_AXES - 2, -1, -1):
            # Strides of an empty axis do not matter: no byte is read into it.
            target_stride[:, axis] = target_stride[:, axis + 1] * target_shape[:, axis + 1]
        nbytes = target_shape.prod(axis=1) * item_size
        ends = np.cumsum(-(-nbytes // ALIGNMENT) * ALIGNMENT)
        offsets = np.concatenate([np.zeros(1, np.int64), ends[:-1]])[: len(targets)]

        _, at = _padded([part.at for part in parts], 0, align_last=True)
        base = offsets[target] + (at * target_stride[target]).sum(axis=1)
        # Axes of box and target are matched from the last one. Where one lacks an axis, the box has
        # one element along it, and any stride works.
        matching = np.minimum(np.arange(MAX_AXES) + MAX_AXES - axes[:, None], MAX_AXES - 1)
        stride = np.take_along_axis(target_stride[target], matching, axis=1)
        maximum = max(1, int(shards.tensors.axes.max(initial=0)))
        start, shape, stride = start[:, :maximum], shape[:, :maximum], stride[:, :maximum]
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
    numbers: Collection[tuple[int, ...]], fill: int, *, align_last: bool = False
) -> tuple[Int64s, Int64s]:
    """Return the length of each row, and the padded rows; ``align_last`` pads in front."""
    counts = np.array([len(row) for row in numbers], dtype=np.int64)
    width = max(MAX_AXES, int(counts.max(initial=0)))
    columns = np.full((len(counts), width), fill, dtype=np.int64)
    place = np.arange(width)
    held = place >= width - counts[:, None] if align_last else place < counts[:, None]
    columns[held] = np.fromiter(chain.from_iterable(numbers), np.int64, int(counts.sum()))
    # A box with too many axes is refused later, by its number of axes.
    return counts, columns[:, :MAX_AXES]


def _check_published(
    targets: Sequence[TargetTensor],
    parts: Sequence[TargetPart],
    target: Int64s,
    dtype: Int64s,
    tensor: Int64s,
    axes: Int64s,
    stop: Int64s,
    shards: ShardTable,
) -> None:
    """Check that the wanted parts match the published tensors."""
    sources = f"{len(shards.manifests)} sources of version {shards.manifests[0].version_id!r}"
    unknown = np.flatnonzero(tensor < 0).tolist()
    if unknown:
        first = unknown[0]
        raise LayoutError(
            f"target {targets[target[first]].name!r} needs {parts[first].tensor!r}, which none of "
            f"the {sources} publishes; they name {len(shards.tensor_rows)} tensors, and lack "
            f"{len({parts[index].tensor for index in unknown})} of the needed ones"
        )
    published = shards.tensors
    known_axes, known_shape = _padded(
        [part.box.shape if part.global_shape is None else part.global_shape for part in parts], 1
    )
    has_shape = np.array([part.global_shape is not None for part in parts], dtype=np.bool_)
    full = published.shape[tensor]
    wrong = (
        (published.dtype[tensor] != dtype[target])
        | (published.axes[tensor] != axes)
        | (stop > full).any(axis=1)
        | (has_shape & ((known_axes != axes) | (known_shape != full).any(axis=1)))
    )
    misfits = np.flatnonzero(wrong).tolist()
    if misfits:
        index = misfits[0]
        part, spec = parts[index], published.spec(int(tensor[index]))
        wanted = (
            f"of shape {part.global_shape}" if part.global_shape is not None else "of any shape"
        )
        raise LayoutError(
            f"target {targets[target[index]].name!r} needs {part.box} of {part.tensor!r} as "
            f"{targets[target[index]].dtype} {wanted}; the {sources} publish {spec.dtype} of shape "
            f"{spec.shape} ({len(misfits)} parts do not match)"
        )
