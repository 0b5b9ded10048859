"""`plan_reads`: the reads that supply everything a receiver wants.

Every wanted byte is read exactly once, from one source of the version in the `ShardTable`. The work
is done on columns: a large model has a hundred thousand tensors.

    w, 8 rows of 6, held by rows            wanted: columns 3 to 6 of w
    A, replica A'  rows 0-4                 . . . x x x   from A or A', the less loaded
    B              rows 4-8                 . . . x x x   from B only

    wanted parts x held boxes -> overlaps of boxes with parts                matching.find_overlaps
    overlaps of a part        -> disjoint boxes, each with its holders       choices.choices
    boxes of several sources  -> split, each to the least loaded source      balance.spread
    boxes of one source       -> rows of its ReadTable, by shard             strided.read_rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from refit_mx.errors import LayoutError
from refit_mx.manifest.reads import Int64s, ReadTable
from refit_mx.plan.balance import spread
from refit_mx.plan.choices import Choices, Missing, choices
from refit_mx.plan.matching import Overlaps, find_overlaps
from refit_mx.plan.shards import ShardTable
from refit_mx.plan.strided import read_rows
from refit_mx.plan.target_columns import TargetColumns
from refit_mx.plan.target_tensors import TargetTensor

SPLIT_BYTES = 16 << 20
"""Approximate size limit of a box if several sources hold it; a larger one is split."""
_NAMED_SOURCES = 4


@dataclass(frozen=True, eq=False)
class Plan:
    """The reads of one receiver.

    Attributes:
        source_reads: for each source in use, its index in the `ShardTable` and the reads from its
            arena, in the order of its shards.
        shard_of_read: for each source in use, int32 (reads,), the row of the source's shards that
            each read belongs to.
        offsets: int64 (targets,), first byte of each target in scratch; multiples of 256.
        nbytes: bytes of all reads: the size of all targets.
        scratch_bytes: size of the scratch: the targets and the gaps between them.
        bytes_by_source: int64 (sources of the `ShardTable`,), bytes read from each.
    """

    source_reads: tuple[tuple[int, ReadTable], ...]
    shard_of_read: tuple[npt.NDArray[np.int32], ...]
    offsets: Int64s
    nbytes: int
    scratch_bytes: int
    bytes_by_source: Int64s


@dataclass(frozen=True, eq=False)
class _Assignment:
    """Boxes as in `Choices`, with the source chosen for each, one per row.

    ``source`` is an index in the `ShardTable`, ``row`` a row of that source's shards; both int64
    (n,).
    """

    part: Int64s
    start: Int64s
    stop: Int64s
    source: Int64s
    row: Int64s


def plan_reads(shards: ShardTable, targets: Sequence[TargetTensor], *, seed: int = 0) -> Plan:
    """Plan the reads for a receiver's targets.

    If several sources have the same bytes, they are read from the source that this receiver reads
    least from; large boxes are split among these sources.

    Args:
        shards: shards of the sources of one version.
        targets: wanted tensors.
        seed: receivers use different seeds, such as their rank, to prefer different sources of the
            same bytes. Equal arguments give equal plans.

    Raises:
        LayoutError: these sources do not publish a wanted tensor or a part of it, or publish it
            with another dtype or shape. The message names the tensor and its missing part.
        ValueError: ``seed`` is negative.
    """
    if seed < 0:
        raise ValueError(f"plan_reads: seed {seed}; expected 0 or more")
    wanted = TargetColumns.of(targets, shards)
    sources_of_held: list[list[int]] = [[] for _ in shards.held]
    for source, held in enumerate(shards.held_of_source):
        sources_of_held[held].append(source)
    overlaps = find_overlaps(shards.held, wanted, len(shards.tensors.names))
    boxes = choices(overlaps, wanted)
    if isinstance(boxes, Missing):
        raise LayoutError(_describe_missing(boxes, shards, targets, wanted))
    assignment = _assign_sources(shards, wanted, overlaps, boxes, sources_of_held, seed)
    return _as_plan(shards, wanted, assignment)


def _nbytes(
    shards: ShardTable, wanted: TargetColumns, part: Int64s, start: Int64s, stop: Int64s
) -> Int64s:
    item_size: Int64s = shards.tensors.item_size[wanted.tensor[part]]
    return (stop - start).prod(axis=1) * item_size


def _assign_sources(
    shards: ShardTable,
    wanted: TargetColumns,
    overlaps: Overlaps,
    boxes: Choices,
    sources_of_held: Sequence[Sequence[int]],
    seed: int,
) -> _Assignment:
    """Choose one source for each box. A box that several sources hold is undecided at first."""
    first_overlap = boxes.overlaps[boxes.first[:-1]]
    only_source = np.array([s[0] if len(s) == 1 else -1 for s in sources_of_held], dtype=np.int64)
    source = only_source[overlaps.held[first_overlap]]
    source[np.diff(boxes.first) > 1] = -1
    nbytes = _nbytes(shards, wanted, boxes.part, boxes.start, boxes.stop)
    assigned, undecided = np.flatnonzero(source >= 0), np.flatnonzero(source < 0)
    if not len(undecided):
        return _Assignment(boxes.part, boxes.start, boxes.stop, source, overlaps.row[first_overlap])

    load = np.zeros(len(shards.manifests), dtype=np.int64)
    np.add.at(load, source[assigned], nbytes[assigned])
    group, members, places = _groups(overlaps, boxes, undecided, sources_of_held)
    several = np.array([len(sources) > 1 for sources in members], dtype=np.bool_)[group]
    origin, start, stop = _split(
        boxes.start[undecided],
        boxes.stop[undecided],
        np.where(several, -(-nbytes[undecided] // SPLIT_BYTES), 1),
    )
    box, group = undecided[origin], group[origin]
    box_bytes = _nbytes(shards, wanted, boxes.part[box], start, stop)
    picked = np.array(spread(box_bytes, group.tolist(), members, load, seed=seed), dtype=np.int64)
    # Concatenate all groups, so that ``at`` is the place of each box's source and overlap.
    sizes = np.array([len(sources) for sources in members], dtype=np.int64)
    at = (np.cumsum(sizes) - sizes)[group] + picked
    source_of = np.array([s for sources in members for s in sources], dtype=np.int64)
    place_of = np.array([p for group_places in places for p in group_places], dtype=np.int64)
    overlap = boxes.overlaps[boxes.first[box] + place_of[at]]
    return _Assignment(
        np.concatenate([boxes.part[assigned], boxes.part[box]]),
        np.concatenate([boxes.start[assigned], start]),
        np.concatenate([boxes.stop[assigned], stop]),
        np.concatenate([source[assigned], source_of[at]]),
        np.concatenate([overlaps.row[first_overlap[assigned]], overlaps.row[overlap]]),
    )


def _groups(
    overlaps: Overlaps, boxes: Choices, undecided: Int64s, sources_of_held: Sequence[Sequence[int]]
) -> tuple[Int64s, list[list[int]], list[list[int]]]:
    """Group the undecided boxes by the sources that have them.

    Returns:
        The group of each undecided box; the sources of each group; and for each of those sources,
        which of the box's overlaps it has.
    """
    held = overlaps.held[boxes.overlaps]
    group_of: dict[bytes, int] = {}
    members: list[list[int]] = []
    places: list[list[int]] = []
    group = np.empty(len(undecided), dtype=np.int64)
    firsts, ends = boxes.first[undecided].tolist(), boxes.first[undecided + 1].tolist()
    for number, (first, end) in enumerate(zip(firsts, ends, strict=True)):
        holders = held[first:end]
        key = holders.tobytes()
        index = group_of.get(key)
        if index is None:
            index = group_of[key] = len(members)
            place_of: dict[int, int] = {}
            for place, holder in enumerate(holders.tolist()):
                for source in sources_of_held[holder]:
                    # A source may have a box twice; either works.
                    place_of.setdefault(source, place)
            sources = sorted(place_of)
            members.append(sources)
            places.append([place_of[source] for source in sources])
        group[number] = index
    return group, members, places


def _split(start: Int64s, stop: Int64s, times: Int64s) -> tuple[Int64s, Int64s, Int64s]:
    """Split boxes along their first axis longer than 1, into at most ``times`` parts.

    Returns:
        For each part, its box, its start and its stop.
    """
    shape = stop - start
    axis = (shape > 1).argmax(axis=1)
    length = np.take_along_axis(shape, axis[:, None], axis=1)[:, 0]
    times = np.minimum(times, length)
    which = np.repeat(np.arange(len(times)), times)
    step = np.arange(len(which)) - np.repeat(np.cumsum(times) - times, times)
    rows = np.arange(len(which))
    begin = start[which, axis[which]]
    new_start, new_stop = start[which], stop[which]
    new_start[rows, axis[which]] = begin + length[which] * step // times[which]
    new_stop[rows, axis[which]] = begin + length[which] * (step + 1) // times[which]
    return which, new_start, new_stop


def _as_plan(shards: ShardTable, wanted: TargetColumns, assignment: _Assignment) -> Plan:
    max_rows = max((len(held) for held in shards.held), default=0) + 1
    # Order by source, then by row of its shards.
    key = assignment.source * max_rows + assignment.row
    order = np.argsort(key, kind="stable")
    source = assignment.source[order]
    bytes_by_source = np.zeros(len(shards.manifests), dtype=np.int64)
    source_reads = []
    shard_of_read = []
    for index in np.unique(source).tolist():
        rows_of = order[
            np.searchsorted(source, index) : np.searchsorted(source, index, side="right")
        ]
        part, row = assignment.part[rows_of], assignment.row[rows_of]
        start, stop = assignment.start.take(rows_of, axis=0), assignment.stop.take(rows_of, axis=0)
        held = shards.boxes(index)
        axes = start.shape[1]
        item_size = shards.tensors.item_size[wanted.tensor[part]]
        origin = held.start.take(row, axis=0)[:, :axes]
        held_shape = held.stop.take(row, axis=0)[:, :axes] - origin
        # Bytes between neighbors along each axis of a shard, which is C-ordered.
        stride = np.empty_like(start)
        stride[:, -1] = item_size
        for axis in range(axes - 2, -1, -1):
            stride[:, axis] = stride[:, axis + 1] * held_shape[:, axis + 1]
        base, dst_stride = wanted.base[part], wanted.stride.take(part, axis=0)
        part_start = wanted.start.take(part, axis=0)
        rows, box = read_rows(
            shards.arena_offsets[index][row] + ((start - origin) * stride).sum(axis=1),
            base + ((start - part_start) * dst_stride).sum(axis=1),
            stop - start,
            stride,
            dst_stride,
            item_size,
        )
        reads = ReadTable(rows)
        source_reads.append((index, reads))
        shard_of_read.append(row[box].astype(np.int32))
        bytes_by_source[index] = reads.nbytes
    return Plan(
        tuple(source_reads),
        tuple(shard_of_read),
        wanted.offsets,
        wanted.nbytes,
        wanted.scratch_bytes,
        bytes_by_source,
    )


def _describe_missing(
    missing: Missing, shards: ShardTable, targets: Sequence[TargetTensor], wanted: TargetColumns
) -> str:
    spec = shards.tensors.spec(int(wanted.tensor[missing.part]))
    start, stop = missing.boxes[0]
    ranges = [f"{a}:{b}" for a, b, _ in zip(start, stop, spec.shape, strict=False)]
    partial = [
        axis for axis, size in enumerate(spec.shape) if (start[axis], stop[axis]) != (0, size)
    ]
    if len(partial) == 1:
        what = f"rows {ranges[partial[0]]} of axis {partial[0]}"
    else:
        what = f"[{', '.join(ranges)}]" if partial else "any part"
    checked = shards.manifests
    named = ", ".join(f"{m.source_slot_id} ({m.worker_id})" for m in checked[:_NAMED_SOURCES])
    more = len(checked) - _NAMED_SOURCES
    others = len(missing.boxes) - 1
    return (
        f"target {targets[wanted.target[missing.part]].name!r}: no source has {what}"
        + (f" and {others} other boxes" if others else "")
        + f" of {spec.name!r}, shape {spec.shape}"
        + (f"; {missing.parts - 1} other parts are incomplete too" if missing.parts > 1 else "")
        + f"; checked {len(checked)} sources of version {checked[0].version_id!r}: {named}"
        + (f" and {more} more" if more > 0 else "")
    )
