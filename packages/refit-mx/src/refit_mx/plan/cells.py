"""Division of a wanted box by the held boxes that overlap it, so that each element is read once.

Parts of equal geometry are divided once: a model repeats few geometries over its layers. The edges
of all overlaps cut the box into a grid, whose cells are then joined where the same overlaps
hold them:

    overlap 0: rows 0-4, columns 0-4                columns 0-2   2-4     4-6
    overlap 1: rows 2-6, columns 2-6    rows 0-2    0             0       missing
    wanted:    rows 0-6, columns 0-6    rows 2-4    0             0 or 1  1
                                        rows 4-6    missing       1       1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from refit_mx.errors import LayoutError
from refit_mx.manifest.reads import Int64s

_MAX_CELLS = 1 << 18
_MAX_WORK = 1 << 24


@dataclass(frozen=True, eq=False)
class Division:
    """Disjoint boxes that together form the wanted box, relative to its first element."""

    start: Int64s  # (boxes, axes)
    stop: Int64s  # (boxes, axes)
    held: tuple[tuple[int, ...], ...]  # for each box, the overlaps that contain it; at least one
    # (start, stop) of disjoint boxes that no overlap covers. If there are any, the wanted box is
    # not available.
    missing: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


def divide(shape: Int64s, start: Int64s, stop: Int64s) -> Division:
    """Divide a box of ``shape``, int64 (axes,), which is not empty, by overlaps of it.

    Start and stop of the overlaps, int64 (overlaps, axes), are relative to the box's first element.
    No overlap is empty or extends beyond the box.

    Raises:
        LayoutError: the overlaps intersect in too many ways to divide the box in time.
    """
    alike: dict[bytes, list[int]] = {}
    for overlap, bounds in enumerate(np.concatenate([start, stop], axis=1)):
        alike.setdefault(bounds.tobytes(), []).append(overlap)
    members = [tuple(overlaps) for overlaps in alike.values()]
    first = [overlaps[0] for overlaps in members]
    start, stop = start[first], stop[first]
    # The overlaps cut the box into a grid; each grid cell is entirely inside or outside an overlap.
    cuts = [
        np.unique(np.concatenate([[0, shape[axis]], start[:, axis], stop[:, axis]]))
        for axis in range(len(shape))
    ]
    low = [np.searchsorted(cut, start[:, axis]) for axis, cut in enumerate(cuts)]
    high = [np.searchsorted(cut, stop[:, axis]) for axis, cut in enumerate(cuts)]
    cells = [len(cut) - 1 for cut in cuts]
    spans = np.stack(high, axis=1) - np.stack(low, axis=1)
    work = float(spans.astype(np.float64).prod(axis=1).sum())
    if np.prod(np.array(cells, dtype=np.float64)) > _MAX_CELLS or work > _MAX_WORK:
        raise LayoutError(
            f"{len(first)} different shards cut a box of shape {shape.tolist()} into a grid of "
            f"{cells} cells; expected at most {_MAX_CELLS} cells, which the shards cover at most "
            f"{_MAX_WORK} times"
        )
    regions = [
        tuple(slice(int(a[i]), int(b[i])) for a, b in zip(low, high, strict=True))
        for i in range(len(first))
    ]
    covers = np.zeros(cells, dtype=np.int32)
    for region in regions:
        covers[region] += 1
    if (covers == 1).all():
        return Division(start, stop, tuple(members), ())

    # Cells have the same label if the same overlaps hold them; label 0 means none. Each overlap
    # gives the cells that it covers new labels.
    label = np.zeros(cells, dtype=np.int64)
    held: list[tuple[int, ...]] = [()]
    for region, overlaps in zip(regions, members, strict=True):
        before, place = np.unique(label[region], return_inverse=True)
        label[region] = (len(held) + place).reshape(label[region].shape)
        held += [held[old] + overlaps for old in before.tolist()]
    boxes = []
    missing = []
    for number, a, b in _boxes_of_equal(label):
        bounds_of = (
            tuple(int(cut[i]) for cut, i in zip(cuts, a, strict=True)),
            tuple(int(cut[i]) for cut, i in zip(cuts, b, strict=True)),
        )
        if number:
            boxes.append((bounds_of, held[number]))
        else:
            missing.append(bounds_of)
    wide = (len(boxes), len(shape))
    return Division(
        np.array([box[0] for box, _ in boxes], dtype=np.int64).reshape(wide),
        np.array([box[1] for box, _ in boxes], dtype=np.int64).reshape(wide),
        tuple(overlaps for _, overlaps in boxes),
        tuple(missing),
    )


def _boxes_of_equal(label: Int64s) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Yield label, start and stop of disjoint boxes of equal labels that together form the grid.

    Each box grows from its first cell as far as possible, along the last axis first.
    """
    done = np.zeros(label.shape, dtype=np.bool_)
    for cell in product(*(range(size) for size in label.shape)):
        if done[cell]:
            continue
        number = label[cell]
        start, stop = list(cell), [index + 1 for index in cell]
        for axis in range(label.ndim - 1, -1, -1):
            while stop[axis] < label.shape[axis]:
                neighbors = tuple(
                    slice(stop[a], stop[a] + 1) if a == axis else slice(start[a], stop[a])
                    for a in range(label.ndim)
                )
                if (label[neighbors] != number).any() or done[neighbors].any():
                    break
                stop[axis] += 1
        done[tuple(slice(a, b) for a, b in zip(start, stop, strict=True))] = True
        yield int(number), cell, tuple(stop)
