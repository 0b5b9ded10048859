"""Bin packing of sequences into micro-batches of bounded size.

Every packer takes the sizes of the sequences, and a capacity that none of them exceeds. It returns
bins: lists of indices into ``sizes``, each index once, with a total size per bin of at most the
capacity. Packers need sizes only, so that a process without the tensors can plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dataplane_core import InvalidRequestError

Packer = Callable[[Sequence[int], int], list[list[int]]]


def pack_in_order(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Fill a bin until the next sequence does not fit, then open another; keep the order."""
    bins: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        if not bins or filled + size > capacity:
            bins.append([])
            filled = 0
        bins[-1].append(index)
        filled += size
    return bins


def pack_largest_first(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack first-fit decreasing: longest sequence first, each into the first bin where it fits.

    It needs at most 11/9 of the optimal number of bins, plus 6/9 (Dósa 2007).
    """
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[index]
        target = next((i for i, space in enumerate(free) if space >= size), None)
        if target is None:
            bins.append([])
            free.append(capacity)
            target = len(bins) - 1
        bins[target].append(index)
        free[target] -= size
    return bins


def pack_largest_first_modified(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack modified first-fit decreasing: fill the bins of large sequences before packing the rest.

    1. Each sequence above half the capacity opens a bin.
    2. Forward over the bins: add the longest sequence above a third of the capacity that fits.
    3. Backward over the bins that still have one sequence: add two above a sixth, if they fit.
    4. Forward: add whatever fits, longest first.
    5. Pack the remaining sequences first-fit decreasing.

    It needs at most 71/60 of the optimal number of bins, plus 31/6 (Johnson and Garey 1985).
    """
    # Capacity 20, sizes 12 9 6 5 4 4:   bins after
    #   1. large open bins               [12]
    #   2. medium, forward               [12]            12 + 9 exceeds 20
    #   3. two small, backward           [12 4 4]
    #   4. anything, forward             [12 4 4]
    #   5. the rest, largest first       [12 4 4] [9 6 5]
    descending = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    large = [i for i in descending if 2 * sizes[i] > capacity]
    medium = [i for i in descending if 2 * sizes[i] <= capacity < 3 * sizes[i]]
    small = [i for i in descending if 3 * sizes[i] <= capacity < 6 * sizes[i]]
    tiny = [i for i in descending if 6 * sizes[i] <= capacity]
    bins = [[index] for index in large]
    free = [capacity - sizes[index] for index in large]

    def move(pool: list[int], index: int, target: int) -> None:
        pool.remove(index)
        bins[target].append(index)
        free[target] -= sizes[index]

    def longest_fitting(pool: list[int], target: int) -> int | None:
        return next((index for index in pool if sizes[index] <= free[target]), None)

    for target in range(len(bins)):
        fitting = longest_fitting(medium, target)
        if fitting is not None:
            move(medium, fitting, target)
    for target in reversed(range(len(bins))):
        if len(bins[target]) > 1 or len(small) < 2:
            continue
        if sizes[small[-1]] + sizes[small[-2]] <= free[target]:
            move(small, small[-1], target)
            fitting = longest_fitting(small, target)
            if fitting is not None:
                move(small, fitting, target)
    rest = [*medium, *small, *tiny]
    for target in range(len(bins)):
        while (fitting := longest_fitting(rest, target)) is not None:
            move(rest, fitting, target)
    packed_rest = pack_largest_first([sizes[index] for index in rest], capacity)
    return bins + [[rest[i] for i in members] for members in packed_rest]


PACKERS: dict[str, Packer] = {
    "concatenative": pack_in_order,
    "order": pack_in_order,
    "first_fit_decreasing": pack_largest_first,
    "largest_first": pack_largest_first,
    "modified_first_fit_decreasing": pack_largest_first_modified,
}
"""Packers by the values of ``sequence_packing_args["algorithm"]``."""


def split_to_multiple(
    bins: list[list[int]], sizes: Sequence[int], multiple: int
) -> list[list[int]]:
    """Split bins until their number is a multiple of ``multiple``, so that ranks get equal counts.

    Each step splits the fullest bin with at least two sequences into two adjacent bins of the most
    even sizes.
    """
    bins = [list(members) for members in bins]
    needed = -(-len(bins) // multiple) * multiple
    if len(sizes) < needed:
        raise InvalidRequestError(
            f"sequence packing: {len(sizes)} sequences make {len(bins)} micro-batches, which "
            f"cannot be split evenly over {multiple} ranks; expected at least {needed} sequences"
        )
    while len(bins) < needed:
        fullest = max(
            (i for i, members in enumerate(bins) if len(members) > 1),
            key=lambda i: sum(sizes[index] for index in bins[i]),
        )
        members = bins[fullest]
        cut = _even_cut([sizes[index] for index in members])
        bins[fullest : fullest + 1] = [members[:cut], members[cut:]]
    return bins


def _even_cut(sizes: list[int]) -> int:
    """Return the index that cuts ``sizes`` into two parts with the most even sums."""
    total = sum(sizes)
    before = 0
    unevenness: list[int] = []
    for size in sizes[:-1]:
        before += size
        unevenness.append(abs(total - 2 * before))
    return 1 + unevenness.index(min(unevenness))
