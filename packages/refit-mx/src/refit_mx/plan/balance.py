"""Choice among sources that have the same bytes, so that all are read about equally."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

import numpy as np

from refit_mx.manifest.reads import Int64s


def spread(
    nbytes: Int64s,
    group: Sequence[int],
    sources: Sequence[Sequence[int]],
    load: Int64s,
    *,
    seed: int,
) -> list[int]:
    """Assign each item to the least loaded source of its group, the largest items first.

    Args:
        nbytes: int64 (items,).
        group: index into ``sources`` for each item.
        sources: distinct sources of each group, at least one.
        load: int64 (all sources,), bytes already assigned to each source.
        seed: seed of the choice among equally loaded sources; it should differ between receivers.

    Returns:
        The position of each item's source within its group.
    """
    loads = load.tolist()
    heaps = []
    for members in sources:
        preferred = _preferred(seed, len(members))
        heap = [
            (loads[source], (place - preferred) % len(members), place)
            for place, source in enumerate(members)
        ]
        heapify(heap)
        heaps.append(heap)
    sizes = nbytes.tolist()
    chosen = [0] * len(sizes)
    for item in np.argsort(-nbytes, kind="stable").tolist():
        members, heap = sources[group[item]], heaps[group[item]]
        known, preference, place = heap[0]
        # An entry's load is out of date if its source got items of another group. Loads only grow,
        # so the first entry whose load is current has the least.
        while known != loads[members[place]]:
            heapreplace(heap, (loads[members[place]], preference, place))
            known, preference, place = heap[0]
        chosen[item] = place
        loads[members[place]] += sizes[item]
        heapreplace(heap, (loads[members[place]], preference, place))
    return chosen


def _preferred(seed: int, size: int) -> int:
    """Return which of ``size`` sources a receiver prefers.

    It is the digit sum of the seed in base ``size``, modulo ``size``. So it varies between
    consecutive receivers, and between receivers ``size`` apart, which often want the same bytes.
    """
    if size < 2:
        return 0
    total = 0
    while seed:
        seed, digit = divmod(seed, size)
        total += digit
    return total % size
