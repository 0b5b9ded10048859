"""`Cut`: laying a shard out in the arena as generators take it apart.

A generator with tensor parallelism along the columns takes a part of every row. Where the shard
lies in the arena row by row that is one short read a row, and no digest that the publisher took is
of such a part, so each generator has to ask for some. Cut at the same columns, each part lies in
one piece with digests of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from refit_mx.errors import RefitConfigError
from refit_mx.layout import TargetTPLayout
from refit_mx.shard_sources import LocalShard
from refit_mx.tensor_types import Box


@dataclass(frozen=True)
class Cut:
    """Where the shards of one tensor are cut: at the borders of equal parts of the whole tensor.

    Any generator may still read any slice; those that take these parts read them fastest.

    Attributes:
        axis: counted from the first.
        parts: of the whole axis, as `TargetTPLayout` divides it; the generators' tensor-parallel
            size, or a multiple.

    Raises:
        RefitConfigError: a negative axis, or fewer than one part.
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
    """The shards, those of tensors that ``cuts`` names in parts; nothing is copied.

    Raises:
        RefitConfigError: a tensor has no such axis.
    """
    found: list[LocalShard] = []
    for shard in shards:
        cut = cuts.get(shard.name)
        found += [shard] if cut is None else _parts(shard, cut)
    return found


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
