"""Intersections of the boxes that sources hold with the boxes that a receiver wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from refit_mx.errors import LayoutError
from refit_mx.manifest.reads import Int64s
from refit_mx.plan.held_boxes import HeldBoxes
from refit_mx.plan.target_columns import TargetColumns

_MAX_PAIRS = 1 << 25
"""Limit for pairs of a source's shard and a wanted part of the same tensor. It keeps memory under
2 GB."""


@dataclass(frozen=True, eq=False)
class Overlaps:
    """Non-empty intersections of held boxes with wanted parts, one per row, ordered by part."""

    part: Int64s  # (n,), row of the `TargetColumns`
    held: Int64s  # (n,), index of the `HeldBoxes`
    row: Int64s  # (n,), row in those boxes
    start: Int64s  # (n, axes), in the published tensor; as many axes as the `TargetColumns`
    stop: Int64s  # (n, axes)

    def take(self, rows: Int64s) -> Overlaps:
        """Return the given rows, in the given order."""
        return Overlaps(
            self.part[rows],
            self.held[rows],
            self.row[rows],
            # For two-dimensional arrays `take` is several times as fast as indexing.
            self.start.take(rows, axis=0),
            self.stop.take(rows, axis=0),
        )


def find_overlaps(held: Sequence[HeldBoxes], wanted: TargetColumns, tensors: int) -> Overlaps:
    """Return every overlap of the wanted parts that a source has.

    Raises:
        LayoutError: a source has so many shards of wanted tensors that matching needs too much
            memory.
    """
    by_source = [_overlaps_of(boxes, index, wanted, tensors) for index, boxes in enumerate(held)]
    if len(by_source) == 1:
        return by_source[0]
    part = np.concatenate([each.part for each in by_source])
    together = Overlaps(
        part,
        np.concatenate([each.held for each in by_source]),
        np.concatenate([each.row for each in by_source]),
        np.concatenate([each.start for each in by_source]),
        np.concatenate([each.stop for each in by_source]),
    )
    return together.take(np.argsort(part, kind="stable"))


def _overlaps_of(held: HeldBoxes, index: int, wanted: TargetColumns, tensors: int) -> Overlaps:
    counts = held.counts(tensors)
    firsts = np.cumsum(counts) - counts
    part = np.flatnonzero(counts[wanted.tensor])
    row = firsts[wanted.tensor[part]]
    if counts.max(initial=0) > 1:
        times = counts[wanted.tensor[part]]
        if times.sum() > _MAX_PAIRS:
            raise LayoutError(
                f"the {len(held)} shards of a source and the {len(wanted.tensor)} wanted parts "
                f"make {times.sum()} pairs that share a tensor; expected at most {_MAX_PAIRS}"
            )
        within = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
        part, row = np.repeat(part, times), np.repeat(row, times) + within
    if held.by_tensor is not None:
        row = held.by_tensor[row]
    # Axis by axis, since most pairs are already disjoint along the first one.
    bounds: list[tuple[Int64s, Int64s]] = []
    for axis in range(wanted.start.shape[1]):
        start = np.maximum(wanted.start[part, axis], held.start[row, axis])
        stop = np.minimum(wanted.stop[part, axis], held.stop[row, axis])
        shares = start < stop
        if not shares.all():
            part, row, start, stop = part[shares], row[shares], start[shares], stop[shares]
            bounds = [(low[shares], high[shares]) for low, high in bounds]
        bounds.append((start, stop))
    return Overlaps(
        part,
        np.full(len(part), index, dtype=np.int64),
        row,
        np.stack([start for start, _ in bounds], axis=1),
        np.stack([stop for _, stop in bounds], axis=1),
    )
