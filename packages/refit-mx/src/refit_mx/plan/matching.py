"""What the boxes that sources hold share with the boxes that a receiver wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refit_mx.errors import LayoutError
from refit_mx.plan.held_boxes import HeldBoxes
from refit_mx.plan.target_columns import TargetColumns

_MOST_PAIRS = 1 << 25
"""Of one source's shards and wanted parts of the same tensor: what they take stays under 2 GB."""


@dataclass(frozen=True, eq=False)
class Pieces:
    """What one held box and one wanted part share, one a row, ordered by part; none is empty.

    Attributes:
        part: int64 (n,), row of the `TargetColumns`.
        held: int64 (n,), index of the `HeldBoxes`.
        row: int64 (n,), of its boxes.
        start: int64 (n, axes), as wide as the `TargetColumns`; in the published tensor.
        stop: int64 (n, axes).
    """

    part: npt.NDArray[np.int64]
    held: npt.NDArray[np.int64]
    row: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    stop: npt.NDArray[np.int64]

    def of(self, rows: npt.NDArray[np.int64]) -> Pieces:
        """Some of them, in this order."""
        return Pieces(
            self.part[rows],
            self.held[rows],
            self.row[rows],
            # Several times as fast as indexing, for rows of several numbers.
            self.start.take(rows, axis=0),
            self.stop.take(rows, axis=0),
        )


def shared_pieces(
    held: Sequence[HeldBoxes], live: Sequence[int], wanted: TargetColumns, tensors: int
) -> Pieces:
    """Every piece of what is wanted that some source has.

    Args:
        held: of all sources.
        live: indices of those to look at.
        wanted: parts.
        tensors: number of published tensors.

    Raises:
        LayoutError: a source has so many shards of one tensor that looking takes too long.
    """
    found = [_pieces(held[index], index, wanted, tensors) for index in live]
    if len(found) == 1:
        return found[0]
    empty = np.zeros(0, dtype=np.int64)
    wide = np.zeros((0, wanted.start.shape[1]), dtype=np.int64)
    part = np.concatenate([empty, *(some.part for some in found)])
    together = Pieces(
        part,
        np.concatenate([empty, *(some.held for some in found)]),
        np.concatenate([empty, *(some.row for some in found)]),
        np.concatenate([wide, *(some.start for some in found)]),
        np.concatenate([wide, *(some.stop for some in found)]),
    )
    return together.of(np.argsort(part, kind="stable"))


def _pieces(held: HeldBoxes, index: int, wanted: TargetColumns, tensors: int) -> Pieces:
    counts = held.counts(tensors)
    firsts = np.cumsum(counts) - counts
    part = np.flatnonzero(counts[wanted.tensor])
    row = firsts[wanted.tensor[part]]
    if counts.max(initial=0) > 1:
        times = counts[wanted.tensor[part]]
        if times.sum() > _MOST_PAIRS:
            raise LayoutError(
                f"the {len(held)} shards of a source and the {len(wanted.tensor)} wanted parts "
                f"make {times.sum()} pairs of one tensor; expected at most {_MOST_PAIRS}"
            )
        within = np.arange(times.sum()) - np.repeat(np.cumsum(times) - times, times)
        part, row = np.repeat(part, times), np.repeat(row, times) + within
    if held.by_tensor is not None:
        row = held.by_tensor[row]
    # Axis after axis, since most pairs have nothing in common along the first one already.
    bounds: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    for axis in range(wanted.start.shape[1]):
        start = np.maximum(wanted.start[part, axis], held.start[row, axis])
        stop = np.minimum(wanted.stop[part, axis], held.stop[row, axis])
        shares = start < stop
        if not shares.all():
            part, row, start, stop = part[shares], row[shares], start[shares], stop[shares]
            bounds = [(one[shares], other[shares]) for one, other in bounds]
        bounds.append((start, stop))
    return Pieces(
        part,
        np.full(len(part), index, dtype=np.int64),
        row,
        np.stack([start for start, _ in bounds], axis=1),
        np.stack([stop for _, stop in bounds], axis=1),
    )
