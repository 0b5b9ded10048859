"""Bin packing of sequences into micro-batches of bounded size.

Every packer takes the sizes of the sequences and a capacity that none of them exceeds, and returns
bins: lists of places in ``sizes``, each place once, the sizes of a bin adding up to the capacity at
most. A packer looks at sizes alone, so a plan can be made where the tensors are not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dataplane_core import InvalidRequestError

Packer = Callable[[Sequence[int], int], list[list[int]]]


def pack_in_order(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Fill a bin until the next sequence does not fit, then open the next one; order is kept."""
    bins: list[list[int]] = []
    filled = 0
    for place, size in enumerate(sizes):
        if not bins or filled + size > capacity:
            bins.append([])
            filled = 0
        bins[-1].append(place)
        filled += size
    return bins


def pack_largest_first(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: longest sequence first, each into the first bin with room.

    Needs at most 11/9 of the fewest possible bins, plus 6/9 (Dósa 2007).
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        size = sizes[place]
        target = next((i for i, left in enumerate(room) if left >= size), None)
        if target is None:
            bins.append([])
            room.append(capacity)
            target = len(bins) - 1
        bins[target].append(place)
        room[target] -= size
    return bins


def pack_largest_first_modified(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Modified first-fit decreasing: pairs each large sequence with the best company first.

    Sequences above half the capacity open the bins. Going forward, each bin takes the longest
    fitting one above a third; going backward, the bins that took none take two above a sixth; going
    forward again, each bin takes whatever fits, longest first. The rest is packed largest first.
    Needs at most 71/60 of the fewest possible bins, plus 31/6 (Johnson and Garey 1985).
    """
    descending = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    large = [place for place in descending if 2 * sizes[place] > capacity]
    medium = [p for p in descending if 2 * sizes[p] <= capacity < 3 * sizes[p]]
    small = [p for p in descending if 3 * sizes[p] <= capacity < 6 * sizes[p]]
    tiny = [p for p in descending if 6 * sizes[p] <= capacity]
    bins = [[place] for place in large]
    room = [capacity - sizes[place] for place in large]

    def move(pool: list[int], place: int, target: int) -> None:
        pool.remove(place)
        bins[target].append(place)
        room[target] -= sizes[place]

    def longest_fitting(pool: list[int], target: int) -> int | None:
        return next((place for place in pool if sizes[place] <= room[target]), None)

    for target in range(len(bins)):
        company = longest_fitting(medium, target)
        if company is not None:
            move(medium, company, target)
    for target in reversed(range(len(bins))):
        if len(bins[target]) > 1 or len(small) < 2:
            continue
        if sizes[small[-1]] + sizes[small[-2]] <= room[target]:
            move(small, small[-1], target)
            company = longest_fitting(small, target)
            if company is not None:
                move(small, company, target)
    rest = [*medium, *small, *tiny]
    for target in range(len(bins)):
        while (company := longest_fitting(rest, target)) is not None:
            move(rest, company, target)
    packed_rest = pack_largest_first([sizes[place] for place in rest], capacity)
    return bins + [[rest[i] for i in members] for members in packed_rest]


PACKERS: dict[str, Packer] = {
    "concatenative": pack_in_order,
    "order": pack_in_order,
    "first_fit_decreasing": pack_largest_first,
    "largest_first": pack_largest_first,
    "modified_first_fit_decreasing": pack_largest_first_modified,
}
"""Packers by the names that ``sequence_packing_args["algorithm"]`` takes."""


def split_to_multiple(
    bins: list[list[int]], sizes: Sequence[int], multiple: int
) -> list[list[int]]:
    """Split bins until their number is a multiple of ``multiple``, so that all ranks get as many.

    The fullest bin that has two sequences is split where its halves are most even; the halves stay
    side by side.

    Raises:
        InvalidRequestError: (a ValueError) if there are fewer sequences than bins needed.
    """
    bins = [list(members) for members in bins]
    needed = -(-len(bins) // multiple) * multiple
    if len(sizes) < needed:
        raise InvalidRequestError(
            f"sequence packing: {len(sizes)} sequences make {len(bins)} micro-batches, which "
            f"cannot be dealt evenly to {multiple} ranks; expected at least {needed} sequences"
        )
    while len(bins) < needed:
        fullest = max(
            (i for i, members in enumerate(bins) if len(members) > 1),
            key=lambda i: sum(sizes[place] for place in bins[i]),
        )
        members = bins[fullest]
        cut = _most_even_cut([sizes[place] for place in members])
        bins[fullest : fullest + 1] = [members[:cut], members[cut:]]
    return bins


def _most_even_cut(sizes: list[int]) -> int:
    total = sum(sizes)
    before = 0
    unevenness: list[int] = []
    for size in sizes[:-1]:
        before += size
        unevenness.append(abs(total - 2 * before))
    return 1 + unevenness.index(min(unevenness))
