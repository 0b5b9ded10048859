"""Which of several sources gives what they all have, so that none of them gives much more."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

import numpy as np
import numpy.typing as npt


def spread(
    nbytes: npt.NDArray[np.int64],
    group: Sequence[int],
    sources: Sequence[Sequence[int]],
    load: npt.NDArray[np.int64],
    *,
    seed: int,
) -> list[int]:
    """Give each item to the source of its group that has least to do, the largest items first.

    Args:
        nbytes: int64 (items,).
        group: of each item, index into ``sources``.
        sources: of each group, different ones, at least one.
        load: int64 (all sources,), bytes that each gives anyway.
        seed: receivers with different ones prefer different sources among those that have equally
            much to do.

    Returns:
        For each item the position of its source in its group.
    """
    now = load.tolist()
    heaps = []
    for members in sources:
        turn = _turn(seed, len(members))
        heap = [
            (now[source], (place - turn) % len(members), place)
            for place, source in enumerate(members)
        ]
        heapify(heap)
        heaps.append(heap)
    sizes = nbytes.tolist()
    chosen = [0] * len(sizes)
    for item in np.argsort(-nbytes, kind="stable").tolist():
        members, heap = sources[group[item]], heaps[group[item]]
        known, turn, place = heap[0]
        # A source may have got something as a member of another group since. Loads only grow, so
        # the first whose load is as the heap has it has the least.
        while known != now[members[place]]:
            heapreplace(heap, (now[members[place]], turn, place))
            known, turn, place = heap[0]
        chosen[item] = place
        now[members[place]] += sizes[item]
        heapreplace(heap, (now[members[place]], turn, place))
    return chosen


def _turn(seed: int, size: int) -> int:
    """Which of ``size`` sources a receiver prefers.

    The sum of the digits of the seed to the base ``size``: it goes around for receivers in a row,
    and also for those that are ``size`` apart, which are often those that want the same.
    """
    if size < 2:
        return 0
    total = 0
    while seed:
        seed, digit = divmod(seed, size)
        total += digit
    return total % size
