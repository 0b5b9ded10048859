"""`Choices`: the disjoint boxes that form the wanted parts, with the overlaps that supply each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refit_mx.manifest.reads import Int64s
from refit_mx.plan.cells import Division, divide
from refit_mx.plan.matching import Overlaps
from refit_mx.plan.target_columns import TargetColumns


@dataclass(frozen=True)
class Missing:
    """Boxes of a part that no source has, as (start, stop) in the published tensor.

    The part is a row of the `TargetColumns`. ``parts`` is the number of parts with missing boxes.
    """

    part: int
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    parts: int


@dataclass(frozen=True, eq=False)
class Choices:
    """Disjoint boxes that together form all wanted parts, one per row."""

    part: Int64s  # (n,), row of the `TargetColumns`
    start: Int64s  # (n, axes), in the published tensor
    stop: Int64s  # (n, axes)
    overlaps: Int64s  # (any,), rows of the `Overlaps`, grouped by box
    first: Int64s  # (n + 1,), index of each box's first overlap; every box has at least one


def choices(overlaps: Overlaps, wanted: TargetColumns) -> Choices | Missing:
    """Divide each part into boxes by the overlaps that sources hold; return gaps if there are any.

    Raises:
        LayoutError: overlaps intersect in too many ways.
    """
    parts = len(wanted.tensor)
    counts = np.bincount(overlaps.part, minlength=parts)
    firsts = np.cumsum(counts) - counts
    # Most parts in most plans: one overlap covers the complete part.
    alone = np.flatnonzero(
        (counts[overlaps.part] == 1)
        & (overlaps.start == wanted.start[overlaps.part]).all(axis=1)
        & (overlaps.stop == wanted.stop[overlaps.part]).all(axis=1)
    )
    rest: npt.NDArray[np.bool_] = np.all(wanted.stop > wanted.start, axis=1)
    rest[overlaps.part[alone]] = False

    columns = [
        (
            overlaps.part[alone],
            overlaps.start[alone],
            overlaps.stop[alone],
            alone,
            np.ones(len(alone), dtype=np.int64),
        )
    ]
    incomplete: list[tuple[int, Division]] = []
    incomplete_parts = 0
    for members in _by_geometry(overlaps, wanted, np.flatnonzero(rest), firsts, counts):
        first = int(members[0])
        own_overlaps = slice(int(firsts[first]), int(firsts[first] + counts[first]))
        origin = wanted.start[first]
        division = divide(
            wanted.stop[first] - origin,
            overlaps.start[own_overlaps] - origin,
            overlaps.stop[own_overlaps] - origin,
        )
        if division.missing:
            incomplete.append((first, division))
            incomplete_parts += len(members)
        else:
            columns.append(_applied(division, members, wanted, firsts))
    if incomplete:
        part_with_gap, division = min(incomplete, key=lambda entry: entry[0])
        origin_of = wanted.start[part_with_gap].tolist()
        boxes = tuple(
            (
                tuple(o + a for o, a in zip(origin_of, start, strict=True)),
                tuple(o + b for o, b in zip(origin_of, stop, strict=True)),
            )
            for start, stop in division.missing
        )
        return Missing(part_with_gap, boxes, incomplete_parts)
    part, start, stop, row, held = (np.concatenate(column) for column in zip(*columns, strict=True))
    ends = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(held)])
    return Choices(part, start, stop, row, ends)


def _by_geometry(
    overlaps: Overlaps, wanted: TargetColumns, rest: Int64s, firsts: Int64s, counts: Int64s
) -> list[Int64s]:
    """Group the parts of ``rest`` with equal shapes and equal overlaps relative to the part."""
    if not len(rest):
        return []
    origin = wanted.start[overlaps.part]
    bounds = np.concatenate([overlaps.start - origin, overlaps.stop - origin], axis=1)
    width = bounds.shape[1] * bounds.itemsize
    data = memoryview(bounds.tobytes())
    shapes = wanted.stop[rest] - wanted.start[rest]
    groups: dict[tuple[bytes, bytes], list[int]] = {}
    for part, shape, first, count in zip(
        rest.tolist(), shapes, firsts[rest].tolist(), counts[rest].tolist(), strict=True
    ):
        held = bytes(data[first * width : (first + count) * width])
        groups.setdefault((shape.tobytes(), held), []).append(part)
    return [np.array(members, dtype=np.int64) for members in groups.values()]


def _applied(
    division: Division, members: Int64s, wanted: TargetColumns, firsts: Int64s
) -> tuple[Int64s, Int64s, Int64s, Int64s, Int64s]:
    """Apply the division of one part to all ``members``, which have the same geometry."""
    boxes, axes = division.start.shape
    origin = wanted.start[members][:, None, :]
    held = np.array([len(overlaps) for overlaps in division.held], dtype=np.int64)
    flat = np.array([overlap for overlaps in division.held for overlap in overlaps], dtype=np.int64)
    return (
        np.repeat(members, boxes),
        (origin + division.start).reshape(-1, axes),
        (origin + division.stop).reshape(-1, axes),
        # A division counts overlaps from the first one of its part.
        (firsts[members][:, None] + flat).ravel(),
        np.tile(held, len(members)),
    )
